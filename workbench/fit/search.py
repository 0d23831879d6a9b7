"""`fit`: a program as it is on a card and, where it does not fit, the smallest sets of changes with which it does.

An estimate decides which sets are tried, and in which order; whatever is said of a set was run on the card.
"""

import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from typing import Any

from workbench.advise.candidate import NUMERICS
from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError
from workbench.base.paths import write_whole
from workbench.fit.candidates import Sizes, estimate, extra_time, offered, sets_of, sizes_of
from workbench.fit.card import Card, card_here, card_named
from workbench.fit.edit import Edit, changed_script, edits_of
from workbench.fit.functions import functions_to_paste
from workbench.fit.places import places_of, variables
from workbench.fit.program import Program, Trial, check_trial, lacking, try_out
from workbench.fit.results import Answer, Fit, title
from workbench.techniques import Numerics, Technique

STEPS = 3  # the first makes the optimizer's states; the second is the first that needs all memory
TIME_LIMIT_S = 600.0
ANSWERS = {Numerics.EXACT: 3, Numerics.APPROXIMATE: 1, Numerics.DIFFERENT: 1}
TRIALS = 10  # of each kind of loss
CHEAP = 0.1  # an exact answer that takes no more time than this: others are not looked for
TIME_UP = "the time was up (--timeout)"
UNSURE = 1.05  # sets that by their estimate need so much of the room are tried


