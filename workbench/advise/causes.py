"""The causes that an out-of-memory message allows: each rule gives its arithmetic, or nothing.

A rule names a cause only where the message speaks for it, since a wrong one would be worse than none. The rules are
held against messages of public threads and what these established (`tests/advise/messages.toml`).
"""

from dataclasses import dataclass
from typing import ClassVar

from workbench.base.categories import Category
from workbench.base.result import Result
from workbench.measure.out_of_memory import Kind, Refusal, two_digits
from workbench.techniques import REGISTRY, Numerics

FULL = 0.9  # part of the memory that a process can have: tensors that take more are said to fill it
NOTEWORTHY = 0.04  # part of the card, or of what PyTorch has reserved: whatever holds less is no cause
LEVER = 0.1  # part of what the largest holder has: a holder of less is not named, though it would be enough too
SLACK_BYTES = 2**26  # memory that is reported as free and cannot be had: a driver keeps some for itself
CONTEXT_BYTES = 2**30  # an upper bound for CUDA's context and its libraries on a card
DESKTOP_BYTES = 2**31  # an upper bound for these and the windows of a desktop
PLAN = "workbench plan --gpu NAME -- python train.py tries sets of changes on an emulated card"


@dataclass(frozen=True)
class Cause(Result):
    """A possible cause: a name, the arithmetic that speaks for it, and a cure to try."""

    name: str
    because: str
    cure: str
    lesson: str = "15_out_of_memory"  # the notebook that goes on from here
    held_bytes: int = 0  # the memory that would be free without it; 0 if that is not known
    json_fields: ClassVar[tuple[str, ...]] = ("name", "because", "cure", "lesson")

    def __str__(self) -> str:
        return f"  {self.name}\n    {self.because}\n    Try: {self.cure}\n    Lesson: {self.lesson}"


def causes_of(message: Refusal) -> tuple[Cause, ...]:
    """Return the causes that a message allows, in the order of the rules."""
    causes = []
    for rule in RULES:
        cause = rule(message)
        if cause:
            causes.append(cause)
    largest = max((cause.held_bytes for cause in causes), default=0)
    return tuple(cause for cause in causes if not 0 < cause.held_bytes < LEVER * largest)


def what_would_tell(message: Refusal) -> str:
    """Return what a message without a cause leaves open, and how to find out."""
    if message.kind is Kind.CUT:
        return (
            "These are the words of PyTorch's allocator, and its numbers are not there, from 'Tried to allocate' to "
            "'reserved': give the whole message. The lines above it still say where it came: evaluate or predict, "
            "_save_checkpoint, backward, step."
        )
    if message.kind is Kind.CUDA:
        return (
            "CUDA refused what PyTorch's allocator did not ask for, and gives no numbers. Before the first tensor: "
            "nvidia-smi (has another process filled the card?). Later: does it run with pin_memory=False? Page-locked "
            "memory is the computer's; under WSL it may have little."
        )
    if message.kind is Kind.CUBLAS:
        return (
            "The card had no room for the few MB that cuBLAS or cuDNN needs. Of what it was full is not said: does a "
            "batch of one run, and what does nvidia-smi show before the start?"
        )
    if is_free(message):
        return (
            f"{two_digits(message.free_bytes or 0)} are free, and {two_digits(message.requested_bytes or 0)} were "
            "refused. PyTorch 2.1 does not name its cap: look for set_per_process_memory_fraction in the program. A "
            "driver may have one (WSL, a part of a card). On Windows the page file may be full. Another process may "
            "have had the memory for a moment: nvidia-smi while it runs."
        )
    return "The whole message has five numbers, from 'Tried to allocate' to 'reserved': give all of it."


# ---- sums ----


def is_free(message: Refusal) -> bool:
    """Whether the card has as much free memory as was asked for."""
    if message.free_bytes is None or message.requested_bytes is None:
        return False
    return min(message.free_bytes, message.whole_bytes or 0) >= message.requested_bytes + SLACK_BYTES


def beside_bytes(message: Refusal) -> int:
    """Return the memory that the process has beside PyTorch's, as far as it is known: CUDA's context, libraries, a
    desktop."""
    if message.process_bytes is not None:
        return max(message.process_bytes - (message.reserved_bytes or 0), 0)
    return min(message.elsewhere_bytes or 0, DESKTOP_BYTES)


def available_bytes(message: Refusal) -> int:
    """Return the part of the card that PyTorch could have if this process were alone, at least 1."""
    return max((message.whole_bytes or 0) - beside_bytes(message), 1)


def reachable_bytes(message: Refusal) -> int:
    """Return the memory that PyTorch could still take: the free memory, within its limit."""
    room = message.free_bytes or 0
    if message.allowed_bytes is not None:
        room = min(room, max(message.allowed_bytes - (message.reserved_bytes or 0), 0))
    return room


def would_be_enough(message: Refusal, size: int) -> bool:
    """Whether the request would have fitted with so many bytes more, and they are no trifle."""
    missing = (message.requested_bytes or 0) - (message.free_bytes or 0)
    return size >= max(missing, NOTEWORTHY * (message.capacity_bytes or 0))


