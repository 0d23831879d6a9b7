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
from workbench.training.elsewhere import execute_here, finished, prepare_here

REFRESH_S = 0.5
LOOK_S = 0.05  # how soon Stop is heard while the libraries are loaded
STOPPED = "stopped"  # before its record began


class Runner:
    """Starts, watches and stops runs. A process has one, `RUNNER`, to which every panel attaches.

    Whoever looks on has three methods, which are mostly called in a thread of the runner:

        began(recipe)           a training of this recipe goes on
        progressed(record)      its record so far, about every REFRESH_S seconds
        ended(record, message)  its finished record, None if it was refused before it began; and, if it failed, why
    """

    def __init__(self) -> None:
        self.recipe: Recipe | None = None  # of the training that goes on
        self._watchers: WeakSet[Any] = WeakSet()
        self._thread = threading.Thread()
        self._lock = threading.Lock()
        self._child: Child | None = None  # that trains
        self._is_stopped = False
        self._last: Record | None = None  # that was shown

    @property
    def running(self) -> bool:
        return self.recipe is not None

    def attach(self, watcher: Any) -> None:
        """Tell it from now on, and at once what goes on."""
        self._watchers.add(watcher)
        if self.recipe is not None:
            watcher.began(self.recipe)
            if self._last is not None:
                watcher.progressed(self._last)

    def detach(self, watcher: Any) -> None:
        self._watchers.discard(watcher)

    def start(self, recipe: Recipe, folder: Path | None = None, **options: Any) -> None:
        """Train a recipe. Options are those of `run`. Raises ConfigurationError if a training is running."""
        with self._lock:
            if self.recipe is not None:
                raise ConfigurationError(f"start: {self.recipe.title} is training in this kernel. Wait, or stop it.")
            self.recipe = recipe
        self._child = None
        self._is_stopped = False
        self._last = None
        self._tell("began", recipe)
        self._thread = threading.Thread(target=self._train, args=(recipe, folder, options), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the run, as Ctrl-C does; by force if it does not end within `launch.PATIENCE_S`."""
        self._is_stopped = True
        if self._child is not None:
            self._child.cancel()

    def wait(self, seconds: float | None = None) -> None:
        """Until the training that was started has ended; for tests."""
        self._thread.join(seconds)

    # ---- in the thread of a training ----

    def _train(self, recipe: Recipe, folder: Path | None, options: dict[str, Any]) -> None:
        record = None
        message = ""
        try:
            with closing(self._warm_child()) as child:
                self._child = child
                self._heed_stop()
                begun = child.call(prepare_here, recipe, str(Path.cwd()), folder, options)
                child.ask(execute_here)
                ending = in_a_thread(finished, child, begun, folder)
                while wait([ending], REFRESH_S).not_done:
                    self._look(begun.path(folder))
                record = ending.result()
        except LostChildError as lost:  # before its record began
            message = STOPPED if self._is_stopped else str(lost)
        except Exception as error:
            message = str(error) or type(error).__name__
        self._child = None
        self.recipe = None
        self._tell("ended", record, message)
        warm_up()  # for the next one

    def _warm_child(self) -> Child:
        """The process to train in, once the libraries are loaded; what loads them goes on after Stop, for the next."""
        loading = in_a_thread(warm_child, "training")
        while wait([loading], LOOK_S).not_done:
            if self._is_stopped:
                loading.add_done_callback(close_unneeded)
            self._heed_stop()
        child: Child = loading.result()
        return child

    def _heed_stop(self) -> None:
        """Raises LostChildError: the run is to be stopped already."""
        if self._is_stopped:
            raise LostChildError(STOPPED)

    def _look(self, path: Path) -> None:
        """Tell what the record on disk says, if that is news."""
        with suppress(ConfigurationError):  # it is not on disk yet
            record = Record.read(path)
            if record.steps_done > (self._last.steps_done if self._last else 0):
                self._last = record
                self._tell("progressed", record)

    def _tell(self, event: str, *facts: Any) -> None:
        """What goes wrong with one who looks on, as when a kernel that ends has closed its loop, ends no training."""
        for watcher in list(self._watchers):
            try:
                getattr(watcher, event)(*facts)
            except Exception:
                traceback.print_exc()


def in_a_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """What it will return. The thread keeps no interpreter from ending."""
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
