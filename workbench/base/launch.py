"""The one way to call a function in another Python process.

    launch(function, argument)                 calls it in a new interpreter, which ends with its answer
    child = start(function, argument)          does the same without waiting, for a caller who may want to stop it:
    child.cancel()                             stops it as Ctrl-C does, so that a run ends its record; then by force
    ChildPool().call("name", make, function)   calls it in a process that stays for the next call

dill sends the function and its arguments, so they may contain what a notebook has defined. A child has its own
environment: the patches of a shadow, and the variables of an emulated GPU, stay out of the caller's.

A new interpreter takes seconds to import torch and transformers. On Linux, a `Fork` of another child, its trunk, has at
once what the trunk has imported. Elsewhere, and where the trunk has died, a child is a new interpreter.

Requests and answers are pickles on two pipes. When the caller dies the pipes close, and the child ends itself, whatever
it is doing. It is a plain child with the caller's import path: `multiprocessing` would import the caller's main module
in it, which runs a script that has no `if __name__ == "__main__"`.
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
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from workbench.base.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.base.garbage import collect_garbage, freeze_living_objects
from workbench.base.imports import import_quickly
from workbench.base.paths import PIN
from workbench.base.unforeseen import child_failure

SERVE = "import sys; sys.path[:] = {path!r}; {pin}; from workbench.base.launch import serve; serve({modules!r})"
PATIENCE_S = 0.6  # time between asking a child to stop and ending it
FOREVER_S = threading.TIMEOUT_MAX
LAST_CHARACTERS = 2000  # characters that an error quotes from the end of a dead child's output

Function = Callable[..., Any]


class LostChildError(UnavailableError):
    """A process ended without an answer: it was killed, was cancelled, or took too long."""


def launch(
    function: Function,
    *args: Any,
    time_limit: float = FOREVER_S,
    **options: Any,
) -> Any:
    """Return what a function returns in a new interpreter, which `start` starts. Raises as `Child.answer` does.

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
    """Start a child that calls the function. It has an `answer`, and must be closed.

    Args:
        environment: the child's environment variables, by default those of this process.
        path, output, name: as `Child` takes them.
    """
    if environment is None:
        environment = os.environ
    child = Child(environment, path=path, output=output, name=name)
    child.ask(function, *args, **kwargs)
    return child


