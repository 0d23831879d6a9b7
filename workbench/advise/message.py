"""`read_message(text)`: what PyTorch's own out-of-memory message says, number by number, and what follows from it.

The wording is that of `c10/cuda/CUDACachingAllocator.cpp`: since 2.1 "GPU 0 has a total capacity of … of which … is
free. … Of the allocated memory … is allocated by PyTorch, and … is reserved by PyTorch but unallocated"; before, "(GPU
0; … total capacity; … already allocated; … free; … reserved in total by PyTorch)", and up to 1.3 "… cached" for what
is reserved and not allocated. PyTorch rounds to two digits, and so do these numbers. Before it gives up it has returned
every segment in which nothing is in use, so what is unallocated lies in pieces between tensors.

The causes are told from these numbers alone: a rule says its arithmetic, or nothing. Where several fit, all are told.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from workbench.base.categories import UNITS, Category
from workbench.base.errors import ConfigurationError
from workbench.base.result import Result
from workbench.techniques import REGISTRY, Numerics

FULL = 0.9  # part of the card that tensors take, from which on it is said to be full of them
NOTEWORTHY = 0.05  # part of what PyTorch has reserved: smaller gaps are no cause where the card is full of tensors
CONTEXT_BYTES = 2**30  # more than CUDA's context and its libraries take of a card
UNKNOWN_BYTES = 2**60  # from here on it is no size: WSL's driver does not know that of a process, and says 2^64

_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|MB|GB)"
_HOST = "DefaultCPUAllocator"
_MESSAGE = re.compile(rf"\bout of memory|{_HOST}", re.IGNORECASE)
# of each number the words around it, those of newer versions first
_REQUESTED = (rf"[Tt]ried to allocate {_SIZE}", rf"Requested size: {_SIZE}")
_CAPACITY = (rf"total capaci?ty of {_SIZE}", rf"{_SIZE} total capacity")
_FREE = (rf"{_SIZE} is free", rf"{_SIZE} free")
_PROCESS = (rf"this process has {_SIZE} memory in use",)
_ALLOWED = (rf"{_SIZE} allowed", rf"max allowed: {_SIZE}")
_ALLOCATED = (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated", rf"MPS allocated: {_SIZE}")
_PRIVATE = (rf"{_SIZE} allocated in private pools",)
_UNALLOCATED = (rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached")
_RESERVED = (rf"{_SIZE} reserved in total by PyTorch",)


@dataclass(frozen=True)
class Cause(Result):
    """What may have used the memory up: the arithmetic that says so, and what to try."""

    name: str
    because: str
    cure: str
    lesson: str  # the notebook that goes on from here
    json_fields: ClassVar[tuple[str, ...]] = ("name", "because", "cure", "lesson")


@dataclass(frozen=True)
class ErrorMessage(Result):
    """The numbers of a message. None: it does not say that.

    Attributes:
        requested_bytes: the request that was refused; it may be a small one.
        capacity_bytes: of the card.
        free_bytes: of the card, for whoever asks first.
        process_bytes: what this process has of the card: PyTorch's, and CUDA's own context and libraries.
        others_bytes: of each process that is named by its number. In a container this process may be one of them.
        allowed_bytes: a limit below the card, as of `torch.cuda.set_per_process_memory_fraction`.
        allocated_bytes: tensors of this process.
        private_bytes: the part of them that CUDA graphs keep.
        unallocated_bytes: reserved by PyTorch and not in use: the gaps.
        host: the message is about the computer's memory.
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
    host: bool = False
    json_fields: ClassVar[tuple[str, ...]] = (
        "requested_bytes",
        "capacity_bytes",
        "free_bytes",
        "process_bytes",
        "others_bytes",
        "allowed_bytes",
        "allocated_bytes",
        "private_bytes",
        "unallocated_bytes",
        "reserved_bytes",
        "elsewhere_bytes",
        "host",
        "causes",
    )

    @property
    def reserved_bytes(self) -> int | None:
        """All that PyTorch has taken from CUDA: tensors and gaps."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def elsewhere_bytes(self) -> int | None:
        """Of the card, what is neither free nor PyTorch's: CUDA's context, libraries, and other processes."""
        if self.capacity_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        return max(self.capacity_bytes - self.free_bytes - self.reserved_bytes, 0)

    @property
    def room_bytes(self) -> int | None:
        """What PyTorch could still take: what is free, within the limit."""
        rooms = [] if self.free_bytes is None else [self.free_bytes]
        if self.allowed_bytes is not None and self.reserved_bytes is not None:
            rooms.append(max(self.allowed_bytes - self.reserved_bytes, 0))
        return min(rooms, default=None)

    @property
    def whole_bytes(self) -> int | None:
        """All that there could be: the card, or where nothing is said of one, the limit."""
        return self.allowed_bytes if self.capacity_bytes is None else self.capacity_bytes

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Those that the numbers allow, each with its arithmetic."""
        return tuple(filter(None, [rule(self) for rule in RULES]))

    @property
    def cause(self) -> str:
        """The causes in words, one a line; several are possible ones."""
        causes = self.causes
        if not causes:
            return "The numbers that the message has name no cause."
        if len(causes) == 1:
            return f"{causes[0].name}: {causes[0].because}"
        lines = [f"{number}. {cause.name}: {cause.because}" for number, cause in enumerate(causes, start=1)]
        return "\n".join(["Possible, as far as the numbers tell:", *lines])

    @property
    def note(self) -> str:
        """Whose a process is that the message names by its number, where the card has no room for two of them."""
        for size in self.others_bytes:
            if size + (self.reserved_bytes or 0) > (self.capacity_bytes or size):
                return (
                    f"The process with {two_digits(size)} is this one: beside PyTorch's "
                    f"{two_digits(self.reserved_bytes or 0)} the card has no room for another so large. In a container "
                    "PyTorch does not know its own number."
                )
        return ""

    def __str__(self) -> str:
        lines = ["What the message says"]
        lines += [f"  {title:42} {two_digits(size):>10}" for title, size in self.parts()]
        if self.note:
            lines += ["", self.note]
        lines += ["", "Cause" if len(self.causes) < 2 else "Possible causes; the numbers do not tell them apart"]
        for cause in self.causes:
            lines += [
                f"  {cause.name}",
                f"    {cause.because}",
                f"    Try: {cause.cure}",
                f"    Lesson: {cause.lesson}",
            ]
        if not self.causes:
            lines.append(f"  {self.cause}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A table of the numbers, and a paragraph for each cause: both fit a narrow page."""
        rows = [f"<tr><td>{title.strip()}</td><td>{two_digits(size)}</td></tr>" for title, size in self.parts()]
        lines = [f"<table>{''.join(rows)}</table>"] if rows else []
        if self.note:
            lines.append(f"<p>{self.note}</p>")
        if len(self.causes) > 1:
            lines.append("<p>Possible causes; the numbers do not tell them apart:</p>")
        for cause in self.causes:
            lines.append(f"<p><b>{cause.name}.</b> {cause.because} <i>Try:</i> {cause.cure} ({cause.lesson})</p>")
        return "\n".join(lines if self.causes else [*lines, f"<p>{self.cause}</p>"])

    def parts(self) -> Iterator[tuple[str, int]]:
        """The numbers that are known, in words."""
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
                yield title, size


def read_message(text: str) -> ErrorMessage:
    """The numbers of the first out-of-memory message in a text, be it that message alone or the log of a run.

    Raises:
        ConfigurationError: there is none.
    """
    whole = " ".join(text.split())  # messages are wrapped where they are pasted
    places = [match.start() for match in _MESSAGE.finditer(whole)]
    if not places:
        raise ConfigurationError(
            "message: there is no out-of-memory message in the text. Give the lines that begin with "
            '"CUDA out of memory" or "CUDA error: out of memory".'
        )
    # the words come first once more where the numbers of another one begin, as another rank's
    starts = [start for start in places if _size(_REQUESTED, whole[start : start + 200]) is not None]
    begin = starts[0] if starts else places[0]
    message = whole[begin : starts[1] if len(starts) > 1 else None]
    allocated = _size(_ALLOCATED, message)
    unallocated = _size(_UNALLOCATED, message)
    reserved = _size(_RESERVED, message)
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(reserved - allocated, 0)
    others = re.findall(rf"Process \d+ has {_SIZE} memory in use", message)
    return ErrorMessage(
        requested_bytes=_size(_REQUESTED, message),
        capacity_bytes=_size(_CAPACITY, message),
        free_bytes=_size(_FREE, message),
        process_bytes=_size(_PROCESS, message),
        others_bytes=tuple(_in_bytes(number, unit) for number, unit in others),
        allowed_bytes=_size(_ALLOWED, message),
        allocated_bytes=allocated,
        private_bytes=_size(_PRIVATE, message),
        unallocated_bytes=unallocated,
        host=message.startswith(_HOST),
    )


def _size(patterns: tuple[str, ...], message: str) -> int | None:
    """The number that the first pattern finds which finds one."""
    for pattern in patterns:
        match = re.search(pattern, message)
        if match:
            size = _in_bytes(match[1], match[2])
            return size if size < UNKNOWN_BYTES else None
    return None


def _in_bytes(number: str, unit: str) -> int:
    """Of what PyTorch prints: it divides by 1024, also where older versions write MB for it (`MPSAllocator.mm`)."""
    return int(float(number.strip(".")) * UNITS[unit.replace("MB", "MiB").replace("GB", "GiB")])


def two_digits(size_bytes: int) -> str:
    """As the message itself writes it, so that a reader finds the number there."""
    if size_bytes <= 2**10:
        return f"{size_bytes} bytes"
    for unit in ("KiB", "MiB"):
        if size_bytes <= 2**10 * UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:.2f} {unit}"
    return f"{size_bytes / UNITS['GiB']:.2f} GiB"


