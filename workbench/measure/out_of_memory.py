"""Out-of-memory messages: how they are recognized, and the numbers in them.

The wording is that of `c10/cuda/CUDACachingAllocator.cpp`: since 2.1 "GPU 0 has a total capacity of … of which … is
free. … Of the allocated memory … is allocated by PyTorch, and … is reserved by PyTorch but unallocated"; before, "(GPU
0; … total capacity; … already allocated; … free; … reserved in total by PyTorch)", and up to 1.3 "… cached" for what
is reserved and not allocated; with `backend:cudaMallocAsync`, "Currently allocated : …". PyTorch rounds to two digits,
and so do these numbers. Before it gives up it has returned every segment in which nothing is in use, so what is
unallocated lies in pieces between tensors.

Messages without numbers are read too: CUDA's own, cuBLAS's, and those of the computer's memory.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from workbench.base.categories import UNITS
from workbench.base.errors import ConfigurationError

# A number from this one on is no size: WSL's driver does not know that of a process, and says 2^64.
UNKNOWN_BYTES = 2**60
# Lines of code before the message that are searched: the innermost frames of its traceback.
LAST_LINES = 15
# Bytes of the message, and of what stands before it, that are read.
MESSAGE_BYTES = 2**17


class Kind(StrEnum):
    """The program or device that says that memory has run out."""

    CARD = "PyTorch's allocator"
    HOST = "the computer"
    KILLED = "the system, which ends the process"
    SHARED = "the computer's shared memory"
    CUBLAS = "cuBLAS or cuDNN"
    CUT = "a cut message of PyTorch's allocator"
    CUDA = "CUDA itself"


# Signs of each kind in a text, in small letters. A text may have several: the first in this order says most. Each
# begins with letters, and looks behind itself at its end, because a log of 60 MB is searched so in a second.
EXIT_CODE = rb"(?:ed with)?[ _]?(?:code|status)\s*[:=]?\s*\(?(?:-9|137)\b"
SIGNS = {
    Kind.CARD: (rb"out\s+of\s+memory[\s\S]{0,200}?(?:tried\s+to\s+allocate|requested)",),
    Kind.HOST: (
        rb"defaultcpuallocator",
        rb"unable to allocate [\d.]+ \w+ for an array",
        rb"memoryerror(?<!\wmemoryerror)",
        rb"winerror 1455",
    ),
    Kind.SHARED: (rb"out of shared memory",),
    Kind.KILLED: (
        rb"return" + EXIT_CODE,
        rb"exit" + EXIT_CODE,
        rb"signal: killed",
        rb"sigkill\b(?<!\wsigkill)",
        rb"killed process \d+",
        rb"oom-kill",
        rb"using all available ram",  # Colab
        rb"allocate more memory than is available",  # Kaggle
        rb"killed(?<!.killed)\s*(?:$|python|torchrun|accelerate|deepspeed)",
        rb"zsh: killed(?<!.zsh: killed)\s*(?:$|python|torchrun|accelerate|deepspeed)",
        rb"line \d+:\s+\d+ killed\s*(?:$|python|torchrun|accelerate|deepspeed)",
    ),
    Kind.CUBLAS: (rb"cublas_status_alloc_failed", rb"cudnn_status_alloc_failed"),
    # CUDA itself says "CUDA error: out of memory".
    Kind.CUT: (rb"cuda out of memory(?<!\wcuda out of memory)",),
    Kind.CUDA: (rb"out of memory(?<!\wout of memory)", rb"outofmemoryerror(?!.*out of memory)"),
}
# A line of code in the traceback says what was made when memory ran out.
PLACES = {
    "page-locked memory": r"pin_memory(?:=True|\(|$)|cudaHostAlloc",
    "predictions kept by the evaluation": r"nested_concat|torch_pad_and_concatenate|pad_across_processes\(logits",
    "eager attention": r"^\W*\d*\W*(?:attn_weights|attention_scores|attn_scores) = |eager_attention_forward"
    r"|(?:softmax|dropout|matmul)\((?:attn_weights|attention_(?:scores|probs)|attn_scores|q(?:uery\w*)?, k)",
    "logits": r"lm_head\(|cross_entropy|loss_fct\(|logits\.(?:float|clone)\(|log_softmax\(",
}
COLORS = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
# A rank, a process or pytest's mark may stand before the message in a line.
BEFORE_A_LINE = re.compile(r"^\s*(?:\[rank\d+\]:|\(\w+ pid=\d+\)|E(?= {3}))", re.MULTILINE)
FRAMES = "│╭╰╮╯"
# Some tracebacks show the lines around the one that failed, with their numbers: they say nothing here.
OTHER_LINE = re.compile(r"\s*(?:\d+\s|\^|$)")

# White space is taken out of a message before its numbers are read: a terminal breaks lines within words.
_SIZE = r"([\d.]+)(bytes|KiB|MiB|GiB|MB|GB)"
# The words around each number, those of newer versions of PyTorch first.
NUMBERS = {
    "requested_bytes": (rf"(?:triedto|unableto)allocate{_SIZE}", rf"requested(?:size)?:{_SIZE}"),
    "capacity_bytes": (rf"totalcapaci?tyof{_SIZE}", rf"{_SIZE}totalcapacity", rf"devicelimit:{_SIZE}"),
    "free_bytes": (rf"accordingtoCUDA\):{_SIZE}", rf"{_SIZE}isfree", rf"{_SIZE}free"),
    "process_bytes": (rf"thisprocesshas{_SIZE}memoryinuse",),
    "allowed_bytes": (rf"{_SIZE}allowed", rf"maxallowed:{_SIZE}", rf"memoryfraction\):{_SIZE}"),
    "allocated_bytes": (
        rf"{_SIZE}isallocatedbyPyTorch",
        rf"{_SIZE}alreadyallocated",
        rf"(?:MPS|currently)allocated:{_SIZE}",
    ),
    "private_bytes": (rf"{_SIZE}allocatedinprivatepools",),
    "unallocated_bytes": (rf"{_SIZE}isreservedbyPyTorchbutunallocated", rf"{_SIZE}cached"),
}
_RESERVED = (rf"{_SIZE}reservedintotalbyPyTorch",)
_OTHERS = rf"process\d+has{_SIZE}memoryinuse"


@dataclass(frozen=True)
class Refusal:
    """The numbers of an out-of-memory message. None: the message does not say that.

    Attributes:
        requested_bytes: the request that was refused; it may be a small one.
        capacity_bytes: the card's memory.
        free_bytes: the part of it that nobody has.
        process_bytes: what this process has of the card: PyTorch's, and CUDA's own context and libraries.
        others_bytes: what each process has that is named by its number. In a container this process may be one of them.
        allowed_bytes: a limit below the card, as that of `torch.cuda.set_per_process_memory_fraction`.
        allocated_bytes: the tensors of this process.
        private_bytes: the part of them that CUDA graphs keep.
        unallocated_bytes: what PyTorch has reserved and does not use: the gaps.
        place: what was made where memory ran out, one of PLACES; empty if no traceback says it.
        messages: how many messages of its kind the text has; this is the first.
    """

    requested_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    others_bytes: tuple[int, ...] = ()
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    private_bytes: int | None = None
    unallocated_bytes: int | None = None
    kind: Kind = Kind.CARD
    place: str = ""
    messages: int = 1

    @property
    def reserved_bytes(self) -> int | None:
        """The memory that PyTorch has taken from CUDA: tensors and gaps."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def elsewhere_bytes(self) -> int | None:
        """The part of the card that is neither free nor PyTorch's: CUDA's context, libraries, and other processes."""
        if self.capacity_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        return max(self.capacity_bytes - self.free_bytes - self.reserved_bytes, 0)

    @property
    def whole_bytes(self) -> int | None:
        """The most that there could be: the card, or the limit where the message says nothing of a card."""
        if self.capacity_bytes is None:
            return self.allowed_bytes
        return self.capacity_bytes


