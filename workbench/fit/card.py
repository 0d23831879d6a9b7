"""The card that a program is tried on: an emulated one, or that of this machine."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.base.categories import format_bytes, parse_bytes
from workbench.base.device import emulated
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.fit import any_training
from workbench.gpus.catalogue import ENOUGH_BYTES, Gpu, of_device
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator import place
from workbench.gpus.emulator.card import DEVICE, with_memory
from workbench.gpus.emulator.interpreter import ask_python
from workbench.gpus.emulator.launch import emulate
from workbench.gpus.emulator.report import NOT_MEASURED, TIMED_OUT

INTERRUPTED = 130
SECONDS_TO_ANSWER = 120.0
# a card that is here and in no catalogue: what PyTorch says of it takes the place of these zeros
UNKNOWN = Gpu("here", "", "", (0, 0), 0, memory_bytes=0, measured=True, source="PyTorch on this machine")


@dataclass(frozen=True)
class Use:
    """What a program took of a card.

    Attributes:
        reserved_bytes: the most that PyTorch's allocator held.
        beside_bytes: what it takes beside that, CUDA's context above all.
        refusals: how often it was refused memory.
        holders: who held most at the peak, by the innermost line of the program, where the history was kept.
        lower_bound: what took memory in amounts that nobody knows.
        used_a_gpu: it did at all.
    """

    exit_status: int
    reserved_bytes: int = 0
    beside_bytes: int = 0
    refusals: int = 0
    holders: tuple[Mapping[str, Any], ...] = ()
    lower_bound: str = ""
    used_a_gpu: bool = True

    @property
    def timed_out(self) -> bool:
        return self.exit_status == TIMED_OUT

    @property
    def interrupted(self) -> bool:
        return self.exit_status == INTERRUPTED


@dataclass(frozen=True)
class Card:
    """A card in software, with the memory that a program may have of it (`gpu.memory_bytes`), CUDA's context included.

    Attributes:
        here: programs compute on it, and what they take is measured.
        share: of its memory, which PyTorch's allocator may have.
    """

    gpu: Gpu
    here: bool = False
    share: float = 1.0

    @property
    def name(self) -> str:
        """As a record has it."""
        return f"{DEVICE}{self.gpu.name}"

    @property
    def title(self) -> str:
        return f"an emulated {self.gpu.title}"

    @property
    def room(self) -> str:
        """What a program may have of it."""
        return format_bytes(self.gpu.memory_bytes)

    @property
    def source(self) -> str:
        """Where its numbers are from, in words."""
        return NOT_MEASURED

    def run(self, command: Sequence[str], report: Path, time_limit_s: float, *, history: bool) -> Use:
        """Run a program on it, which writes what it has seen into `report`."""
        try:
            place.refuse_other_machines()
        except UnavailableError:
            raise UnavailableError(
                f"plan: the emulated GPU needs Linux on x86-64; this is {platform.system()} on "
                f"{platform.machine()}. Run the same command on Colab or in a container for "
                "linux/amd64; or, where this machine has a card with CUDA, on that: plan --here."
            ) from None
        emulation = emulate(command, self.gpu, timeout_s=time_limit_s, history=history, output=sys.stderr)
        devices = emulation.devices
        return Use(
            emulation.exit_status,
            emulation.reserved_at_once_bytes,
            self.gpu.context_bytes_estimate,
            emulation.refusals,
            holders=tuple(devices[0].get("lines", ())) if devices else (),
            lower_bound=", ".join(emulation.not_measured),
            used_a_gpu=bool(devices),
        )

    def with_room(self, python: str) -> "Card | None":
        """A card in software with room for everything, for programs of this interpreter; None: there is none."""
        return replace(self, gpu=with_memory(self.gpu, ENOUGH_BYTES))


@dataclass(frozen=True)
class CardHere(Card):
    """The card of this machine.

    Attributes:
        free_bytes: what was free of it before the first run, beside CUDA's context.
        budget_bytes: all that a program may need of it, if that was asked for.
    """

    here: bool = True
    free_bytes: int = 0
    budget_bytes: int | None = None

    @property
    def name(self) -> str:
        return self.gpu.title

    @property
    def title(self) -> str:
        return f"the {self.gpu.title} of this machine"

    @property
    def room(self) -> str:
        room = super().room
        return room if self.budget_bytes else f"{room}, of which {format_bytes(self.free_bytes)} were free"

    @property
    def source(self) -> str:
        if self.budget_bytes:
            beside = f"{format_bytes(self.gpu.context_bytes_estimate)} for CUDA's context, an estimate"
        else:
            beside = "what the card says is taken beside it: CUDA's context, and other programs"
        number = NOT_MEASURED if emulated() else f"measured on {self.gpu.title}"
        return f"{number}: what PyTorch reserved, and {beside}"

    def run(self, command: Sequence[str], report: Path, time_limit_s: float, *, history: bool) -> Use:
        try:
            status = subprocess.run(command, stdout=sys.stderr, timeout=time_limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        except KeyboardInterrupt:
            status = INTERRUPTED
        seen = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        used = seen.get("card")
        if not used:
            return Use(status, used_a_gpu=False)
        beside_bytes = self.gpu.context_bytes_estimate if self.budget_bytes else used["beside"]
        return Use(status, used["reserved"], beside_bytes, used["refusals"])

    def with_room(self, python: str) -> Card | None:
        """One of this kind, where that can be."""
        try:
            gpu = with_memory(find_gpu(self.gpu.name), ENOUGH_BYTES)
            interpreter = ask_python(python)
            place.refuse_without_kernels(gpu, interpreter)
            place.stub_folder(interpreter)
        except (ConfigurationError, UnavailableError):
            return None
        return Card(gpu)


def card_named(gpu: str, budget: str | int | None) -> Card:
    """A card by its name. Raises ConfigurationError: there is none, or it has less than the budget."""
    card = find_gpu(gpu)
    if budget is not None:
        card = with_memory(card, _checked(budget, card))
    return Card(card)


def card_here(python: str, budget: str | int | None) -> CardHere:
    """The card that this interpreter's PyTorch sees.

    Raises:
        UnavailableError: it sees none, or several.
        ConfigurationError: the card has less than the budget.
    """
    command = [python, any_training.__file__]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=False)
    if answer.returncode:
        complaint = (answer.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UnavailableError(f"plan: PyTorch cannot be asked for the card: {python}: {complaint:.300}")
    facts = json.loads(answer.stdout.splitlines()[-1])
    if facts["count"] == 0:
        raise UnavailableError(
            f"plan: --here needs a card with CUDA on this machine, and PyTorch {facts['torch']} "
            "sees none. Name one instead, as in --gpu t4: the program then runs on an emulated one."
        )
    if facts["count"] > 1:
        raise UnavailableError(
            f"plan: PyTorch sees {facts['count']} cards, and one is planned for. Show it one: "
            "CUDA_VISIBLE_DEVICES=0 in front of the command."
        )
    name = facts["name"]
    catalogued = of_device(name) and of_device(name, facts["total_bytes"])
    gpu = replace(
        catalogued or UNKNOWN,
        title=f"{name} (emulated)" if emulated() else name,
        compute_capability=tuple(facts["capability"]),
        multiprocessors=facts["multiprocessors"],
        memory_bytes=facts["total_bytes"],
    )
    card = CardHere(gpu, free_bytes=facts["free_bytes"])
    if budget is None:
        return card
    budget_bytes = _checked(budget, gpu)
    share = (budget_bytes - gpu.context_bytes_estimate) / gpu.memory_bytes
    return replace(card, gpu=with_memory(gpu, budget_bytes), share=share, budget_bytes=budget_bytes)


def _checked(budget: str | int, card: Gpu) -> int:
    budget_bytes = parse_bytes(budget, "budget")
    if budget_bytes > card.memory_bytes:
        raise ConfigurationError(
            f"budget: a {card.title} has {format_bytes(card.memory_bytes)}. Lower it, or name a larger card."
        )
    return budget_bytes
