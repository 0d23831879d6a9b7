"""The process in which predictions are made: started at the first, kept for the next, ended with its caller.

A shadow patches torch and transformers for the whole process, every thread of it, so it has one of its own. Requests
and answers are pickles on pipes. The worker is a plain child with the caller's import path: `multiprocessing` would
import the caller's main module in it, which runs a script that has no `if __name__ == "__main__"`.
"""

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from workbench.errors import ConfigurationError, WorkbenchError
from workbench.measure.garbage import freeze_living_objects, pause_collector
from workbench.run.world import LAUNCHERS_VARIABLES

START = "import sys; sys.path[:] = {path!r}; from workbench.predict.worker import serve; serve()"

_lock = threading.Lock()
_worker: "_Worker | None" = None


def ask(*request: Any) -> Any:
    """What `predict.prediction.compute` returns in the worker for these arguments.

    Raises:
        WorkbenchError: as raised there.
        RuntimeError: the worker failed; the end of what it wrote to standard error is in the message.
    """
    with _lock:
        worker = _living()
        try:
            return worker.ask(request)
        except WorkbenchError:
            raise
        except BaseException:
            close()  # an answer may still come: the next request must not get it
            raise


def start() -> None:
    """Start the worker if there is none: it loads its libraries while the caller does something else."""
    with _lock:
        _living()


def _living() -> "_Worker":
    global _worker
    if _worker is None or not _worker.alive():
        _worker = _Worker()
    return _worker


def close() -> None:
    """End the worker if there is one; the next request starts another."""
    global _worker
    worker, _worker = _worker, None
    if worker is not None and worker.owner == os.getpid():
        worker.close()


atexit.register(close)


class _Worker:
    def __init__(self) -> None:
        self.owner = os.getpid()
        self.words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the worker lives
        self.process = subprocess.Popen(
            [sys.executable, "-c", START.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is the caller's, who then ends the worker
        )

    def alive(self) -> bool:
        """False in a fork of the owner too: the pipes are the owner's."""
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, request: tuple[Any, ...]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            written = pickle.dumps(request)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"predict: this recipe cannot be sent to another process ({error}). "
                "Define your own techniques at the top of an importable module."
            ) from None
        try:
            self.process.stdin.write(written)
            self.process.stdin.flush()
            kind, answer = pickle.load(self.process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise RuntimeError(f"The prediction worker ended unexpectedly. Its last words:\n{self._tail()}") from None
        if kind == "answer":
            return answer
        raise answer

    def _tail(self) -> str:
        self.words.seek(0)
        return self.words.read()[-2000:].decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.words):
            if stream is not None:
                stream.close()


def _environment() -> dict[str, str]:
    """The caller's, without GPUs, and without what a launcher or a trainer in the caller has left there."""
    others = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    kept = {name: value for name, value in others.items() if not name.startswith("ACCELERATE_")}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}


# ---- in the worker ----


def serve() -> None:
    """Answer requests until the caller closes the pipe. Whatever a library prints goes to standard error."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _load()
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        except Exception as error:  # a class that cannot be imported here
            reply: tuple[str, Any] = ("error", ConfigurationError(f"predict: the worker cannot read this: {error}"))
        else:
            reply = _answer(request)
        pickle.dump(reply, answers)
        answers.flush()


def _answer(request: tuple[Any, ...]) -> tuple[str, Any]:
    import traceback

    from workbench.predict.prediction import compute

    try:
        with freeze_living_objects():
            return "answer", compute(*request)
    except WorkbenchError as error:
        return "error", error
    except Exception:
        return "error", RuntimeError(traceback.format_exc())


def _load() -> None:
    with pause_collector():
        import workbench.predict.prediction
        import workbench.predict.shadow.step  # noqa: F401
