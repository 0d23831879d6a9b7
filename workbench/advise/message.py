"""`read_message(text)`: the numbers of an out-of-memory message, and the causes that they allow.

The causes follow from the message alone, and from the line of code before it. Where several fit, all are named. Where
none does, the answer says how to find out.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from workbench.advise.causes import Cause, causes_of, what_would_tell
from workbench.advise.moments import moment_of
from workbench.base.result import Result
from workbench.measure.out_of_memory import Refusal, numbers_in, two_digits


def read_message(text: str) -> "ErrorMessage":
    """Read the first out-of-memory message in a text, which may be that message alone, a traceback or a log.

    Raises:
        ConfigurationError: the text has no such message.
    """
    return ErrorMessage(**numbers_in(text), moment=moment_of(text))


@dataclass(frozen=True)
class ErrorMessage(Refusal, Result):
    """The numbers of a message, and the causes that follow from them.

    Attributes:
        moment: a sentence about what the run was doing; empty if no traceback says it.
    """

    moment: str = ""

    json_fields = ("reserved_bytes", "elsewhere_bytes", "causes")

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """The causes that the message allows, each with its arithmetic. It does not tell several of them apart."""
        return causes_of(self)

    @property
    def note(self) -> str:
        """A sentence about a process that the message names by its number and that must be this one, since the card has
        no room for two of them; else empty."""
        for size in self.others_bytes:
            if size + (self.reserved_bytes or 0) > (self.capacity_bytes or size):
                return (
                    f"The process with {two_digits(size)} is this one: "
                    f"beside PyTorch's {two_digits(self.reserved_bytes or 0)} the card has no "
                    "room for another so large. In a container PyTorch does not know its own "
                    "number."
                )
        return ""

    def __str__(self) -> str:
        lines = [f"What {self.kind} says", *self._numbers()]
        if self.messages > 1:
            lines.append(f"  (the first of {self.messages} such messages)")
        for sentence in (self.note, self.moment):
            if sentence:
                lines += ["", sentence]
        heading = "Cause"
        if len(self.causes) > 1:
            heading = "Possible causes; the message does not tell them apart"
        lines += ["", heading, *map(str, self.causes)]
        if not self.causes:
            lines += ["  The message alone cannot tell.", f"    {what_would_tell(self)}"]
        return "\n".join(lines)

    def _numbers(self) -> Iterator[str]:
        """Yield a line for each number that is known."""
        numbers = (
            ("the request that was refused", self.requested_bytes),
            ("the card has", self.capacity_bytes),
            ("this process may have", self.allowed_bytes),
            ("  tensors (allocated by PyTorch)", self.allocated_bytes),
            ("    of them kept for CUDA graphs", self.private_bytes),
            ("  gaps (reserved by PyTorch, unallocated)", self.unallocated_bytes),
            ("  neither PyTorch's nor free", self.elsewhere_bytes),
            ("  free", self.free_bytes),
        )
        for title, size in numbers:
            if size is not None:
                yield f"  {title:42} {two_digits(size):>10}"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        open_question = "" if self.causes else what_would_tell(self)
        return {**asdict(self), **super().to_dict(), "what_would_tell": open_question}
