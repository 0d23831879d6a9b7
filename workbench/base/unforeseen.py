"""An error that nobody foresaw, as one sentence that names what failed, and as a file with its traceback."""

import shlex
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import in_a_line
from workbench.base.paths import PACKAGE

PYTORCH = "torch"
CALLS_FORWARD = "_call_impl"  # the function of PyTorch that calls the forward method of a module
# Methods that PyTorch calls for every operation: an error of the operation passes through them.
HOOKS_OF_OPERATIONS = ("__torch_dispatch__", "__torch_function__")


@dataclass(frozen=True)
class Failure:
    """A failure of the workbench (`is_bug`), or of a model's own forward pass.

    Attributes:
        sentence: says what failed, without a full stop.
    """

    sentence: str
    is_bug: bool

    @property
    def cure(self) -> str:
        if self.is_bug:
            return "Please report it, with the traceback."
        return "If the model runs with transformers alone, please report that, with the traceback."


class ChildFailureError(RuntimeError):
    """An error that nobody foresaw, raised in a child process.

    Its text is the sentence about it, and a note has the traceback of the child.
    """

    failure: Failure


def describe(error: BaseException) -> Failure:
    """Say what failed."""
    if isinstance(error, ChildFailureError):
        return error.failure
    message = in_a_line(error) if isinstance(error, Exception) else ""
    name = type(error).__name__
    reason = f"{name}: {message.removeprefix(name).strip()}" if message.removeprefix(name).strip() else name
    method = find_failing_forward(error)
    if method:
        return Failure(f"the model's own forward pass failed in {method} ({reason})", is_bug=False)
    return Failure(f"this is a bug of the workbench ({reason})", is_bug=True)


def child_failure(error: BaseException) -> ChildFailureError:
    """Return the error that stands for this one in the caller's process, to which the traceback cannot be sent."""
    failure = describe(error)
    child_error = ChildFailureError(failure.sentence)
    child_error.failure = failure
    child_error.add_note("".join(traceback.format_exception(error)))
    return child_error


def find_failing_forward(error: BaseException) -> str:
    """Return the name of the forward method of a model that an error came from, such as `GPT2MLP.forward`.

    It is empty if the error came from elsewhere, or from a function of the workbench that the forward pass called.
    """
    is_in_a_model = False
    method = ""
    is_ours = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        is_ours = Path(code.co_filename).is_relative_to(PACKAGE) and code.co_name not in HOOKS_OF_OPERATIONS
        is_of_pytorch = PYTORCH in Path(code.co_filename).parts
        if is_of_pytorch and code.co_name == CALLS_FORWARD:
            is_in_a_model = True
        if is_in_a_model and code.co_name == "forward" and not (is_of_pytorch and method):
            method = code.co_qualname
    return "" if is_ours else method


def write_report(error: BaseException, command: Sequence[str], facts: Mapping[str, str]) -> str:
    """Write the traceback of an error into a new file, without the user's name, and return the file's path.

    Args:
        command: the words of the command line.
        facts: versions, by the name of what has them.
    """
    lines = [f"workbench {shlex.join(command)}", *(f"{name} {version}" for name, version in facts.items()), ""]
    text = "\n".join(lines) + "".join(traceback.format_exception(error))
    with tempfile.NamedTemporaryFile(
        "w", prefix="workbench-error-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
    ) as file:
        file.write(text.replace(str(Path.home()), "~"))
    return file.name