# ---- the causes: each rule says what the numbers allow, or nothing ----


def of_the_host(message: ErrorMessage) -> Cause | None:
    if not message.host:
        return None
    return Cause(
        "the computer's own memory",
        f"{two_digits(message.requested_bytes or 0)} of the computer's memory were asked for, and the system refused.",
        "map or stream the text, keep less of an evaluation, fewer workers.",
        "11_data_loading",
    )


def without_numbers(message: ErrorMessage) -> Cause | None:
    """CUDA's own words, "CUDA error: out of memory"."""
    if message.host or message.requested_bytes is not None:
        return None
    return Cause(
        "CUDA itself refused",
        "There are no numbers: the request was not one of PyTorch's allocator. Before the first tensor another process "
        "has filled the card, or the context finds no room; later, page-locked memory of the computer may be short.",
        "nvidia-smi (who holds the card?), then pin_memory=False; under WSL, more memory for it.",
        "15_out_of_memory",
    )


def below_the_limit(message: ErrorMessage) -> Cause | None:
    """A limit is named, and the card has what was asked for."""
    requested = message.requested_bytes
    allowed = message.allowed_bytes
    reserved = message.reserved_bytes
    free = message.free_bytes
    if requested is None or allowed is None or reserved is None or free is None or free < requested:
        return None
    return Cause(
        "a cap",
        f"{two_digits(free)} of the card are free, but this process may have no more than {two_digits(allowed)}: "
        f"tensors and gaps have {two_digits(reserved)} of it, and {two_digits(requested)} more are over it.",
        "raise the cap (torch.cuda.set_per_process_memory_fraction, --memory-cap), or make the recipe smaller.",
        "14_planner",
    )


