"""One training at a time, in a thread of its own: the page stays alive, can be reloaded, and can stop the run."""

import ctypes
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from workbench.recipe import Recipe
from workbench.records.record import Record, read_all
from workbench.run.run import run

REFRESH_S = 0.5
STOP_PATIENCE_S = 0.6


class Runner:
    """Starts, watches and stops `run`.

    Args:
        progressed: told of the record so far, at most every REFRESH_S seconds. Called in the training's thread.
        ended: told of the finished record and, if the run failed, of the error's words. Called in that thread too, when
            the next training may already begin.
    """

    def __init__(
        self,
        progressed: Callable[[Record], None],
        ended: Callable[[Record | None, str], None],
        folder: Path | None = None,
    ) -> None:
        self.progressed, self.ended, self.folder = progressed, ended, folder
        self._thread: threading.Thread | None = None
        self._training = False
        self._stop = threading.Event()
        self._shown_at, self._began = 0.0, ""
        self._first_at, self._steps = 0.0, 0

    @property
    def running(self) -> bool:
        return self._training and self._thread is not None and self._thread.is_alive()

    @property
    def seconds_per_step(self) -> float:
        """Of the present run, from its first step on; 0 while nothing is known."""
        return (time.monotonic() - self._first_at) / self._steps if self._steps > 0 else 0.0

    def start(self, recipe: Recipe, memory_cap: str | None = None, sample_tokens: int = 0) -> None:
        """Does nothing if a training is running."""
        if not self.running:
            self._training = True
            self._stop.clear()
            self._steps = -1
            self._began = datetime.now(UTC).isoformat(timespec="milliseconds")
            arguments = (recipe, memory_cap, sample_tokens)
            self._thread = threading.Thread(target=self._train, args=arguments, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the run after its present step, or in the middle of a step that takes longer than STOP_PATIENCE_S."""
        self._stop.set()
        threading.Timer(STOP_PATIENCE_S, self._insist).start()

    def wait(self, seconds: float | None = None) -> None:
        """Until the training has ended; for tests."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _insist(self) -> None:
        """Raise KeyboardInterrupt in the training's thread, as Ctrl-C does in the main one.

        Python's C API documentation, `PyThreadState_SetAsyncExc`.
        """
        if self._stop.is_set() and self._thread is not None and self._thread.is_alive():
            identity = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(KeyboardInterrupt))

    def _observe(self, so_far: Callable[[], Record]) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        self._steps += 1
        self._first_at = self._first_at if self._steps else time.monotonic()
        if time.monotonic() - self._shown_at >= REFRESH_S:
            self.progressed(so_far())
            self._shown_at = time.monotonic()

    def _train(self, recipe: Recipe, memory_cap: str | None, sample_tokens: int) -> None:
        record, words = None, ""
        try:
            record = run(
                recipe, memory_cap=memory_cap, sample_tokens=sample_tokens, observe=self._observe, folder=self.folder
            )
        except KeyboardInterrupt:
            words = "stopped"
        except Exception as error:
            words = str(error) or type(error).__name__
        left = record or self._last_of(recipe)
        self._stop.clear()
        self._training = False
        self.ended(left, words)

    def _last_of(self, recipe: Recipe) -> Record | None:
        """What the failed run has left; None if it was refused before it began."""
        techniques = recipe.to_dict()["techniques"]  # the model may have been `auto`
        mine = (r for r in reversed(read_all(self.folder)) if r.recipe["techniques"] == techniques)
        return next((record for record in mine if record.created_at >= self._began), None)
