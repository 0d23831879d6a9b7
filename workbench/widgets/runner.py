"""One training at a time, in a process of its own: the page stays alive, can be reloaded, and can stop the run."""

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from workbench.errors import ConfigurationError
from workbench.launch import Child, LostChildError, warm_child, warm_up
from workbench.recipe import Recipe
from workbench.records.record import Record
from workbench.run.elsewhere import execute_here, finished, prepare_here

REFRESH_S = 0.5
STOPPED = "stopped"  # before its record began
LOOK_S = 0.05  # how often it is looked whether the run has ended, or is to be stopped


class Watcher(Protocol):
    """Who looks on. All but the first `began` are called in a thread of the runner."""

    def began(self, recipe: Recipe) -> None:
        """A training of this recipe goes on."""

    def progressed(self, record: Record) -> None:
        """Its record so far, about every REFRESH_S seconds."""

    def ended(self, record: Record | None, message: str) -> None:
        """Its finished record, None if it was refused before it began; and, if it failed, the error's words."""


class Runner:
    """Starts, watches and stops runs. A process has one, `RUNNER`, to which every panel attaches."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None  # of the training that goes on
        self._watchers: WeakSet[Watcher] = WeakSet()
        self._thread = threading.Thread()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._last: Record | None = None  # that was shown
        self._last_at_s = 0.0
        self._first: tuple[int, float] | None = None  # the first step that was seen, and when

    @property
    def running(self) -> bool:
        return self.recipe is not None

    @property
    def seconds_per_step(self) -> float:
        """Of the present run, from the first step that was seen on; 0 while nothing is known."""
        if self._first is None or self._last is None:
            return 0.0
        first_step, first_at_s = self._first
        steps = self._last.steps_done - first_step
        return (self._last_at_s - first_at_s) / steps if steps > 0 else 0.0

    def attach(self, watcher: Watcher) -> None:
        """Tell it from now on, and at once what goes on."""
        self._watchers.add(watcher)
        if self.recipe is not None:
            watcher.began(self.recipe)
            if self._last is not None:
                watcher.progressed(self._last)

    def detach(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def start(self, recipe: Recipe, folder: Path | None = None, **options: Any) -> None:
        """Train a recipe. Options are those of `run`. Raises ConfigurationError if a training is running."""
        with self._lock:
            if self.recipe is not None:
                raise ConfigurationError(f"start: {self.recipe.label} is training in this kernel. Wait, or stop it.")
            self.recipe = recipe
        self._last = None
        self._first = None
        self._stop.clear()
        self._tell(lambda watcher: watcher.began(recipe))
        self._thread = threading.Thread(
            target=self._train, args=(recipe, folder, options), name="playground", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the run, as Ctrl-C does; by force if it does not end within `launch.PATIENCE_S`."""
        self._stop.set()

    def wait(self, seconds: float | None = None) -> None:
        """Until the training that was started has ended; for tests."""
        self._thread.join(seconds)

    def _train(self, recipe: Recipe, folder: Path | None, options: dict[str, Any]) -> None:
        record = None
        message = ""
        try:
            record = self._trained(recipe, folder, options)
        except LostChildError as lost:  # before its record began
            message = STOPPED if self._stop.is_set() else str(lost)
        except Exception as error:
            message = str(error) or type(error).__name__
        self.recipe = None
        self._tell(lambda watcher: watcher.ended(record, message))
        warm_up()  # for the next one

    def _trained(self, recipe: Recipe, folder: Path | None, options: dict[str, Any]) -> Record:
        """The record of a run in a child. Raises what refuses it before it begins."""
        child: Child = self._while_looking(lambda: warm_child("training"))
        with closing(child):
            child.ask(prepare_here, recipe, str(Path.cwd()), folder, options)
            begun: Record = self._while_looking(child.answer, child)
            child.ask(execute_here)
            record: Record = self._while_looking(lambda: finished(child, begun, folder), child, begun.path(folder))
            return record

    def _while_looking(self, wait: Callable[[], Any], child: Child | None = None, path: Path | None = None) -> Any:
        """What a function returns that waits for the child. Meanwhile the child is cancelled if the run is to be
        stopped, and the watchers are told what the record on disk says."""
        answer = in_a_thread(wait)
        shown_at_s = time.monotonic()
        while not answer.done():
            if self._stop.is_set():
                if child is None:  # it is not there yet, and will not be needed
                    answer.add_done_callback(close_result)
                    raise LostChildError(STOPPED)
                child.cancel()
            if path and time.monotonic() - shown_at_s >= REFRESH_S:
                self._show(path)
                shown_at_s = time.monotonic()
            time.sleep(LOOK_S)
        return answer.result()

    def _show(self, path: Path) -> None:
        with suppress(ConfigurationError):  # it is not on disk yet
            record = Record.read(path)
            if record.steps_done == (self._last.steps_done if self._last else 0):
                return
            self._last = record
            self._last_at_s = time.monotonic()
            if self._first is None:
                self._first = (record.steps_done, self._last_at_s)
            self._tell(lambda watcher: watcher.progressed(record))

    def _tell(self, tell: Callable[[Watcher], None]) -> None:
        """What goes wrong with one who looks on, as when a kernel that ends has closed its loop, ends no training."""
        for watcher in list(self._watchers):
            try:
                tell(watcher)
            except Exception:
                traceback.print_exc()


def in_a_thread(function: Callable[[], Any]) -> "Future[Any]":
    """What a function returns or raises, once it does."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="waiting for the training", daemon=True).start()
    return future


def close_result(answer: "Future[Child]") -> None:
    with suppress(Exception):
        answer.result().close()


RUNNER = Runner()
