"""The one way to have something done by another Python process.

    launch(function, argument)            in a new interpreter, which ends with its answer
    child = start(function, argument)     the same without waiting, for whoever may want to stop it:
    child.cancel()                        as Ctrl-C does, so that a run ends its own record; then by force
    Kept().call("name", make, function)   in a process that stays for the next call

A function and its arguments go there by dill, so they may contain what a notebook has defined. A child has its own
environment: what a shadow patches, and what a card in software needs, is kept out of the caller's.

A new interpreter takes seconds to import torch and transformers. A `Fork` has imported at once what another child, its
trunk, has imported: on Linux. Elsewhere, and where the trunk has died, there are interpreters only.

Requests and answers are pickles on two pipes. When the caller dies they close, and the child ends itself, whatever it
is doing. It is a plain child with the caller's import path: `multiprocessing` would import the caller's main module in
it, which runs a script that has no `if __name__ == "__main__"`.
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
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from workbench.base.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.base.garbage import collect_garbage, freeze_living_objects
from workbench.base.imports import imported
from workbench.base.paths import PIN

SERVE = "import sys; sys.path[:] = {path!r}; {pin}; from workbench.base.launch import serve; serve({modules!r})"
PATIENCE_S = 0.6  # between asking a child to stop and ending it
FOREVER_S = threading.TIMEOUT_MAX
LAST_CHARACTERS = 2000  # of what a child that died has written

Function = Callable[..., Any]


class LostChildError(UnavailableError):
    """A process ended without an answer: it was killed, was cancelled, or took too long."""


def launch(
    function: Function,
    *args: Any,
    time_limit: float = FOREVER_S,
    **options: Any,
) -> Any:
    """What a function returns in a new interpreter, started as `start` does. Raises as `Child.answer` does.

    Args:
        time_limit: in seconds; a child that takes longer is ended.
    """
    with closing(start(function, *args, **options)) as child:
        return child.answer(time_limit)


def start(
    function: Function,
    *args: Any,
    environment: Mapping[str, str] | None = None,
    path: Sequence[str] = (),
    output: IO[Any] | int | None = None,
    name: str = "child",
    **kwargs: Any,
) -> "Child":
    """A child that works, which has an `answer` and must be closed. The other arguments are those of `Child`.

    Args:
        environment: by default that of this process.
    """
    if environment is None:
        environment = os.environ
    child = Child(environment, path=path, output=output, name=name)
    child.ask(function, *args, **kwargs)
    return child


class Child:
    """A process that answers one request after another; whoever started it must `close` it.

    Args:
        environment: its environment variables.
        modules: what it imports before the first request comes.
        path: in front of its import path.
        output: where it writes what would go to standard output or error, a file or its number; by default a file of
            its own, whose end an error quotes.
        name: for errors, as in "The prediction worker ended".
    """

    process: Any  # psutil's Popen, or the Process of a fork

    def __init__(
        self,
        environment: Mapping[str, str],
        modules: Sequence[str] = (),
        path: Sequence[str] = (),
        output: IO[Any] | int | None = None,
        name: str = "worker",
    ) -> None:
        self.owner = os.getpid()
        self.name = name
        self.messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the child lives
        self.cancelling: threading.Timer | None = None
        code = SERVE.format(path=[*path, *sys.path], pin=PIN, modules=tuple(modules))
        self.process = psutil.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output or self.messages,
            env=environment,
            start_new_session=True,  # Ctrl-C is the caller's, who then ends the child
        )
        self.requests: IO[bytes] = self.process.stdin
        self.answers: IO[bytes] = self.process.stdout

    def call(
        self,
        function: Function,
        *args: Any,
        time_limit: float = FOREVER_S,
        **kwargs: Any,
    ) -> Any:
        """What the function returns in the child. Raises as `ask` and `answer` do."""
        self.ask(function, *args, **kwargs)
        return self.answer(time_limit)

    def ask(self, function: Function, *args: Any, **kwargs: Any) -> None:
        """Send a request. Raises ConfigurationError: it cannot be sent to another process."""
        # sends what a notebook or a script has defined along, where pickle sends its name
        import dill

        try:
            request = dill.dumps((function, args, kwargs), recurse=True)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"{self.name}: what it is asked cannot be sent to another process ({error}). Let "
                "your own technique hold plain settings; a function cannot observe what happens "
                "there."
            ) from None
        with suppress(OSError):  # a child that has died is told of by `answer`
            self.requests.write(request)
            self.requests.flush()

    def answer(self, time_limit: float = FOREVER_S) -> Any:
        """Wait for the answer to what was asked.

        Args:
            time_limit: in seconds; a child that takes longer is ended.

        Raises:
            WorkbenchError: as raised there.
            LostChildError: it took longer than the limit, was killed, or was cancelled.
            RuntimeError: another failure there, with its traceback, or the end of the child, with its last words.
        """
        clock = threading.Timer(time_limit, self.kill)
        began_at_s = time.monotonic()
        clock.start()
        try:
            outcome, answer = pickle.load(self.answers)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            self.has_ended(1.0)  # or one that was killed would still look alive
            raise self.loss(time.monotonic() - began_at_s, time_limit) from None
        finally:
            clock.cancel()
            if self.cancelling is not None:
                self.cancelling.cancel()
        if outcome == "answer":
            return answer
        raise answer

    def loss(self, seconds: float, time_limit: float) -> Exception:
        """Why there is no answer, and will be none."""
        if self.cancelling is not None:
            return LostChildError(f"{self.name}: it was cancelled, and ended by force when it did not stop.")
        if seconds >= time_limit:
            return LostChildError(
                f"{self.name}: no answer within {time_limit:g} s, so it was ended; the next call "
                "starts another. Ask for a smaller model, batch or length, or give it a longer "
                "time_limit."
            )
        signal_in_words = self.killed_by()
        if signal_in_words:
            return LostChildError(
                f"{self.name}: it was killed in the middle ({signal_in_words}), as where the "
                "machine's memory runs out; the next call starts another. Ask for less if that is "
                "killed too."
            )
        return RuntimeError(f"The {self.name} ended unexpectedly. Its last words:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of what it has written to standard error."""
        self.messages.seek(0)
        return self.messages.read()[-LAST_CHARACTERS:].decode(errors="replace")

    def cancel(self) -> None:
        """Stop what it works on, as Ctrl-C does; after PATIENCE_S by force. `answer` tells how that ended."""
        if self.cancelling is None:
            self.cancelling = threading.Timer(PATIENCE_S, self.kill)
            self.cancelling.start()
            self.interrupt()

    def interrupt(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)

    def kill(self) -> None:
        """By force, with the processes that it has started."""
        if hasattr(os, "killpg") and not self.has_ended():
            with suppress(ProcessLookupError, PermissionError):  # it leads no group yet
                os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(psutil.NoSuchProcess):
            self.process.kill()

    def has_ended(self, time_limit: float = 0.0) -> bool:
        """Whether it ends within so many seconds."""
        with suppress(psutil.TimeoutExpired):
            self.process.wait(time_limit)
            return True
        return False

    def alive(self) -> bool:
        """False in a fork of the owner too: the pipes are the owner's."""
        return self.owner == os.getpid() and not self.has_ended()

    def killed_by(self) -> str:
        """What signal ended it, in words; empty if it ended otherwise."""
        status = self.process.returncode or 0
        return f"signal {-status}" if status < 0 else ""

    def close(self) -> None:
        if self.owner != os.getpid():
            return
        self.kill()
        self.process.wait()
        for stream in (self.requests, self.answers, self.messages):
            with suppress(BrokenPipeError):  # what was not read before the end
                stream.close()