def tensors_fill_the_card(message: ErrorMessage) -> Cause | None:
    """The tensors and the request are more than there is, or nearly as much."""
    requested = message.requested_bytes
    allocated = message.allocated_bytes or 0
    whole = message.whole_bytes
    if requested is None or not whole:
        return None
    if requested > whole:
        because = f"{two_digits(requested)} at once is more than all of {two_digits(whole)}, were it empty."
    elif below_the_limit(message) or allocated + requested <= FULL * whole:
        return None
    elif allocated + requested > whole:
        because = (
            f"{two_digits(allocated)} of tensors and the {two_digits(requested)} asked for are "
            f"{two_digits(allocated + requested)}, more than all of {two_digits(whole)}."
        )
    elif requested <= (message.room_bytes or 0) + (message.unallocated_bytes or 0):
        because = (
            f"Tensors and the {two_digits(requested)} asked for would be {(allocated + requested) / whole:.0%} of "
            f"{two_digits(whole)}. In one piece it would have fitted, but so full a card has no room for gaps."
        )
    else:
        because = (
            f"Tensors fill {allocated / whole:.0%} of {two_digits(whole)}; beside them and CUDA's own context the "
            f"{two_digits(requested)} asked for do not fit."
        )
    if allocated > whole:
        because += " The tensors alone are more: on Windows the driver moves some to the computer's memory, slowly."
    return Cause(
        "too much",
        because,
        f"workbench predict (which category is the largest?); for the same loss {_exact_techniques()}.",
        "14_planner",
    )


def left_from_before(message: ErrorMessage) -> Cause | None:
    """It has the numbers of too much, unless the request alone is too large."""
    requested = message.requested_bytes or 0
    allocated = message.allocated_bytes or 0
    whole = message.whole_bytes or 0
    if tensors_fill_the_card(message) is None or requested > whole:
        return None
    return Cause(
        "something left from before",
        f"The message does not say how old the {two_digits(allocated)} of tensors are. After an earlier run in this "
        "process, a failed cell or a loaded checkpoint, some are none of this run's.",
        "workbench.holders(), workbench.release(); or restart, and run it alone: does it still die?",
        "15_out_of_memory",
    )


