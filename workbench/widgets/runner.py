"""One training at a time, in a thread of its own: the page stays alive, can be reloaded, and can stop the run."""

import ctypes
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from workbench.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.records.record import Record, read_all
from workbench.run.run import run

REFRESH_S = 0.5
STOP_PATIENCE_S = 0.6


class Watcher(Protocol):
    """Who looks on. All but the first `began` are called in the training's thread."""

    def began(self, recipe: Recipe) -> None:
        """A training of this recipe goes on."""

    def progressed(self, record: Record) -> None:
        """Its record so far, at most every REFRESH_S seconds."""

    def ended(self, record: Record | None, words: str) -> None:
        """Its finished record, None if it was refused before it began; and, if it failed, the error's words."""


class Runner:
    """Starts, watches and stops `run`. A process has one, `RUNNER`, to which every panel attaches."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None  # of the training that goes on
        self._watchers: WeakSet[Watcher] = WeakSet()
        self._thread = threading.Thread()
        self._stop, self._interrupted, self._lock = False, False, threading.Lock()
        self._last: Record | None = None
        self._shown_at, self._began = 0.0, ""
        self._first_at, self._steps = 0.0, 0

    @property
    def running(self) -> bool:
        return self.recipe is not None

    @property
    def seconds_per_step(self) -> float:
        """Of the present run, from its first step on; 0 while nothing is known."""
        return (time.monotonic() - self._first_at) / self._steps if self._steps > 0 else 0.0

    def attach(self, watcher: Watcher) -> None:
        """Tell it from now on, and at once what goes on."""
        self._watchers.add(watcher)
        if self.recipe is not None:
            watcher.began(self.recipe)
            if self._last is not None:
                watcher.progressed(self._last)

    def detach(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def start(self, recipe: Recipe, **options: Any) -> None:
        """Options are those of `run`. Raises ConfigurationError if a training is running."""
        with self._lock:
            if self.recipe is not None:
                raise ConfigurationError(f"start: {self.recipe.label} is training in this kernel. Wait, or stop it.")
            self.recipe, self._last = recipe, None
        self._stop, self._interrupted, self._steps = False, False, -1
        self._began = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._tell(lambda watcher: watcher.began(recipe))
        self._thread = threading.Thread(target=self._train, args=(recipe, options), name="playground", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the run after its present step, or in the middle of a step that takes longer than STOP_PATIENCE_S."""
        self._stop = True
        threading.Timer(STOP_PATIENCE_S, self._insist).start()

    def wait(self, seconds: float | None = None) -> None:
        """Until the training that was started has ended; for tests."""
        self._thread.join(seconds)

    def _insist(self) -> None:
        """Raise KeyboardInterrupt in the training's thread, as Ctrl-C does in the main one. Once: a second would end
        what the first lets it do, write its record and tell of its end."""
        with self._lock:
            if self._stop and not self._interrupted:
                self._interrupted = True
                self._send(ctypes.py_object(KeyboardInterrupt))

    def _send(self, exception: Any) -> None:
        """To the training's thread; None takes back what is on its way.

        Python's C API documentation, `PyThreadState_SetAsyncExc`.
        """
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), exception)

    def _observe(self, so_far: Callable[[], Record]) -> None:
        """After each step. Who is asked to stop and still trains has not heard of it yet, or never will: what is raised
        in a finalizer, Python prints and forgets."""
        with self._lock:
            if self._stop:
                self._stop = False
                self._send(None)
                raise KeyboardInterrupt
        self._steps += 1
        self._first_at = self._first_at if self._steps else time.monotonic()
        if time.monotonic() - self._shown_at >= REFRESH_S:
            self._last = record = so_far()
            self._tell(lambda watcher: watcher.progressed(record))
            self._shown_at = time.monotonic()

    def _train(self, recipe: Recipe, options: dict[str, Any]) -> None:
        record, words = None, ""
        try:
            try:
                record = run(recipe, observe=self._observe, **options)
            finally:
                with self._lock:  # an interrupt that is on its way comes here, and none after it
                    self._stop = False
        except KeyboardInterrupt:
            words = "stopped"
        except Exception as error:
            words = str(error) or type(error).__name__
        left = record or self._last_of(options.get("folder"))
        self.recipe = None
        self._tell(lambda watcher: watcher.ended(left, words))

    def _tell(self, tell: Callable[[Watcher], None]) -> None:
        """What goes wrong with one who looks on, as when a kernel that ends has closed its loop, ends no training."""
        for watcher in list(self._watchers):
            try:
                tell(watcher)
            except Exception:
                traceback.print_exc()

    def _last_of(self, folder: Path | None) -> Record | None:
        """What the failed run has left, and not that of another kernel; None if it was refused before it began."""
        mine = (record for record in reversed(read_all(folder)) if record.owner.get("pid") == os.getpid())
        return next((record for record in mine if record.created_at >= self._began), None)


RUNNER = Runner()
