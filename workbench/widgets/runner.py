"""One training at a time, in a process of its own: the page stays alive, can be reloaded, and can stop the run."""

import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, suppress
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
        self._seen: list[tuple[int, float]] = []  # the steps that were shown, and when

    @property
    def running(self) -> bool:
        return self.recipe is not None

    @property
    def seconds_per_step(self) -> float:
        """Of the present run, from the first step that was seen on; 0 while nothing is known."""
        if len(self._seen) < 2:
            return 0.0
        first_step, first_at_s = self._seen[0]
        last_step, last_at_s = self._seen[-1]
        return (last_at_s - first_at_s) / (last_step - first_step)

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
        self._seen = []
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
                self._stop_through(child)
                begun = child.call(prepare_here, recipe, str(Path.cwd()), folder, options)
                child.ask(execute_here)
                with self._looking_at(begun.path(folder)):
                    record = finished(child, begun, folder)
        except LostChildError as lost:  # before its record began
            message = STOPPED if self._is_stopped else str(lost)
        except Exception as error:
            message = str(error) or type(error).__name__
        self._child = None
        self.recipe = None
        self._tell("ended", record, message)
        warm_up()  # for the next one

    def _warm_child(self) -> Child:
        """The process to train in, once the libraries are loaded.

        Raises LostChildError: the run is to be stopped first. What loads them goes on, for the next run.
        """
        answer: Future[Child] = Future()

        def get() -> None:
            try:
                answer.set_result(warm_child("training"))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=get, daemon=True).start()
        while not answer.done():
            if self._is_stopped:
                answer.add_done_callback(close_unneeded)
                raise LostChildError(STOPPED)
            wait([answer], LOOK_S)
        return answer.result()

    def _stop_through(self, child: Child) -> None:
        """From now on, this is the process to cancel. Raises LostChildError: the run is to be stopped already."""
        self._child = child
        if self._is_stopped:
            raise LostChildError(STOPPED)

    @contextmanager
    def _looking_at(self, path: Path) -> Iterator[None]:
        """Meanwhile, what the record on disk says is told, from a thread."""
        has_ended = threading.Event()
        looker = threading.Thread(target=self._look, args=(path, has_ended), daemon=True)
        looker.start()
        try:
            yield
        finally:
            has_ended.set()
            looker.join()  # so that nothing is told after the end

    def _look(self, path: Path, has_ended: threading.Event) -> None:
        steps_shown = 0
        while not has_ended.wait(REFRESH_S):
            with suppress(ConfigurationError):  # it is not on disk yet
                record = Record.read(path)
                if record.steps_done > steps_shown:
                    steps_shown = record.steps_done
                    self._last = record
                    self._seen.append((steps_shown, time.monotonic()))
                    self._tell("progressed", record)

    def _tell(self, event: str, *facts: Any) -> None:
        """What goes wrong with one who looks on, as when a kernel that ends has closed its loop, ends no training."""
        for watcher in list(self._watchers):
            try:
                getattr(watcher, event)(*facts)
            except Exception:
                traceback.print_exc()


def close_unneeded(answer: "Future[Child]") -> None:
    with suppress(Exception):
        answer.result().close()


RUNNER = Runner()