def tensors_need_it_all(message: Refusal) -> bool:
    """Whether tensors and the request take all there is, or nearly so, or would with a second request of this size."""
    requested = message.requested_bytes
    allocated = message.allocated_bytes
    if requested is None or allocated is None or message.whole_bytes is None or a_cap(message):
        return False
    available = available_bytes(message)
    return allocated + requested > FULL * available or allocated + 2 * requested > available


# ---- the rules ----


def the_computer(message: Refusal) -> Cause | None:
    """Blame the computer's own memory, which the kind of the message names."""
    size = "The"
    if message.requested_bytes:
        size = f"{two_digits(message.requested_bytes)} of the"
    because = {
        Kind.HOST: f"{size} computer's memory were asked for, and the system refused.",
        Kind.SHARED: "Workers hand batches over in shared memory (/dev/shm), and it is full. Docker gives 64 MB.",
        Kind.KILLED: "The system has ended the process (signal 9). It does so where the computer's memory is full: "
        "`dmesg -T` names the process then. A scheduler or a person may have done it too.",
    }.get(message.kind)
    if because is None:
        return None
    return Cause(
        "the computer's own memory",
        because,
        "watch `free -h` while it runs; fewer workers, a text that is mapped or streamed, less of an evaluation kept, "
        "nothing offloaded to the CPU; for shared memory, --shm-size or dataloader_num_workers=0.",
        "11_data_loading",
    )


def page_locked(message: Refusal) -> Cause | None:
    """Blame the computer's page-locked memory, for which CUDA has the same words as for the card's."""
    if message.kind is not Kind.CUDA or message.place != "page-locked memory":
        return None
    return Cause(
        message.place,
        "The line asks for page-locked memory of the computer. The message means that memory, and not the card's.",
        "pin_memory=False; under WSL, more memory for it (.wslconfig).",
        "11_data_loading",
    )


def a_cap(message: Refusal) -> Cause | None:
    """Blame a cap: the message names a limit, and the card has as much free memory as was asked for."""
    if message.allowed_bytes is None or message.free_bytes is None or message.reserved_bytes is None:
        return None
    requested = message.requested_bytes or 0
    if message.free_bytes < requested:
        return None
    return Cause(
        "a cap",
        f"{two_digits(message.free_bytes)} of the card are free, but this process may have no more than "
        f"{two_digits(message.allowed_bytes)}: tensors and gaps have {two_digits(message.reserved_bytes)} of it, and "
        f"{two_digits(requested)} more are over it.",
        "raise the cap (torch.cuda.set_per_process_memory_fraction, --memory-cap), or make the recipe smaller.",
        "14_planner",
    )


def what_the_line_makes(message: Refusal) -> Cause | None:
    """Blame the line of code that asked: its request is large, and the card is full with it."""
    requested = message.requested_bytes or 0
    whole = message.whole_bytes or 0
    logits = titles_against(Category.LOGITS_AND_LOSS)
    places = {
        "eager attention": (
            "attention scores, which grow with the square of the length",
            'from_pretrained(…, attn_implementation="sdpa"), which keeps none; shorter sequences.',
            "12_kernels",
        ),
        "logits": (
            "logits, or what the loss makes of them: B·T·V numbers, and one or two more of that size follow",
            f"for the same loss: {logits}. {PLAN}.",
            "13_chunked_cross_entropy",
        ),
        "predictions kept by the evaluation": (
            "the logits of all examples evaluated so far, joined on the card",
            "prediction_loss_only=True, or eval_accumulation_steps=1, or preprocess_logits_for_metrics.",
            "15_out_of_memory",
        ),
    }
    if message.place not in places or not whole or not tensors_need_it_all(message):
        return None
    if requested < NOTEWORTHY * whole:  # a small request was the last straw, and any other would have been
        return None
    what, cure, lesson = places[message.place]
    share = f"{requested / whole:.0%} of {two_digits(whole)}"
    return Cause(message.place, f"The line asks for {two_digits(requested)}, {share}: {what}.", cure, lesson)


def a_large_request(message: Refusal) -> Cause | None:
    """Blame a request that is larger than the card."""
    requested = message.requested_bytes or 0
    whole = message.whole_bytes or requested
    if requested <= whole or what_the_line_makes(message):
        return None
    return Cause(
        "a request larger than the card",
        f"{two_digits(requested)} at once is more than all of {two_digits(whole)}, were it empty.",
        "the line that asked makes one tensor too large: attention scores (T·T for each head), logits (B·T·V), or a "
        f"batch. Shorter sequences, a smaller batch, fused attention. {PLAN}.",
        "14_planner",
    )


