"""One training at a time, in a process of its own: the page stays alive, can be reloaded, and can stop the run."""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from workbench.base.errors import ConfigurationError
from workbench.base.launch import Child, LostChildError, warm_child, warm_up
from workbench.journal.record import Record
from workbench.recipe import Recipe
from workbench.training.elsewhere import await_record, execute_in_child, prepare_in_child

# seconds between two looks at the record on disk
REFRESH_S = 0.5
# seconds until Stop is noticed while the libraries are loaded
STOP_CHECK_S = 0.05
# the message of a run that was stopped before its record began
STOPPED = "stopped"


class Runner:
    """The runner starts, watches and stops runs. A process has one, `RUNNER`, to which every panel attaches.

    A watcher has three methods, which are mostly called in a thread of the runner:

        on_begin(recipe)         a training of this recipe goes on
        on_progress(record)      its record so far, after REFRESH_S seconds or more, if there is a new step
        on_end(record, message)  its finished record, None if it was refused before it began; and, if it failed, why

    Attributes:
        recipe: the recipe that is training; None: nothing is.
    """

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self._watchers: WeakSet[Any] = WeakSet()
        self._thread = threading.Thread()
        self._lock = threading.Lock()
        # the process that trains
        self._child: Child | None = None
        self._is_stopped = False
        # the record that the watchers have seen last
        self._last: Record | None = None

    @property
    def running(self) -> bool:
        return self.recipe is not None

    def attach(self, watcher: Any) -> None:
        """Notify this watcher from now on, and at once of a training that goes on."""
        self._watchers.add(watcher)
        if self.recipe is not None:
            watcher.on_begin(self.recipe)
            if self._last is not None:
                watcher.on_progress(self._last)

    def detach(self, watcher: Any) -> None:
        self._watchers.discard(watcher)

    def start(self, recipe: Recipe, folder: Path | None = None, **options: Any) -> None:
        """Train a recipe; the options are those of `run`. Raises ConfigurationError if a training is running."""
        with self._lock:
            if self.recipe is not None:
                raise ConfigurationError(f"start: {self.recipe.title} is training in this kernel. Wait, or stop it.")
            self.recipe = recipe
        self._child = None
        self._is_stopped = False
        self._last = None
        self._notify("on_begin", recipe)
        self._thread = threading.Thread(target=self._train, args=(recipe, folder, options), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the run as Ctrl-C does, or by force if it does not end within `launch.PATIENCE_S` seconds."""
        self._is_stopped = True
        if self._child is not None:
            self._child.cancel()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the training has ended; for tests."""
        self._thread.join(seconds)

    # ---- in the thread of a training ----

    def _train(self, recipe: Recipe, folder: Path | None, options: dict[str, Any]) -> None:
        record = None
        message = ""
        try:
            with closing(self._warm_child()) as child:
                self._child = child
                self._raise_if_stopped()
                begun = child.call(prepare_in_child, recipe, str(Path.cwd()), folder, options)
                child.ask(execute_in_child)
                ending = in_a_thread(await_record, child, begun, folder)
                while wait([ending], REFRESH_S).not_done:
                    self._report_progress(begun.path(folder))
                record = ending.result()
        except LostChildError as lost:
            # the process ended before its record began
            message = STOPPED if self._is_stopped else str(lost)
        except Exception as error:
            message = str(error) or type(error).__name__
        self._child = None
        self.recipe = None
        self._notify("on_end", record, message)
        warm_up()  # the next training finds its libraries loaded

    def _warm_child(self) -> Child:
        """Wait until a process to train in has loaded its libraries. After Stop it loads on, for the next training."""
        loading = in_a_thread(warm_child, "training")
        while wait([loading], STOP_CHECK_S).not_done:
            if self._is_stopped:
                loading.add_done_callback(close_unneeded)
            self._raise_if_stopped()
        child: Child = loading.result()
        return child

    def _raise_if_stopped(self) -> None:
        """Raise LostChildError after Stop."""
        if self._is_stopped:
            raise LostChildError(STOPPED)

    def _report_progress(self, path: Path) -> None:
        """Pass the record on disk to the watchers if it has a new step."""
        with suppress(ConfigurationError):  # the record is not on disk yet
            record = Record.read(path)
            if record.steps_done > (self._last.steps_done if self._last else 0):
                self._last = record
                self._notify("on_progress", record)

    def _notify(self, event: str, *facts: Any) -> None:
        """Call this method of every watcher.

        An error of a watcher ends no training: a kernel that ends may have closed its event loop already.
        """
        for watcher in list(self._watchers):
            try:
                getattr(watcher, event)(*facts)
            except Exception:
                traceback.print_exc()


def in_a_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a thread, and return the future of its result. The thread keeps no interpreter from ending."""
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(function(*args))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def close_unneeded(answer: "Future[Child]") -> None:
    with suppress(Exception):
        answer.result().close()


RUNNER = Runner()
