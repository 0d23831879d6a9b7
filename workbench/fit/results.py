"""The result of a search: the sets of changes with which a program fits, in the program's own words."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from workbench.advise.candidate import answer_lines, costs_of, room_in_words, worst_numerics
from workbench.base.categories import format_bytes
from workbench.base.result import Result
from workbench.base.settings import non_default_settings
from workbench.fit.any_training import Facts
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
        return costs_of(self.techniques)

    @property
    def edits(self) -> list[str]:
        return [str(edit) for edit in edits_of(self.techniques, self.facts)]

    @property
    def imports(self) -> list[str]:
        return imports_of_edits(edits_of(self.techniques, self.facts))

    @property
    def instructions(self) -> list[str]:
        """The lines that say what to write, and on which condition."""
        lines = [f"change    {edit}" for edit in self.edits]
        if self.imports:
            lines.append(f"with      {'; '.join(self.imports)}")
        if "own_loss" in self.facts and any(Capability.ACCUMULATION in entry.brings for entry in self.techniques):
            trainer = self.facts["own_loss"]
            lines.append(f"only if   the loss of {trainer} is a mean over rows or tokens: it was not looked at")
        return lines


@dataclass(frozen=True)
class Fit(Result):
    """The plan for a program on a card. In JSON its fields have the names of a recipe's plan.

    Attributes:
        card: the card on which the program was run.
        steps: optimizer steps of each run.
        as_it_is: the run of the program without changes.
        with_room: the same run on an emulated card with room for everything; None if it fits as it is, or if there is
            no such card.
        candidates: sets of changes that fit: exact ones, then others; the cheaper ones first.
        failed: titles of sets that were run and ran out of memory, too.
        skipped: why the program cannot have a set, by its title.
        lacks: what the workbench needs, and the program's interpreter has not. Then arguments alone are changed.
        functions: source to paste into the script, by technique, for such an interpreter; these were not run.
        ended: why the search ended early; "" if it did not.
        written: lines that show the changed script and its run by itself; empty if none was asked for.
        written_reserved_bytes: the most that PyTorch's allocator had reserved in that run; None if there was none.
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
        """The run without changes that came farthest."""
        return self.with_room or self.as_it_is

    @property
    def needed_bytes(self) -> int:
        return self.whole.needed_bytes

    @property
    def is_least(self) -> bool:
        """Whether `needed_bytes` is a lower bound: the program ended before it had taken all that it needs."""
        return not self.fits and self.with_room is None

    @property
    def tokens(self) -> str:
        """The batches that the verdict is about, in words."""
        return batches_in_words(self.whole.facts)

    def __str__(self) -> str:
        command = shlex.join(self.program.command)
        also = self.whole.facts.get("also")
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
            lines += ["", *answer_lines(f"{number}. {answer.label}", need, answer.gives_up, answer.instructions)]
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
        """List what was not tried, if the program's interpreter lacks what the workbench needs."""
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


def batches_in_words(facts: Facts) -> str:
    """Say which batches a verdict is about."""
    if not facts["rows"]:
        return "for batches as they came; their shapes were not seen"
    shape = f"{facts['rows']} × {facts['tokens']:,} tokens"
    if facts.get("longest_row", 0) and facts["longest_row"] <= facts["tokens"]:
        return f"batches of {shape}, the longest rows of its data"
    return f"for batches up to {shape}; whether its data has longer ones is not known"


def title(techniques: Sequence[Technique]) -> str:
    """Return the names of techniques, with the settings of which several are tried:
    `fused_gelu + gradient_accumulation(steps=2)`; "as it is" for none."""
    titles = []
    for entry in techniques:
        settings = non_default_settings(entry)
        if not is_one_switch(entry):
            for tried in entry.worth_trying:
                settings |= {name: entry.settings()[name] for name in tried}
        titles.append(f"{entry.name}({as_keywords(settings)})" if settings else entry.name)
    return " + ".join(titles) or "as it is"