class Fork(Child):
    """A child that has at once what another one has imported, as a fork of it. On Linux.

    Args:
        trunk: the other one. It must not have used a GPU, which a fork could not go on with.
        environment: all of the fork's variables, for what is asked of them from now on.
    """

    def __init__(self, trunk: Child, environment: Mapping[str, str], name: str) -> None:
        self.owner = os.getpid()
        self.name = name
        self.cancelling = None
        self.messages = os.fdopen(os.dup(trunk.messages.fileno()), "rb")
        read_requests, write_requests = os.pipe()
        read_answers, write_answers = os.pipe()
        self.requests = os.fdopen(write_requests, "wb")
        self.answers = os.fdopen(read_answers, "rb")
        # The other two ends the fork opens by these names, before they are closed here.
        pipes = [f"/proc/{os.getpid()}/fd/{end}" for end in (read_requests, write_answers)]
        try:
            self.process = psutil.Process(trunk.call(fork, dict(environment), *pipes))
        finally:
            os.close(read_requests)
            os.close(write_answers)

    def killed_by(self) -> str:
        return "a signal"  # whatever else goes wrong in a fork is its answer


class Kept:
    """Children by name, each started at its first call and kept for the next, ended with their caller.

    Args:
        at_most: so many live at a time; the oldest goes when there are more.
    """

    def __init__(self, at_most: int = 1) -> None:
        self.at_most = at_most
        self.children: dict[str, Child] = {}
        self.lock = threading.RLock()
        atexit.register(self.end)

    def call(
        self,
        name: str,
        make: Callable[[], Child],
        function: Function,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """`Child.call` of the child with this name; `make` makes it if there is none that lives."""
        with self.lock:
            child = self.start(name, make)
            try:
                return child.call(function, *args, **kwargs)
            except WorkbenchError:
                raise
            except BaseException:
                self.end(name)  # an answer may still come: the next call must not get it
                raise

    def start(self, name: str, make: Callable[[], Child]) -> Child:
        """The child; a new one loads its libraries while the caller does something else."""
        with self.lock:
            if name not in self.children or not self.children[name].alive():
                self.end(name)
                if len(self.children) >= self.at_most:
                    self.end(next(iter(self.children), None))
                self.children[name] = make()
            return self.children[name]

    def end(self, name: str | None = None) -> None:
        """End the child of this name, or all."""
        for ended_name in [name] if name else [*self.children]:
            if ended_name in self.children:
                self.children.pop(ended_name).close()


# ---- a child that need not import ----

TRAINS = "workbench.training.run"  # what brings all libraries that a run needs
TRUNK = Kept()


def warm_up() -> Child:
    """Start the process that `warm_child` will come from: it imports meanwhile."""
    return TRUNK.start("trunk", lambda: Child(os.environ, [TRAINS], name="warm process"))


def warm_child(name: str) -> Child:
    """A child that has imported what trains. The first one waits until that is done, some seconds.

    It is a fork where that can be. Elsewhere it is the warm process itself, and the next one must be warmed up anew.
    """
    with TRUNK.lock:
        trunk = warm_up()
        if trunk.call(can_be_forked):
            return Fork(trunk, os.environ, name)
        TRUNK.children.pop("trunk")
        trunk.name = name
        return trunk


def can_be_forked() -> bool:
    """Whether this process is on Linux, and cannot have started a GPU's driver as it imported: no fork could go on with
    that."""
    import torch

    return sys.platform == "linux" and torch.version.cuda is None and torch.version.hip is None


# ---- in the child ----

_pipes: list[IO[bytes]] = []  # that it serves


def serve(modules: Sequence[str]) -> None:
    """Answer requests until the caller closes the pipe. Whatever a library prints goes to standard error."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # A shell that starts a job in the background lets it ignore interrupts, and its children with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Linux: if the host's memory runs out, this process goes, and not the caller
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for name in modules:
        imported(name)
    answer_all(requests, answers)


def answer_all(requests: IO[bytes], answers: IO[bytes]) -> None:
    _pipes[:] = [requests, answers]
    threading.Thread(target=end_with_caller, args=[requests], daemon=True).start()
    with suppress(EOFError):  # the caller has closed the pipe
        while True:
            # a collection then leaves half a million objects of the libraries out
            with freeze_living_objects():
                pickle.dump(reply_to(requests), answers)
                answers.flush()
                # of this call, before it is frozen by the next; the caller has the answer already
                collect_garbage()


def end_with_caller(requests: IO[bytes]) -> None:
    """End this process when the caller dies while it works. Windows has no way to look."""
    if not hasattr(select, "poll"):
        return
    closed = select.poll()
    closed.register(requests, 0)  # asks for nothing: that the other end closes is reported anyway
    closed.poll()
    os._exit(1)


def fork(environment: Mapping[str, str], requests: str, answers: str) -> int:
    """The number of a fork of this process, which has this environment and serves the pipes of these names."""
    with open(requests, "rb") as fork_requests, open(answers, "wb") as fork_answers:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for it
        number = os.fork()
        if number:
            return number
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()  # so that what it starts can be ended with it
            for pipe in _pipes:
                pipe.close()  # or nobody would see it when the process that was forked ends
            os.environ.clear()
            os.environ.update(environment)
            answer_all(fork_requests, fork_answers)
        finally:
            os._exit(0)


def reply_to(requests: IO[bytes]) -> tuple[str, Any]:
    """What the function of the next request returns or raises. Raises EOFError: there will be none."""
    try:
        function, args, kwargs = pickle.load(requests)
    except EOFError:
        raise
    except Exception as error:  # a class that cannot be imported here
        return "error", ConfigurationError(f"What was sent to another process cannot be read there: {error}")
    try:
        return "answer", function(*args, **kwargs)
    except WorkbenchError as error:
        return "error", error
    except KeyboardInterrupt:
        return "error", LostChildError("it was cancelled.")
    except BaseException:  # a rank that loses another ends itself by sys.exit
        return "error", RuntimeError(traceback.format_exc())
