"""A process that answers calls, in an environment of its own: what a shadow patches and what an emulated GPU needs are
kept out of the caller's.

Calls and answers are pickles on pipes. It is a plain child with the caller's import path: `multiprocessing` would
import the caller's main module in it, which runs a script that has no `if __name__ == "__main__"`.
"""

import atexit
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from workbench.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.imports import imported
from workbench.measure.garbage import collect_garbage, freeze_living_objects
from workbench.paths import PIN

START = "import sys; sys.path[:] = {path!r}; {pin}; from workbench.gpus.process import serve; serve({modules!r})"


class Worker:
    """A child, started at once, kept for the next call; whoever made it must `close` it.

    Args:
        environment: the child's environment variables.
        modules: what it imports before the first call comes.
        path: in front of its import path.
        name: for errors, as in "The prediction worker ended".
    """

    def __init__(
        self, environment: Mapping[str, str], modules: Sequence[str], path: Sequence[str] = (), name: str = "worker"
    ) -> None:
        self.owner, self.name = os.getpid(), name
        self.words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the worker lives
        self.process = subprocess.Popen(
            [sys.executable, "-c", START.format(path=[*path, *sys.path], pin=PIN, modules=tuple(modules))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            env=environment,
            start_new_session=True,  # Ctrl-C is the caller's, who then ends the worker
        )
        self.calls, self.answers = cast("tuple[IO[bytes], IO[bytes]]", (self.process.stdin, self.process.stdout))

    def alive(self) -> bool:
        """False in a fork of the owner too: the pipes are the owner's."""
        return self.owner == os.getpid() and self.process.poll() is None

    def killed_by(self) -> str:
        """What signal ended it, in words; empty if it ended otherwise."""
        return f"signal {-self.process.returncode}" if (self.process.returncode or 0) < 0 else ""

    def call(
        self, function: Callable[..., Any], *args: Any, time_limit: float = threading.TIMEOUT_MAX, **kwargs: Any
    ) -> Any:
        """What the function, which the child imports by its name, returns there.

        Args:
            time_limit: in seconds; a child that takes longer is ended.

        Raises:
            WorkbenchError: as raised there.
            UnavailableError: it took longer than the limit.
            RuntimeError: another failure there, or the end of the child; with the last words it wrote.
        """
        import dill  # sends what a notebook or a script has defined along, where pickle sends its name

        try:
            written = dill.dumps((function, args, kwargs), recurse=True)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"{self.name}: what it is asked cannot be sent to another process ({error}). Let your own technique "
                "hold plain settings; a function cannot observe what happens there."
            ) from None
        clock, began = threading.Timer(time_limit, self.process.kill), time.monotonic()
        clock.start()
        try:
            self.calls.write(written)
            self.calls.flush()
            kind, answer = pickle.load(self.answers)
        except (EOFError, OSError, pickle.UnpicklingError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)  # or one that was killed would still look alive
            if time.monotonic() - began >= time_limit:
                raise UnavailableError(
                    f"{self.name}: no answer within {time_limit:g} s, so it was ended; the next call starts another. "
                    "Ask for a smaller model, batch or length, or give it a longer time_limit."
                ) from None
            if signal_in_words := self.killed_by():
                raise UnavailableError(
                    f"{self.name}: it was killed in the middle ({signal_in_words}), as where the "
                    "machine's memory runs out; the next call starts another. Ask for less if that is killed too."
                ) from None
            self.words.seek(0)
            last = self.words.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"The {self.name} ended unexpectedly. Its last words:\n{last}") from None
        finally:
            clock.cancel()
        if kind == "answer":
            return answer
        raise answer

    def close(self) -> None:
        if self.owner != os.getpid():
            return
        self.process.kill()
        self.process.wait()
        for stream in (self.calls, self.answers, self.words):
            with suppress(BrokenPipeError):  # what was not read before the end
                stream.close()