def in_pieces(message: ErrorMessage) -> Cause | None:
    """The request would have fitted into what is free and the gaps."""
    requested = message.requested_bytes
    room = message.room_bytes
    gaps = message.unallocated_bytes
    if requested is None or room is None or not gaps or not room < requested <= room + gaps:
        return None
    share = gaps / (message.reserved_bytes or gaps)
    if share < NOTEWORTHY and (tensors_fill_the_card(message) or below_the_limit(message)):
        return None
    return Cause(
        "fragmentation",
        f"{two_digits(room)} free and {two_digits(gaps)} of gaps are {two_digits(room + gaps)}: enough for the "
        f"{two_digits(requested)} asked for, in one piece. The gaps are {share:.0%} of what PyTorch has reserved. "
        "If these are logits (B·T·V·4 bytes), one or two more of their size follow: then the gaps are not enough.",
        f"{_allocator_techniques()} (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True); batches of fewer sizes.",
        "15_out_of_memory",
    )


def beside_pytorch(message: ErrorMessage) -> Cause | None:
    """This process has much that is none of PyTorch's; without it, the request would have fitted."""
    if message.process_bytes is None or message.reserved_bytes is None:
        return None
    beside = message.process_bytes - message.reserved_bytes
    missing = (message.requested_bytes or 0) - (message.free_bytes or 0)
    if not 0 < missing <= beside - CONTEXT_BYTES:
        return None
    return Cause(
        "another library in this process",
        f"The process has {two_digits(message.process_bytes)}, PyTorch {two_digits(message.reserved_bytes)} of "
        f"them: {two_digits(beside)} are not PyTorch's, more than CUDA's own context takes.",
        "import and start one library after the other, and look at nvidia-smi each time.",
        "15_out_of_memory",
    )


def another_process(message: ErrorMessage) -> Cause | None:
    """Without what others hold it would have fitted. Their part is known where this process's own is."""
    requested = message.requested_bytes
    free = message.free_bytes
    elsewhere = message.elsewhere_bytes
    if requested is None or free is None or elsewhere is None or free >= requested:
        return None
    if message.process_bytes is None:
        others = elsewhere - CONTEXT_BYTES
        because = (
            f"{two_digits(elsewhere)} of the card are neither free nor PyTorch's; CUDA's own context is the smaller "
            "part of it, less than 1 GiB."
        )
    else:
        others = (message.capacity_bytes or 0) - free - message.process_bytes
        because = (
            f"Other processes hold {two_digits(max(others, 0))}, and {two_digits(free)} are free: together enough "
            f"for the {two_digits(requested)} asked for."
        )
    if free + others < requested:
        return None
    return Cause(
        "another process", because, "nvidia-smi names them; end them, or take another card.", "15_out_of_memory"
    )


def no_number_says(message: ErrorMessage) -> Cause | None:
    """More is free than was asked for, and no cap is named."""
    requested = message.requested_bytes
    free = message.free_bytes
    capacity = message.capacity_bytes
    if requested is None or free is None or capacity is None or not requested <= min(free, capacity):
        return None
    if message.allowed_bytes is not None:
        return None
    return Cause(
        "a cap that is not named, or another process",
        f"{two_digits(free)} are free, and {two_digits(requested)} were refused; no number says why. PyTorch 2.1 "
        "does not name its cap, a driver may have one (Windows, WSL, a part of a card), or another process had the "
        "memory at that moment.",
        "look for set_per_process_memory_fraction in the program, and at nvidia-smi while it runs.",
        "15_out_of_memory",
    )


RULES = (
    of_the_host,
    without_numbers,
    below_the_limit,
    tensors_fill_the_card,
    left_from_before,
    in_pieces,
    beside_pytorch,
    another_process,
    no_number_says,
)


def _exact_techniques() -> str:
    """Those that attack what grows with the batch, and leave the loss as it is."""
    growing = {Category.ACTIVATIONS, Category.LOGITS_AND_LOSS}
    names = []
    for name, technique in sorted(REGISTRY.items()):
        if technique.numerics is Numerics.EXACT and growing & {*technique.attacks}:
            names.append(name)
    return ", ".join(names)


def _allocator_techniques() -> str:
    return ", ".join(name for name, technique in sorted(REGISTRY.items()) if technique().allocator_settings())