def tensors_fill_the_card(message: Refusal) -> Cause | None:
    """Blame the tensors of the run itself, which need all there is."""
    if not tensors_need_it_all(message) or a_large_request(message) or what_the_line_makes(message):
        return None
    requested = message.requested_bytes or 0
    allocated = message.allocated_bytes or 0
    available = available_bytes(message)
    needed = allocated + requested
    because = (
        f"{two_digits(allocated)} of tensors and the {two_digits(requested)} asked for are {two_digits(needed)}: "
        f"{needed / available:.0%} of the {two_digits(available)} that PyTorch could have here."
    )
    if needed <= FULL * available:
        because += " A second request of this size, as a gradient or a copy, would not fit."
    if allocated > (message.whole_bytes or 0):
        because += (
            " The tensors alone are more: not all lie on the card, as under Windows, whose driver moves some, slowly."
        )
    growing = titles_against(Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)
    return Cause("too much", because, f"for the same loss: {growing}. {PLAN}.", "14_planner")


def left_from_before(message: Refusal) -> Cause | None:
    """Blame tensors of an earlier run: they have the same numbers as too many of this one's."""
    if tensors_fill_the_card(message) is None:
        return None
    return Cause(
        "something left from before",
        f"The message does not say how old the {two_digits(message.allocated_bytes or 0)} of tensors are. After an "
        "earlier run in this process, a failed cell or a loaded checkpoint, some are none of this run's.",
        "workbench.holders(), workbench.release(); or restart, and run it alone: does it still die?",
    )


def in_pieces(message: Refusal) -> Cause | None:
    """Blame fragmentation: the request would have fitted into the free memory and the gaps together."""
    requested = message.requested_bytes or 0
    room = reachable_bytes(message)
    gaps = message.unallocated_bytes
    if not gaps or what_the_line_makes(message) or not room < requested <= room + gaps:
        return None
    share = gaps / (message.reserved_bytes or gaps)
    if share < NOTEWORTHY:
        return None
    return Cause(
        "fragmentation",
        f"{two_digits(room)} free and {two_digits(gaps)} of gaps are {two_digits(room + gaps)}: enough for the "
        f"{two_digits(requested)} asked for, in one piece. The gaps are {share:.0%} of what PyTorch has reserved.",
        f"{against_gaps()} in front of the command; batches of fewer sizes.",
        held_bytes=gaps,
    )


def another_process(message: Refusal) -> Cause | None:
    """Blame another process: without what it holds the request would have fitted.

    A message that has this process's own memory has that of the others too. Otherwise both are one number.
    """
    if message.elsewhere_bytes is None or is_free(message) or a_cap(message):
        return None
    if message.process_bytes is None:
        # `tensors_need_it_all` has counted so much as a context and a desktop already.
        if message.elsewhere_bytes <= DESKTOP_BYTES and tensors_need_it_all(message):
            return None
        others = message.elsewhere_bytes - CONTEXT_BYTES
        because = (
            f"{two_digits(message.elsewhere_bytes)} of the card are neither free nor PyTorch's; CUDA's own context is "
            "the smaller part of it, less than 1 GiB."
        )
    else:
        others = message.elsewhere_bytes - beside_bytes(message)
        because = f"Other processes hold {two_digits(max(others, 0))}; without them there would be room."
    if not would_be_enough(message, others):
        return None
    cure = "nvidia-smi names them; end them, or take another card."
    return Cause("another process", because, cure, held_bytes=others)


def another_library(message: Refusal) -> Cause | None:
    """Blame another library: this process has much memory beside PyTorch's, without which the request would have
    fitted."""
    if message.process_bytes is None:
        process = another_process(message)
        if process is None:
            return None
        beside = process.held_bytes
        because = "The message does not say whose that memory is. It may be a library's in this very process."
    else:
        beside = beside_bytes(message) - CONTEXT_BYTES
        because = (
            f"The process has {two_digits(message.process_bytes)}, PyTorch {two_digits(message.reserved_bytes or 0)} "
            "of them. The rest is more than CUDA's own context takes."
        )
    if is_free(message) or not would_be_enough(message, beside):
        return None
    cure = "import and start one library after the other, and look at nvidia-smi each time."
    return Cause("another library in this process", because, cure, held_bytes=beside)


RULES = (
    the_computer,
    page_locked,
    a_cap,
    what_the_line_makes,
    a_large_request,
    tensors_fill_the_card,
    left_from_before,
    in_pieces,
    another_process,
    another_library,
)


def against_gaps() -> str:
    """Return the variables with which the allocator leaves fewer gaps, as they stand in front of a command."""
    settings = []
    for technique in REGISTRY.values():
        if technique().allocator_settings():
            settings += [f"{name}={value}" for name, value in technique().environment().items()]
    return " ".join(settings)


def titles_against(*categories: Category, exact: bool = True) -> str:
    """Return the titles of the techniques that shrink one of these categories.

    Args:
        exact: whether to name only techniques that leave the loss as it is.
    """
    titles = []
    for technique in REGISTRY.values():
        if {*categories} & {*technique.attacks} and (technique.numerics is Numerics.EXACT or not exact):
            titles.append(technique.title)
    return ", ".join(sorted(titles))