class Child:
    """A process that answers one request after another; whoever started it must `close` it.

    Args:
        environment: the process's environment variables.
        modules: the modules that it imports before the first request comes.
        path: folders in front of its import path.
        output: a file, or its number, for all that would go to standard output or error; by default a file of its own,
            whose end an error quotes.
        name: the process's name in errors, as in "The prediction worker ended".
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
        self.messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # it is open as long as the child lives
        self.cancelling: threading.Timer | None = None
        code = SERVE.format(path=[*path, *sys.path], pin=PIN, modules=tuple(modules))
        self.process = psutil.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output or self.messages,
            env=environment,
            start_new_session=True,  # Ctrl-C interrupts the caller alone, who then ends the child
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
        """Return what the function returns in the child. Raises as `ask` and `answer` do."""
        self.ask(function, *args, **kwargs)
        return self.answer(time_limit)

    def ask(self, function: Function, *args: Any, **kwargs: Any) -> None:
        """Send a request. Raises ConfigurationError: it cannot be sent to another process."""
        # dill sends the definitions of a notebook or a script along, where pickle sends their names.
        import dill

        try:
            request = dill.dumps((function, args, kwargs), recurse=True)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigurationError(
                f"{self.name}: what it is asked cannot be sent to another process ({error}). Let "
                "your own technique hold plain settings; a function cannot observe what happens "
                "there."
            ) from None
        with suppress(OSError):  # if the child has died, `answer` says so
            self.requests.write(request)
            self.requests.flush()

    def answer(self, time_limit: float = FOREVER_S) -> Any:
        """Wait for the answer to what was asked.

        Args:
            time_limit: in seconds; a child that takes longer is ended.

        Raises:
            WorkbenchError: the function raised it in the child.
            LostChildError: the child took longer than the limit, was killed, or was cancelled.
            ChildFailureError: another error in the child; a note has its traceback.
            RuntimeError: the child has ended; the message has its last words.
        """
        clock = threading.Timer(time_limit, self.kill)
        began_at_s = time.monotonic()
        clock.start()
        try:
            outcome, answer = pickle.load(self.answers)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            self.has_ended(1.0)  # waits, since a child that was killed looks alive for a moment
            raise self.why_lost(time.monotonic() - began_at_s, time_limit) from None
        finally:
            clock.cancel()
            if self.cancelling is not None:
                self.cancelling.cancel()
        if outcome == "answer":
            return answer
        raise answer

    def why_lost(self, seconds: float, time_limit: float) -> Exception:
        """Build the error that says why there is no answer, and will be none."""
        if self.cancelling is not None:
            return LostChildError(f"{self.name}: it was cancelled, and ended by force when it did not stop.")
        if seconds >= time_limit:
            return LostChildError(
                f"{self.name}: no answer within {time_limit:g} s, so it was ended; the next call "
                "starts another. Ask for a smaller model, batch or length, or give it a longer "
                "time_limit."
            )
        signal_name = self.signal_in_words()
        if signal_name:
            return LostChildError(
                f"{self.name}: it was killed in the middle ({signal_name}), as where the "
                "machine's memory runs out; the next call starts another. Ask for less if that is "
                "killed too."
            )
        return RuntimeError(f"The {self.name} ended unexpectedly. Its last words:\n{self.last_words()}")

    def last_words(self) -> str:
        """Return the end of what the child has written to standard error."""
        self.messages.seek(0)
        return self.messages.read()[-LAST_CHARACTERS:].decode(errors="replace")

    def cancel(self) -> None:
        """Stop the child's work as Ctrl-C does, and after PATIENCE_S by force. `answer` tells how that ended."""
        if self.cancelling is None:
            self.cancelling = threading.Timer(PATIENCE_S, self.kill)
            self.cancelling.start()
            self.interrupt()

    def interrupt(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)

    def kill(self) -> None:
        """End the child by force, with the processes that it has started."""
        if hasattr(os, "killpg") and not self.has_ended():
            with suppress(ProcessLookupError, PermissionError):  # a new child leads no group yet
                os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(psutil.NoSuchProcess):
            self.process.kill()

    def has_ended(self, time_limit: float = 0.0) -> bool:
        """Whether the child ends within so many seconds."""
        with suppress(psutil.TimeoutExpired):
            self.process.wait(time_limit)
            return True
        return False

    def is_alive(self) -> bool:
        """Whether this process can ask the child: a fork of the owner cannot, since the pipes are the owner's."""
        return self.owner == os.getpid() and not self.has_ended()

    def signal_in_words(self) -> str:
        """Name the signal that ended the child; empty if it ended otherwise."""
        status = self.process.returncode or 0
        return f"signal {-status}" if status < 0 else ""

    def close(self) -> None:
        if self.owner != os.getpid():
            return
        self.kill()
        self.process.wait()
        for stream in (self.requests, self.answers, self.messages):
            with suppress(BrokenPipeError):  # the child may have ended before it read all of a request
                stream.close()


class Fork(Child):
    """A child that has at once what another child has imported, because it is a fork of that one; on Linux only.

    Args:
        trunk: the other child. It must not have used a GPU, since a fork could not go on using it.
        environment: all environment variables of the fork. Libraries that have read theirs in the trunk keep those.
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
        # The fork opens the other two ends by these names, before they are closed here.
        pipes = [f"/proc/{os.getpid()}/fd/{end}" for end in (read_requests, write_answers)]
        try:
            self.process = psutil.Process(trunk.call(fork, dict(environment), *pipes))
        finally:
            os.close(read_requests)
            os.close(write_answers)

    def signal_in_words(self) -> str:
        return "a signal"  # a fork answers with any other failure, so that only a signal ends it without an answer


class ChildPool:
    """A group of children by name. Each starts at its first call, stays for the next, and ends with its caller.

    Args:
        at_most: the number of children that live at a time; the oldest ends when there would be more.
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
        """Call a function in the child with this name, as `Child.call` does; `make` makes the child if none lives."""
        with self.lock:
            child = self.start(name, make)
            try:
                return child.call(function, *args, **kwargs)
            except WorkbenchError:
                raise
            except BaseException:
                self.end(name)  # an answer may still come, which the next call must not get
                raise

    def start(self, name: str, make: Callable[[], Child]) -> Child:
        """Return the child with this name; a new one loads its libraries while the caller does something else."""
        with self.lock:
            if name not in self.children or not self.children[name].is_alive():
                self.end(name)
                if len(self.children) >= self.at_most:
                    self.end(next(iter(self.children), None))
                self.children[name] = make()
            return self.children[name]

    def end(self, name: str | None = None) -> None:
        """End the child of this name, or all children."""
        for ending_name in [name] if name else [*self.children]:
            if ending_name in self.children:
                self.children.pop(ending_name).close()