def numbers_in(text: str) -> dict[str, Any]:
    """Return the fields of `Refusal`, from the first out-of-memory message in a text.

    Raises:
        ConfigurationError: there is none.
    """
    content = remove_noise(text).encode("utf-8", "replace")
    lowered = content.lower()  # bytes, because some letters are longer in small, and positions would move
    for speaker, signs in SIGNS.items():
        starts = find_all(signs, lowered)
        if starts:
            message = content[starts[0] :]
            if len(starts) > 1 and speaker is Kind.CARD:  # the next one has numbers of its own
                message = content[starts[0] : starts[1]]
            numbers = _numbers("".join(message[:MESSAGE_BYTES].decode("utf-8", "replace").split()))
            before = content[max(starts[0] - MESSAGE_BYTES, 0) : starts[0]].decode("utf-8", "replace")
            return {**numbers, "kind": speaker, "place": _place(before), "messages": len(starts)}
    raise ConfigurationError(
        "message: there is no out-of-memory message in the text. Give the lines that begin with "
        '"CUDA out of memory" or "CUDA error: out of memory", or with "Killed".'
    )


def remove_noise(text: str) -> str:
    """Return a text without the colours, frames and marks that programs put around a message."""
    text = BEFORE_A_LINE.sub("", COLORS.sub("", text))
    for line in FRAMES:
        text = text.replace(line, "")
    return text