class Fork(Worker):
    """A worker that has at once what another one has imported, as a fork of it. On Linux.

    Args:
        trunk: the other one. It must not have used a GPU, which a fork could not go on with.
        environment: the fork's environment variables, for what is asked of them from now on.
    """

    def __init__(self, trunk: Worker, environment: Mapping[str, str], name: str) -> None:
        (asked, self_asks), (self_hears, answered) = os.pipe(), os.pipe()
        self.owner, self.name, self.words = os.getpid(), name, os.fdopen(os.dup(trunk.words.fileno()), "rb")
        self.calls, self.answers = os.fdopen(self_asks, "wb"), os.fdopen(self_hears, "rb")
        pipes = [f"/proc/{os.getpid()}/fd/{end}" for end in (asked, answered)]
        try:
            self.process: Any = Grandchild(trunk.call(fork, dict(environment), *pipes))
        finally:
            os.close(asked)
            os.close(answered)

    def killed_by(self) -> str:
        return "a signal"  # whatever else goes wrong in a fork is its answer


class Grandchild:
    """What `Popen` is for a child, as far as a worker asks. Only its parent is told how it ends."""

    def __init__(self, pid: int) -> None:
        self.pid, self.handle = pid, os.fdopen(os.pidfd_open(pid), "rb", buffering=0)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle.fileno(), signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Not empty once it has ended."""
        return select.select([self.handle], [], [], timeout)[0]

    def poll(self) -> list[Any] | None:
        return self.wait(0.0) or None


class Kept:
    """Workers by name, each started at its first call and kept for the next, ended with their caller.

    Args:
        at_most: so many live at a time; the oldest goes when there are more.
    """

    def __init__(self, at_most: int = 1) -> None:
        self.at_most, self.workers, self.lock = at_most, dict[str, Worker](), threading.RLock()
        atexit.register(self.end)

    def call(
        self, name: str, made: Callable[[], Worker], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """`Worker.call` of the worker with this name; `made` makes it if there is none that lives."""
        with self.lock:
            worker = self.start(name, made)
            try:
                return worker.call(function, *args, **kwargs)
            except WorkbenchError:
                raise
            except BaseException:
                self.end(name)  # an answer may still come: the next call must not get it
                raise

    def start(self, name: str, made: Callable[[], Worker]) -> Worker:
        """The worker; a new one loads its libraries while the caller does something else."""
        with self.lock:
            if name not in self.workers or not self.workers[name].alive():
                self.end(name)
                if len(self.workers) >= self.at_most:
                    self.end(next(iter(self.workers)))
                self.workers[name] = made()
            return self.workers[name]

    def end(self, name: str | None = None) -> None:
        """End the worker of this name, or all."""
        for one in [one for one in self.workers if name in (None, one)]:
            self.workers.pop(one).close()


# ---- in the child ----

_pipes: list[IO[bytes]] = []  # that it serves


def serve(modules: Sequence[str]) -> None:
    """Answer calls until the caller closes the pipe. Whatever a library prints goes to standard error."""
    calls = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with suppress(OSError):  # Linux: if the host's memory runs out, this process goes, and not the caller
        Path("/proc/self/oom_score_adj").write_text("1000")
    for name in modules:
        imported(name)
    _answer(calls, answers)


def _answer(*pipes: IO[bytes]) -> None:
    answered, _pipes[:] = True, pipes
    while answered:
        with freeze_living_objects():  # a collection then leaves half a million objects of the libraries out
            answered = _answer_one(*pipes)
            collect_garbage()  # of this call, before it is frozen by the next; the caller has his answer already


def fork(environment: Mapping[str, str], calls: str, answers: str) -> int:
    """The number of a fork of this process, which has this environment and serves the pipes of these names."""
    with open(calls, "rb") as asked, open(answers, "wb") as told:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for it
        if number := os.fork():
            return number
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for pipe in _pipes:
                pipe.close()  # or nobody would see it when the process that was forked ends
            os.environ.clear()
            os.environ.update(environment)
            _answer(asked, told)
        finally:
            os._exit(0)


def _answer_one(calls: IO[bytes], answers: IO[bytes]) -> bool:
    """False once the caller has closed the pipe."""
    try:
        reply = _reply(*pickle.load(calls))
    except EOFError:
        return False
    except Exception as error:  # a class that cannot be imported here
        reply = "error", ConfigurationError(f"What was sent to another process cannot be read there: {error}")
    pickle.dump(reply, answers)
    answers.flush()
    return True


def _reply(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    import traceback

    try:
        return "answer", function(*args, **kwargs)
    except WorkbenchError as error:
        return "error", error
    except Exception:
        return "error", RuntimeError(traceback.format_exc())