# ---- a child that need not import ----

# A process that imports this module has all libraries that a run needs. This room, which stands below that one, imports
# nothing of it: it only tells a child its name.
TRAINING_MODULE = "workbench.training.run"
WARM_PROCESSES = ChildPool()


def warm_up() -> Child:
    """Start the process that `warm_child` takes or forks; it imports the libraries of a run meanwhile."""
    return WARM_PROCESSES.start("trunk", lambda: Child(os.environ, [TRAINING_MODULE], name="warm process"))


def warm_child(name: str) -> Child:
    """Return a child that has imported the libraries of a run. The first call waits some seconds for that.

    The child is a fork where the warm process can be forked. Elsewhere it is the warm process itself, and the next one
    must be warmed up anew.
    """
    with WARM_PROCESSES.lock:
        trunk = warm_up()
        if trunk.call(can_be_forked):
            return Fork(trunk, os.environ, name)
        WARM_PROCESSES.children.pop("trunk")
        trunk.name = name
        return trunk


def can_be_forked() -> bool:
    """Whether a fork of this process could go on: on Linux, with a PyTorch that cannot have started a GPU's driver when
    it was imported."""
    import torch

    return sys.platform == "linux" and torch.version.cuda is None and torch.version.hip is None


# ---- in the child ----

_pipes: list[IO[bytes]] = []  # the pipes of requests and answers that this child serves


def serve(modules: Sequence[str]) -> None:
    """Answer requests until the caller closes the pipe. Whatever a library prints goes to standard error."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # A shell that starts a job in the background lets it ignore interrupts, and its children with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # If the host's memory runs out, Linux then ends this process, and not the caller.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for name in modules:
        import_quickly(name)
    answer_all(requests, answers)


def answer_all(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer one request after another until the caller closes the pipe."""
    _pipes[:] = [requests, answers]
    threading.Thread(target=end_with_caller, args=[requests], daemon=True).start()
    with suppress(EOFError):  # the caller has closed the pipe
        while True:
            # Collections then leave out half a million objects of the libraries.
            with freeze_living_objects():
                pickle.dump(reply_to(requests), answers)
                answers.flush()
                # Garbage of this call goes before the next call freezes it; the caller has the answer already.
                collect_garbage()


def end_with_caller(requests: IO[bytes]) -> None:
    """End this process when the caller dies while it works. On Windows nothing can be polled, and nothing is done."""
    if not hasattr(select, "poll"):
        return
    closed = select.poll()
    closed.register(requests, 0)  # no event is asked for, since the end of a pipe is always reported
    closed.poll()
    os._exit(1)


def fork(environment: Mapping[str, str], requests: str, answers: str) -> int:
    """Fork this process, and return the fork's number. The fork has this environment and serves the pipes of these
    names."""
    with open(requests, "rb") as fork_requests, open(answers, "wb") as fork_answers:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the fork, which would stay as a zombie
        number = os.fork()
        if number:
            return number
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()  # processes that the fork starts can then be ended with it
            for pipe in _pipes:
                pipe.close()  # an open copy would hide from the caller that the trunk ends
            os.environ.clear()
            os.environ.update(environment)
            answer_all(fork_requests, fork_answers)
        finally:
            os._exit(0)


def reply_to(requests: IO[bytes]) -> tuple[str, Any]:
    """Return ("answer", what the function of the next request returned) or ("error", what it raised).

    Raises:
        EOFError: the caller has closed the pipe.
    """
    try:
        function, args, kwargs = pickle.load(requests)
    except EOFError:
        raise
    except Exception as error:  # a class of the request, for example, cannot be imported here
        return "error", ConfigurationError(f"What was sent to another process cannot be read there: {error}")
    try:
        return "answer", function(*args, **kwargs)
    except WorkbenchError as error:
        return "error", error
    except KeyboardInterrupt:
        return "error", LostChildError("it was cancelled.")
    except BaseException as error:  # a rank that loses another one ends itself by sys.exit
        return "error", child_failure(error)