def find_all(patterns: Iterable[bytes], lowered: bytes) -> list[int]:
    """Return where the patterns match in a text in small letters, in the order of the text."""
    starts = set[int]()
    for pattern in patterns:
        starts.update(match.start() for match in re.finditer(pattern, lowered, re.MULTILINE))
    return sorted(starts)


def _numbers(message: str) -> dict[str, Any]:
    numbers: dict[str, Any] = {name: _size(patterns, message) for name, patterns in NUMBERS.items()}
    reserved = _size(_RESERVED, message)
    if numbers["unallocated_bytes"] is None and reserved is not None and numbers["allocated_bytes"] is not None:
        numbers["unallocated_bytes"] = max(reserved - numbers["allocated_bytes"], 0)
    # Some drivers say 0 of every process.
    numbers["process_bytes"] = numbers["process_bytes"] or None
    others = re.findall(_OTHERS, message, re.IGNORECASE)
    numbers["others_bytes"] = tuple(_in_bytes(number, unit) for number, unit in others)
    return numbers


def _size(patterns: tuple[str, ...], message: str) -> int | None:
    """Return the bytes that the first matching pattern finds; None if none matches, or what it finds is no size."""
    for pattern in patterns:
        match = re.search(pattern, message, re.IGNORECASE)
        if match:
            size = _in_bytes(match[1], match[2])
            if size < UNKNOWN_BYTES:
                return size
            return None
    return None


def _in_bytes(number: str, unit: str) -> int:
    """Turn a printed size into bytes. PyTorch divides by 1024, also where older versions write MB
    (`MPSAllocator.mm`)."""
    return int(float(number.strip(".")) * UNITS[unit.replace("MB", "MiB").replace("GB", "GiB")])


def _place(before: str) -> str:
    """Return what was made where memory ran out, one of PLACES: the innermost line of code that one matches decides."""
    lines = [line for line in before.splitlines() if not OTHER_LINE.match(line)]
    for line in reversed(lines[-LAST_LINES:]):
        for place, pattern in PLACES.items():
            if re.search(pattern, line):
                return place
    return ""


def two_digits(size_bytes: int) -> str:
    """Write a size as an out-of-memory message does, so that a reader finds the number there."""
    if size_bytes <= 2**10:
        return f"{size_bytes} bytes"
    for unit in ("KiB", "MiB"):
        if size_bytes <= 2**10 * UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:.2f} {unit}"
    return f"{size_bytes / UNITS['GiB']:.2f} GiB"
