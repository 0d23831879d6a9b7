"""What was found for a program: sets of changes with which it fits, in its own words."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from workbench.advise.candidate import NUMERICS
from workbench.base.categories import format_bytes
from workbench.base.result import Result
from workbench.fit.edit import edits_of, imports_of_edits
from workbench.fit.places import as_keywords, is_one_switch
from workbench.fit.program import Program, Trial
from workbench.gpus.catalogue import Gpu
from workbench.gpus.emulator.report import NOT_MEASURED
from workbench.recipe import changed_settings
from workbench.techniques import Capability, Numerics, Technique


@dataclass(frozen=True)
class Answer(Trial, Result):
    """A set of changes with which the program was run again, and fits."""

    json_fields: ClassVar[tuple[str, ...]] = (
        "title",
        "changes",
        "numerics",
        "reserved_bytes",
        "needed_bytes",
        "seconds",
        "edits",
        "imports",
    )

    @property
    def title(self) -> str:
        return title(self.techniques)

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        return {entry.name: entry.settings() for entry in self.techniques}

    @property
    def numerics(self) -> Numerics:
        """What the worst of them does to the loss."""
        return max((entry.numerics for entry in self.techniques), key=NUMERICS.index)

    @property
    def edits(self) -> list[str]:
        return [str(edit) for edit in edits_of(self)]

    @property
    def imports(self) -> list[str]:
        return imports_of_edits(edits_of(self))

    def __str__(self) -> str:
        lines = [f"   change     {edit}" for edit in self.edits]
        if self.imports:
            lines.append(f"   with       {'; '.join(self.imports)}")
        lines += [f"   gives up   {entry.name}: {entry.costs}" for entry in self.techniques]
        if "own_loss" in self.seen and any(Capability.ACCUMULATION in entry.brings for entry in self.techniques):
            trainer = self.seen["own_loss"]
            lines.append(f"   only if    the loss of {trainer} is a mean over rows or tokens: it was not looked at")
        return "\n".join(lines)


@dataclass(frozen=True)
class Fit(Result):
    """What was found for a program on a card.

    Attributes:
        as_it_is: the program on the card.
        with_room: on a card with room for everything, where it does not fit; None if it does.
        answers: sets of changes that fit: exact ones, then others; the cheaper ones first.
        failed: sets that were run and ran out of memory, too.
        unsuitable: sets that the program cannot have, and why.
        ended: why the search ended before it was over.
        written: the changed script, and its run by itself; empty where none was asked for. And what that run reserved.
    """

    program: Program
    gpu: Gpu
    steps: int
    as_it_is: Trial
    with_room: Trial | None
    answers: tuple[Answer, ...] = ()
    failed: tuple[str, ...] = ()
    unsuitable: Mapping[str, str] = field(default_factory=dict)
    ended: str = ""
    written: tuple[str, ...] = ()
    written_reserved_bytes: int | None = None
    json_fields: ClassVar[tuple[str, ...]] = (
        "card",
        "memory_bytes",
        "steps",
        "fits",
        "needed_bytes",
        "tokens",
        "answers",
        "failed",
        "unsuitable",
        "ended",
        "written",
        "written_reserved_bytes",
    )

    @property
    def card(self) -> str:
        return f"emulated:{self.gpu.name}"

    @property
    def memory_bytes(self) -> int:
        return self.gpu.memory_bytes

    @property
    def fits(self) -> bool:
        return self.as_it_is.fits

    @property
    def needed_bytes(self) -> int:
        return (self.with_room or self.as_it_is).needed_bytes

    @property
    def tokens(self) -> str:
        """Which batches the verdict is about."""
        return batches_in_words((self.with_room or self.as_it_is).seen)

    def __str__(self) -> str:
        command = shlex.join(self.program.command)
        memory = format_bytes(self.gpu.memory_bytes)
        also = (self.with_room or self.as_it_is).seen.get("also")
        beside = f"with {' and '.join(also)}" if also else "without evaluation and saving"
        lines = [
            f"{command} on an emulated {self.gpu.title} ({memory}): {self.steps} steps a run, {beside}; {NOT_MEASURED}",
            self._as_it_is(),
            *(f"  {format_bytes(holder['bytes']):>9}  {holder['line']}" for holder in self.as_it_is.holders[:3]),
            f"  {self.tokens}",
        ]
        if self.as_it_is.lower_bound:
            lines.append(f"  a lower bound: nobody has measured {self.as_it_is.lower_bound}")
        for number, answer in enumerate(self.answers, start=1):
            lines += ["", f"{number}. {answer.title}: loss {answer.numerics}; {self._need(answer)}", str(answer)]
        if not self.answers and not self.fits:
            lines += ["", "Nothing was found that fits. Take a smaller model, shorter rows, or a larger card."]
        if self.failed:
            lines += ["", f"run, and out of memory too: {'; '.join(self.failed)}"]
        lines += [f"not for this program: {name}: {reason}" for name, reason in self.unsuitable.items()]
        if self.ended:
            lines += ["", f"ended early: {self.ended}"]
        return "\n".join([*lines, *(["", *self.written] if self.written else [])])

    def _as_it_is(self) -> str:
        need = format_bytes(self.needed_bytes)
        if self.as_it_is.recovered:
            return f"as it is: it was refused memory, went on with less, and fits: {need}"
        if self.fits:
            return f"as it is: it fits, and {self._need(self.as_it_is)}. Who holds most at the peak:"
        amount = need if self.with_room else f"more than {need}"
        return f"as it is: out of memory; it needs {amount}. Who holds most when it ends:"

    def _need(self, trial: Trial) -> str:
        spare = format_bytes(self.gpu.memory_bytes - trial.needed_bytes)
        return f"needs {format_bytes(trial.needed_bytes)}, {spare} to spare"


def batches_in_words(seen: Mapping[str, Any]) -> str:
    """Which batches a verdict is about."""
    if not seen["rows"]:
        return "for batches as they came; their shapes were not seen"
    shape = f"{seen['rows']} × {seen['tokens']:,} tokens"
    if seen.get("longest_row", 0) and seen["longest_row"] <= seen["tokens"]:
        return f"batches of {shape}, the longest rows of its data"
    return f"for batches up to {shape}; whether its data has longer ones is not known"


def title(techniques: Sequence[Technique]) -> str:
    """`fused_gelu + gradient_accumulation(steps=2)`: with the settings of which several were tried."""
    titles = []
    for entry in techniques:
        settings = changed_settings(entry)
        if not is_one_switch(entry):
            settings |= {name: entry.settings()[name] for tried in entry.worth_trying for name in tried}
        titles.append(f"{entry.name}({as_keywords(settings)})" if settings else entry.name)
    return " + ".join(titles) or "as it is"