def fit(
    command: Sequence[str],
    gpu: str = "t4",
    *,
    here: bool = False,
    budget: str | int | None = None,
    steps: int = STEPS,
    life: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    write: bool = False,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> Fit:
    """Run a program on a card; if it does not fit, search the smallest sets of changes with which it does.

        fit(["python", "train.py", "--epochs", "1"], gpu="t4")

    Args:
        command: as typed in a shell; the program's own arguments stay what they are.
        gpu: the card that is emulated.
        here: run it on this machine's own card instead.
        budget: all that it may need of the card, CUDA's context included; by default what the card has.
        steps: optimizer steps of each run.
        life: evaluation and saving after them, as a Trainer does them.
        time_limit_s: for all runs together. What is known by then is the answer.
        write: write the script with the first answer's changes beside it, and run that file by itself.
        say: told of each run.

    Raises:
        ConfigurationError: the program does not come to train, or uses several processes; a budget that is none.
        UnavailableError: there is no emulator on this machine, or it is not set up; or `here` there is no card.
    """
    program = Program.parse(command)
    card = card_here(program.python, budget) if here else card_named(gpu, budget)
    search = ProgramSearch(program, card, steps, life, time.monotonic() + time_limit_s, say)
    planned = search.fit()
    return written_beside(planned, search) if write and planned.candidates else planned


@dataclass
class ProgramSearch:
    """The search, run by run.

    Attributes:
        ends_at: on the clock `time.monotonic`.
        failed, skipped, functions, ended: as `Fit` has them.
        before: what was seen of the program as it is.
    """

    program: Program
    card: Card
    steps: int
    life: bool
    ends_at: float
    say: Callable[[str], None]
    failed: list[tuple[Technique, ...]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    ended: str = ""
    before: Mapping[str, Any] = field(default_factory=dict)

    def fit(self) -> Fit:
        time_limit_s = self.ends_at - time.monotonic()
        lacks = lacking(self.program.python)
        self.say(f"as it is, on {self.card.title}: {shlex.join(self.program.command)}")
        as_it_is = self.run((), shown=True)
        if as_it_is.use.interrupted:
            raise KeyboardInterrupt
        check_trial(as_it_is, time_limit_s)
        self.before = as_it_is.seen
        if self.life and self.before["kind"] == "loop":
            raise ConfigurationError(
                "plan: --life is for scripts with a Trainer, which says when it evaluates and "
                "saves. Leave it out, and look at what your loop does after its steps with "
                "`workbench emulate`."
            )
        with_room = None
        answers: list[Answer] = []
        if not as_it_is.fits:
            with_room = self.with_room()
            answers = self.answers(with_room or as_it_is)
        return Fit(
            self.program,
            self.card,
            self.steps,
            as_it_is,
            with_room,
            tuple(answers),
            failed=tuple(map(title, self.failed)),
            skipped=self.skipped,
            lacks=lacks,
            functions=self.functions,
            ended=self.ended,
        )

    def with_room(self) -> Trial | None:
        """The program as it is where there is room for everything; None: it was not run there, or not to its end."""
        card = self.card.with_room(self.program.python)
        if card is None:
            self.say("out of memory; what it had by then decides what is tried first")
            return None
        self.say(f"out of memory; once more, on {card.title} with room for everything")
        trial = self.run((), card=card)
        if trial.ran:
            return trial
        self.ended = self.ended or "with room for everything it did not come to the end of its steps"
        return None

    def answers(self, whole: Trial) -> list[Answer]:
        """Sets that fit: exact ones first, and others where those are dear.

        Args:
            whole: the program as it is, with room for everything if there was such a run.
        """
        if "model" not in whole.seen and whole.seen["kind"] == "loop":
            self.ended = "its model is no causal language model of transformers, and no other is changed from outside"
        elif "sizes" not in whole.seen:
            self.ended = self.ended or "it ran out of memory before its training began: its model alone is too large"
        if self.ended:
            return []
        sizes = sizes_of(whole.seen, whole.reserved_bytes, whole.use.beside_bytes)
        is_alone = bool(lacking(self.program.python))
        choices = offered(whole.seen, self.card.gpu, by_arguments_alone=is_alone)
        if is_alone:
            self.functions = functions_to_paste(whole.seen, self.card.gpu, sizes)
        answers: list[Answer] = []
        for numerics in NUMERICS:
            is_cheap = any(extra_time(answer.techniques) <= CHEAP for answer in answers)
            if self.ended or is_cheap:
                break
            answers += self.answers_of(numerics, choices, sizes, is_whole=whole.fits)
        return answers

    def answers_of(
        self, numerics: Numerics, choices: list[tuple[Technique, ...]], sizes: Sizes, *, is_whole: bool
    ) -> list[Answer]:
        """Those of one kind of loss. Sizes that are not whole are the least: what is estimated to need as much as a set
        that ran out of memory is not tried."""
        answers: list[Answer] = []
        # by the names in a set that was tried: with its next settings
        goes_on: dict[frozenset[str], bool] = {}
        least = estimate(sizes, ())
        for techniques in sets_of(choices, numerics, sizes, UNSURE * self.card.gpu.memory_bytes):
            names = frozenset(entry.name for entry in techniques)
            is_larger = answers and len(techniques) > len(answers[0].techniques)
            is_one_too_many = len(goes_on) == TRIALS and names not in goes_on
            if is_larger or is_one_too_many or len(answers) == ANSWERS[numerics] or self.ended:
                break
            if any(names >= answer.changes.keys() for answer in answers) or self.is_hopeless(techniques):
                continue
            if not goes_on.get(names, True) or (not is_whole and estimate(sizes, techniques) >= least):
                continue
            trial = self.run(techniques)
            goes_on[names] = trial.ran
            if trial.fits:
                answers.append(Answer(**vars(trial)))
            elif trial.ran:
                self.failed.append(techniques)
                least = min(least, estimate(sizes, techniques))
        return sorted(answers, key=lambda answer: answer.step_time_s or extra_time(answer.techniques))

    def is_hopeless(self, techniques: tuple[Technique, ...]) -> bool:
        """A set that could not be run has a part in it that cannot, or a larger one did not fit."""
        if any(title((entry,)) in self.skipped for entry in techniques):
            return True
        return any(set(techniques) <= set(larger) for larger in self.failed)

    def run(self, techniques: tuple[Technique, ...], *, card: Card | None = None, shown: bool = False) -> Trial:
        time_left_s = self.ends_at - time.monotonic()
        if time_left_s < 1:
            self.ended = TIME_UP
        trial = try_out(
            self.program,
            card or self.card,
            techniques,
            steps=self.steps,
            before=self.before,
            life=self.life,
            time_limit_s=time_left_s,
            shown=shown,
        )
        if trial.use.interrupted:
            self.ended = "interrupted"
        elif trial.use.timed_out:
            self.ended = TIME_UP
        elif not trial.ran and not shown:
            ended = f"it ended with status {trial.use.exit_status}"
            reason = str(trial.seen.get("refusal") or trial.seen.get("message") or ended)
            # where the reason begins with the name of one of them, no other set with it is tried
            refused = []
            for entry in techniques:
                if reason.removeprefix("apply: ").startswith(entry.name):
                    refused.append(entry)
            self.skipped[title(refused or techniques)] = " ".join(reason.split())[:300]
        verdict = f"needs {format_bytes(trial.needed_bytes)}" if trial.fits else "out of memory"
        if not trial.ran:
            verdict = "does not run"
        self.say(f"{title(techniques)}: {verdict} ({trial.seconds:.0f} s)")
        return trial


# ---- --apply ----


def written_beside(planned: Fit, search: ProgramSearch) -> Fit:
    """Write the script with the first answer's changes beside it, and run that file by itself."""
    answer = planned.candidates[0]
    try:
        program, lines = written_program(planned, edits_of(answer.techniques, answer.seen))
    except ConfigurationError as error:
        return replace(planned, written=(str(error),))
    carried = tuple(entry for entry in answer.techniques if entry.environment())
    command = f"{variables(places_of(carried, {}).environment)} {shlex.join(program.command)}"
    lines.append(f"run by itself: {command.lstrip()}")
    by_itself = replace(search, program=program, skipped={}).run(carried)
    if not by_itself.ran:
        reason = TIME_UP if by_itself.use.timed_out else by_itself.seen.get("message", "it ended")
        lines.append(f"  not verified, since it did not come to the end of its steps: {reason}")
        return replace(planned, written=tuple(lines))
    verdict = "fits" if by_itself.fits else "does NOT fit, against the plan"
    if by_itself.reserved_bytes != answer.reserved_bytes:
        verdict += f"; the plan had {answer.reserved_bytes:,}"
    lines.append(
        f"  needs {format_bytes(by_itself.needed_bytes)} ({by_itself.reserved_bytes:,} bytes reserved), {verdict}"
    )
    return replace(planned, written=tuple(lines), written_reserved_bytes=by_itself.reserved_bytes)


def written_program(planned: Fit, edits: Sequence[Edit]) -> tuple[Program, list[str]]:
    """The program with the edits, and what is to be said of that. Raises ConfigurationError: one cannot be written."""
    program = planned.program
    place = None
    lines: list[str] = []
    flags: list[str] = []
    for edit in edits:
        flags += edit.flags
    if any(edit.write for edit in edits):
        text = changed_script(program, edits)
        assert program.file is not None
        place = program.file.with_stem(f"{program.file.stem}_fits_{planned.card.gpu.name.replace('-', '_')}")
        if place.exists() and place.read_text(encoding="utf-8") != text:
            raise ConfigurationError(f"plan: {place} is there already, with another text. Move it away.")
        write_whole(place, text)
        before = program.file.read_text(encoding="utf-8")
        lines += unified_diff(before.splitlines(), text.splitlines(), str(program.file), str(place), n=1, lineterm="")
        lines.append(f"written: {place}")
    return program.changed(place, flags), lines
