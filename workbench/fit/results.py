"""What was found for a program: sets of changes with which it fits, in its own words."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from workbench.advise.candidate import answer_lines, given_up, room_in_words, worst_numerics
from workbench.base.categories import format_bytes
from workbench.base.result import Result
from workbench.base.settings import changed_settings
from workbench.fit.card import Card
from workbench.fit.edit import edits_of, imports_of_edits
from workbench.fit.places import as_keywords, is_one_switch
from workbench.fit.program import Program, Trial
from workbench.gpus.emulator.report import NOT_MEASURED
from workbench.techniques import Capability, Numerics, Technique


@dataclass(frozen=True)
class Answer(Trial, Result):
    """A set of changes with which the program was run again, and fits. In JSON its fields have a planner's names."""

    json_fields: ClassVar[tuple[str, ...]] = (
        "label",
        "changes",
        "numerics",
        "reserved_bytes",
        "needed_bytes",
        "step_time_s",
        "seconds",
        "gives_up",
        "edits",
        "imports",
    )

    @property
    def label(self) -> str:
        return title(self.techniques)

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        return {entry.name: entry.settings() for entry in self.techniques}

    @property
    def numerics(self) -> Numerics:
        return worst_numerics(self.techniques)

    @property
    def gives_up(self) -> tuple[str, ...]:
        return given_up(self.techniques)

    @property
    def edits(self) -> list[str]:
        return [str(edit) for edit in edits_of(self.techniques, self.seen)]

    @property
    def imports(self) -> list[str]:
        return imports_of_edits(edits_of(self.techniques, self.seen))

    @property
    def ways(self) -> list[str]:
        """What to write, and on which condition."""
        lines = [f"change    {edit}" for edit in self.edits]
        if self.imports:
            lines.append(f"with      {'; '.join(self.imports)}")
        if "own_loss" in self.seen and any(Capability.ACCUMULATION in entry.brings for entry in self.techniques):
            trainer = self.seen["own_loss"]
            lines.append(f"only if   the loss of {trainer} is a mean over rows or tokens: it was not looked at")
        return lines


@dataclass(frozen=True)
class Fit(Result):
    """What was found for a program on a card. In JSON its fields have the names of a recipe's plan.

    Attributes:
        card: on which it was run.
        as_it_is: the program on the card.
        with_room: with room for everything, where it does not fit; None if it does, or if there is no such place.
        candidates: sets of changes that fit: exact ones, then others; the cheaper ones first.
        failed: sets that were run and ran out of memory, too.
        skipped: sets that the program cannot have, and why.
        lacks: what the workbench needs, and the program's interpreter has not. Then arguments alone are changed.
        functions: by technique, what would have to be pasted there; these were not run.
        ended: why the search ended before it was over.
        written: the changed script, and its run by itself; empty where none was asked for. And what that run reserved.
    """

    program: Program
    card: Card
    steps: int
    as_it_is: Trial
    with_room: Trial | None
    candidates: tuple[Answer, ...] = ()
    failed: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    functions: Mapping[str, str] = field(default_factory=dict)
    ended: str = ""
    written: tuple[str, ...] = ()
    written_reserved_bytes: int | None = None
    json_fields: ClassVar[tuple[str, ...]] = (
        "device",
        "budget_bytes",
        "steps",
        "fits",
        "needed_bytes",
        "is_least",
        "tokens",
        "candidates",
        "failed",
        "skipped",
        "lacks",
        "functions",
        "ended",
        "written",
        "written_reserved_bytes",
    )

    @property
    def device(self) -> str:
        return self.card.name

    @property
    def budget_bytes(self) -> int:
        return self.card.gpu.memory_bytes

    @property
    def fits(self) -> bool:
        return self.as_it_is.fits

    @property
    def whole(self) -> Trial:
        """The run of the program as it is that came farthest."""
        return self.with_room or self.as_it_is

    @property
    def needed_bytes(self) -> int:
        return self.whole.needed_bytes

    @property
    def is_least(self) -> bool:
        """It had not taken all that it needs when it ended."""
        return not self.fits and self.with_room is None

    @property
    def tokens(self) -> str:
        """Which batches the verdict is about."""
        return batches_in_words(self.whole.seen)

    def __str__(self) -> str:
        command = shlex.join(self.program.command)
        also = self.whole.seen.get("also")
        beside = f"with {' and '.join(also)}" if also else "without evaluation and saving"
        lines = [
            f"{command} on {self.card.title} ({self.card.room}): "
            f"{self.steps} steps a run, {beside}; {self.card.source}",
            self._as_it_is(),
        ]
        for holder in self.as_it_is.use.holders[:3]:
            lines.append(f"  {format_bytes(holder['bytes']):>9}  {holder['line']}")
        lines.append(f"  {self.tokens}")
        if self.as_it_is.use.lower_bound:
            lines.append(f"  a lower bound: nobody has measured {self.as_it_is.use.lower_bound}")
        for number, answer in enumerate(self.candidates, start=1):
            need = f"{self._need(answer)}; loss {answer.numerics}"
            lines += ["", *answer_lines(f"{number}. {answer.label}", need, answer.gives_up, answer.ways)]
        if not self.candidates and not self.fits:
            lines += ["", "Nothing was found that fits. Take a smaller model, shorter rows, or a larger card."]
        if self.failed:
            lines += ["", f"run, and out of memory too: {'; '.join(self.failed)}"]
        for label, reason in self.skipped.items():
            lines.append(f"not for this program: {label}: {reason}")
        if self.ended:
            lines += ["", f"ended early: {self.ended}"]
        lines += self._without_the_workbench()
        if self.written:
            lines += ["", *self.written]
        return "\n".join(lines)

    def _as_it_is(self) -> str:
        need = format_bytes(self.needed_bytes)
        if self.as_it_is.recovered:
            return f"as it is: it was refused memory, went on with less, and fits: {need}"
        if self.fits:
            return f"as it is: it fits, and needs {self._need(self.as_it_is)}.{self._holders('at the peak')}"
        amount = f"more than {need}" if self.is_least else need
        if self.card.here and self.with_room:
            amount += f", on an emulated card, where {NOT_MEASURED}"
        return f"as it is: out of memory; it needs {amount}.{self._holders('when it ends')}"

    def _holders(self, when: str) -> str:
        return f" Who holds most {when}:" if self.as_it_is.use.holders else ""

    def _need(self, trial: Trial) -> str:
        need = f"{format_bytes(trial.needed_bytes)}, {room_in_words(self.budget_bytes - trial.needed_bytes)}"
        return f"{need}; {trial.step_time_s:.3g} s a step" if trial.step_time_s else need

    def _without_the_workbench(self) -> list[str]:
        """What was not tried in an interpreter that lacks what the workbench needs."""
        if not self.lacks:
            return []
        lines = ["", f"{self.program.python} has not what the workbench needs: {', '.join(self.lacks)}."]
        lines.append("So arguments were tried there, and no function of ours.")
        if self.functions:
            lines.append(f"These can be pasted, and were not run: {', '.join(self.functions)}.")
            lines.append("They are written for the versions that are needed. --json has their text, as `functions`.")
        if self.functions and not self.candidates:
            lines += ["The first of them, which by an estimate saves most:", "", *list(self.functions.values())[:1]]
        return lines


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
            for tried in entry.worth_trying:
                settings |= {name: entry.settings()[name] for name in tried}
        titles.append(f"{entry.name}({as_keywords(settings)})" if settings else entry.name)
    return " + ".join(titles) or "as it is"
