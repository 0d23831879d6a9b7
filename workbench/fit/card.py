"""The card that a program is tried on: an emulated GPU, or this machine's own."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.base.categories import format_bytes, parse_bytes
from workbench.base.device import current_emulated_gpu
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.fit import any_training
from workbench.gpus.catalogue import ENOUGH_BYTES, Gpu, recognize_gpu
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator import place
from workbench.gpus.emulator.card import DEVICE, with_memory
from workbench.gpus.emulator.interpreter import ask_python
from workbench.gpus.emulator.launch import emulate
from workbench.gpus.emulator.report import NOT_MEASURED, TIMED_OUT

INTERRUPTED = 130  # a shell's exit status of a program that Ctrl-C ended
SECONDS_TO_ANSWER = 120.0  # for an interpreter to import torch and print its cards
# A card of this machine that is in no catalogue: PyTorch's facts replace the zeros.
UNKNOWN = Gpu("here", "", "", (0, 0), 0, memory_bytes=0, source="PyTorch on this machine")


@dataclass(frozen=True)
class Use:
    """A program's use of a card.

    Attributes:
        reserved_bytes: the most that PyTorch's allocator had reserved.
        beside_bytes: what the program takes beside that, CUDA's context above all.
        refusals: how often the program was refused memory.
        holders: `line` and `bytes` of the program's lines that held most at the peak, the largest first; empty without
            a history.
        lower_bound: what took memory in amounts that nobody has measured; "" if nothing did.
        used_a_gpu: whether the program used the card at all.
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
    """An emulated GPU. A program may have `gpu.memory_bytes` of it, CUDA's context included.

    Attributes:
        here: whether it is this machine's own card, on which programs compute and memory is measured.
        share: the share of its memory that PyTorch's allocator may have, up to 1.
    """

    gpu: Gpu
    here: bool = False
    share: float = 1.0

    @property
    def name(self) -> str:
        """The device's name in records and in JSON."""
        return f"{DEVICE}{self.gpu.name}"

    @property
    def title(self) -> str:
        return f"an emulated {self.gpu.title}"

    @property
    def room(self) -> str:
        """The memory that a program may have, in words."""
        return format_bytes(self.gpu.memory_bytes)

    @property
    def source(self) -> str:
        """The source of its numbers, in words."""
        return NOT_MEASURED

    def run(self, command: Sequence[str], report: Path, time_limit_s: float, *, history: bool) -> Use:
        """Run a program on the card, and return what it took.

        Args:
            report: the file into which the program writes what it has seen.
            history: keep the lines that allocate, for `Use.holders`.

        Raises:
            UnavailableError: the emulator is not set up, or cannot be on this machine.
        """
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

    def enlarge(self, python: str) -> "Card | None":
        """Return an emulated GPU of this kind with ENOUGH_BYTES of memory, for programs of an interpreter; None if
        there can be none."""
        return replace(self, gpu=with_memory(self.gpu, ENOUGH_BYTES))


@dataclass(frozen=True)
class CardHere(Card):
    """The card of this machine.

    Attributes:
        free_bytes: the memory that was free before the first run, without that of CUDA's context.
        budget_bytes: the most that a program may need of it; None: all of it.
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
        if self.budget_bytes:
            return room
        return f"{room}, of which {format_bytes(self.free_bytes)} were free"

    @property
    def source(self) -> str:
        if self.budget_bytes:
            beside = f"{format_bytes(self.gpu.context_bytes_estimate)} for CUDA's context, an estimate"
        else:
            beside = "what the card says is taken beside it: CUDA's context, and other programs"
        number = NOT_MEASURED if current_emulated_gpu() else f"measured on {self.gpu.title}"
        return f"{number}: what PyTorch reserved, and {beside}"

    def run(self, command: Sequence[str], report: Path, time_limit_s: float, *, history: bool) -> Use:
        try:
            status = subprocess.run(command, stdout=sys.stderr, timeout=time_limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        except KeyboardInterrupt:
            status = INTERRUPTED
        facts = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        used = facts.get("card")
        if not used:
            return Use(status, used_a_gpu=False)
        beside_bytes = self.gpu.context_bytes_estimate if self.budget_bytes else used["beside"]
        return Use(status, used["reserved"], beside_bytes, used["refusals"])

    def enlarge(self, python: str) -> Card | None:
        try:
            gpu = with_memory(find_gpu(self.gpu.name), ENOUGH_BYTES)
            interpreter = ask_python(python)
            place.refuse_without_kernels(gpu, interpreter)
            place.stub_folder(interpreter)
        except (ConfigurationError, UnavailableError):
            return None
        return Card(gpu)


def card_named(gpu: str, budget: str | int | None) -> Card:
    """Return the emulated GPU of a name, with no more memory than the budget.

    Raises ConfigurationError: there is no GPU of that name, or it has less than the budget.
    """
    card = find_gpu(gpu)
    if budget is not None:
        card = with_memory(card, _parse_budget(budget, card))
    return Card(card)


def card_here(python: str, budget: str | int | None) -> CardHere:
    """Return the card that an interpreter's PyTorch sees.

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
    catalogued = recognize_gpu(name) and recognize_gpu(name, facts["total_bytes"])
    gpu = replace(
        catalogued or UNKNOWN,
        title=f"{name} (emulated)" if current_emulated_gpu() else name,
        compute_capability=tuple(facts["capability"]),
        multiprocessors=facts["multiprocessors"],
        memory_bytes=facts["total_bytes"],
    )
    card = CardHere(gpu, free_bytes=facts["free_bytes"])
    if budget is None:
        return card
    budget_bytes = _parse_budget(budget, gpu)
    share = (budget_bytes - gpu.context_bytes_estimate) / gpu.memory_bytes
    return replace(card, gpu=with_memory(gpu, budget_bytes), share=share, budget_bytes=budget_bytes)


def _parse_budget(budget: str | int, card: Gpu) -> int:
    """Return a budget in bytes. Raises ConfigurationError: it is none, or more than the card has."""
    budget_bytes = parse_bytes(budget, "budget")
    if budget_bytes > card.memory_bytes:
        raise ConfigurationError(
            f"budget: a {card.title} has {format_bytes(card.memory_bytes)}. Lower it, or name a larger card."
        )
    return budget_bytes
