"""`fit` runs a program as it is on a card. If that does not fit, it looks for the smallest sets of changes that do.

Estimates decide which sets are tried, and in which order; whatever is said of a set was run on the card.
"""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import unified_diff

from workbench.advise.candidate import NUMERICS
from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError
from workbench.base.paths import write_whole
from workbench.fit.any_training import Facts
from workbench.fit.candidates import Sizes, estimate, extra_time, list_choices, sets_of, sizes_of
from workbench.fit.card import Card, card_here, card_named
from workbench.fit.edit import Edit, edits_of, rewrite_script
from workbench.fit.functions import functions_to_paste
from workbench.fit.places import Techniques, places_of, variables
from workbench.fit.program import Program, Trial, check_trial, find_missing_packages, try_out
from workbench.fit.results import Answer, Fit, title
from workbench.techniques import Numerics

STEPS = 3  # optimizer steps: the first makes the optimizer's states, so that the second is the first with all memory
TIME_LIMIT_S = 600.0
ANSWERS = {Numerics.EXACT: 3, Numerics.APPROXIMATE: 1, Numerics.DIFFERENT: 1}  # the most of each kind of loss
TRIALS = 10  # the most sets of names that are tried for each kind of loss
CHEAP = 0.1  # If an answer makes a step at most a tenth longer, no other kind of loss is tried.
TIME_UP = "the time was up (--timeout)"
UNSURE = 1.05  # Estimates err: a set is tried if its estimate is at most 5 % above the card's memory.


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
        life: let a Trainer evaluate and save after the steps.
        time_limit_s: for all runs together. What is known by then is the answer.
        write: write the script with the first answer's changes beside it, and run that file by itself.
        say: gets a line about each run.

    Raises:
        ConfigurationError: the program does not come to train, or uses several processes; or the budget is no amount
            of memory, or more than the card has.
        UnavailableError: there is no emulator on this machine, or it is not set up; or with `here` there is no card.
    """
    program = Program.parse(command)
    card = card_here(program.python, budget) if here else card_named(gpu, budget)
    search = ProgramSearch(program, card, steps, life, time.monotonic() + time_limit_s, say)
    planned = search.fit()
    return write_beside(planned, search) if write and planned.candidates else planned


@dataclass
class ProgramSearch:
    """The search for sets of changes, and its state from run to run.

    Attributes:
        ends_at: seconds on the clock `time.monotonic`.
        too_large: sets that were run and ran out of memory.
        skipped: why sets, or single techniques, cannot be run with this program, by their titles.
        functions: the text of functions to paste, by technique, for an interpreter without the workbench.
        ended: why the search ended early; "" as long as it goes on.
        before: the facts about the program as it is.
    """

    program: Program
    card: Card
    steps: int
    life: bool
    ends_at: float
    say: Callable[[str], None]
    too_large: list[Techniques] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    ended: str = ""
    before: Facts = field(default_factory=Facts)

    def fit(self) -> Fit:
        """Run the program as it is and, if it does not fit, search sets of changes.

        Raises KeyboardInterrupt: it was interrupted before anything was known.
        """
        time_limit_s = self.ends_at - time.monotonic()
        lacks = find_missing_packages(self.program.python)
        self.say(f"as it is, on {self.card.title}: {shlex.join(self.program.command)}")
        as_it_is = self.run((), shown=True)
        if as_it_is.use.interrupted:
            raise KeyboardInterrupt
        check_trial(as_it_is, time_limit_s)
        self.before = as_it_is.facts
        if self.life and self.before["kind"] == "loop":
            raise ConfigurationError(
                "plan: --life is for scripts with a Trainer, which says when it evaluates and "
                "saves. Leave it out, and look at what your loop does after its steps with "
                "`workbench emulate`."
            )
        with_room = None
        answers: list[Answer] = []
        if not as_it_is.fits:
            with_room = self.run_with_room()
            answers = self.find_answers(with_room or as_it_is)
        return Fit(
            self.program,
            self.card,
            self.steps,
            as_it_is,
            with_room,
            tuple(answers),
            failed=tuple(map(title, self.too_large)),
            skipped=self.skipped,
            lacks=lacks,
            functions=self.functions,
            ended=self.ended,
        )

    def run_with_room(self) -> Trial | None:
        """Run the program as it is on an emulated card with room for everything, to learn all that it needs.

        Returns None if there is no such card, or the program did not come to the end of its steps there.
        """
        card = self.card.enlarge(self.program.python)
        if card is None:
            self.say("out of memory; what it had by then decides what is tried first")
            return None
        self.say(f"out of memory; once more, on {card.title} with room for everything")
        trial = self.run((), card=card)
        if trial.ran:
            return trial
        self.ended = self.ended or "with room for everything it did not come to the end of its steps"
        return None

    def find_answers(self, whole: Trial) -> list[Answer]:
        """Find sets with which the program fits: exact ones first, others if those take much time.

        Args:
            whole: a run of the program as it is, the one with room for everything if there was one.
        """
        if "model" not in whole.facts and whole.facts["kind"] == "loop":
            self.ended = "its model is no causal language model of transformers, and no other is changed from outside"
        elif "sizes" not in whole.facts:
            self.ended = self.ended or "it ran out of memory before its training began: its model alone is too large"
        if self.ended:
            return []
        sizes = sizes_of(whole.facts, whole.reserved_bytes, whole.use.beside_bytes)
        is_alone = bool(find_missing_packages(self.program.python))
        choices = list_choices(whole.facts, self.card.gpu, by_arguments_alone=is_alone)
        if is_alone:
            self.functions = functions_to_paste(whole.facts, self.card.gpu, sizes)
        answers: list[Answer] = []
        for numerics in NUMERICS:
            is_cheap = any(extra_time(answer.techniques) <= CHEAP for answer in answers)
            if self.ended or is_cheap:
                break
            answers += self.find_answers_of(numerics, choices, sizes, is_whole=whole.fits)
        return answers

    def find_answers_of(
        self, numerics: Numerics, choices: list[Techniques], sizes: Sizes, *, is_whole: bool
    ) -> list[Answer]:
        """Find sets whose loss is of one kind, those that take the least time first.

        Args:
            is_whole: whether `sizes` are all that the program needs. If not, they are lower bounds, and a set is tried
                only if its estimate is below those of all sets that ran out of memory.
        """
        answers: list[Answer] = []
        # For the names of each set that was tried, whether it ran. If not, its other settings are not tried.
        ran: dict[frozenset[str], bool] = {}
        least = estimate(sizes, ())
        for techniques in sets_of(choices, numerics, sizes, UNSURE * self.card.gpu.memory_bytes):
            names = frozenset(entry.name for entry in techniques)
            is_larger = answers and len(techniques) > len(answers[0].techniques)
            is_one_too_many = len(ran) == TRIALS and names not in ran
            if is_larger or is_one_too_many or len(answers) == ANSWERS[numerics] or self.ended:
                break
            if any(names >= answer.changes.keys() for answer in answers) or self.is_hopeless(techniques):
                continue
            if not ran.get(names, True) or (not is_whole and estimate(sizes, techniques) >= least):
                continue
            trial = self.run(techniques)
            ran[names] = trial.ran
            if trial.fits:
                answers.append(Answer(**vars(trial)))
            elif trial.ran:
                self.too_large.append(techniques)
                least = min(least, estimate(sizes, techniques))
        return sorted(answers, key=lambda answer: answer.step_time_s or extra_time(answer.techniques))

    def is_hopeless(self, techniques: Techniques) -> bool:
        """Whether the program cannot have one of the techniques, or a set that holds them all was too large."""
        if any(title((entry,)) in self.skipped for entry in techniques):
            return True
        return any(set(techniques) <= set(larger) for larger in self.too_large)

    def run(self, techniques: Techniques, *, card: Card | None = None, shown: bool = False) -> Trial:
        """Run the program with techniques in the time that is left, note why it failed, and say the verdict.

        Args:
            card: in place of the search's own.
            shown: the program's output goes to standard error, and its failure is for `check_trial`.
        """
        trial = try_out(
            self.program,
            card or self.card,
            techniques,
            steps=self.steps,
            before=self.before,
            life=self.life,
            time_limit_s=self.ends_at - time.monotonic(),
            shown=shown,
        )
        if trial.use.interrupted:
            self.ended = "interrupted"
        elif trial.use.timed_out:
            self.ended = TIME_UP
        elif not trial.ran and not shown:
            ended = f"it ended with status {trial.use.exit_status}"
            reason = trial.facts.get("refusal") or trial.facts.get("message") or ended
            # A reason that begins with a technique's name is about that one: no other set with it is tried.
            refused = [entry for entry in techniques if reason.removeprefix("apply: ").startswith(entry.name)]
            self.skipped[title(refused or techniques)] = " ".join(reason.split())[:300]
        verdict = f"needs {format_bytes(trial.needed_bytes)}" if trial.fits else "out of memory"
        if not trial.ran:
            verdict = "does not run"
        self.say(f"{title(techniques)}: {verdict} ({trial.seconds:.0f} s)")
        return trial


# ---- --apply ----


def write_beside(planned: Fit, search: ProgramSearch) -> Fit:
    """Write the script with the first answer's changes beside it, and run that file by itself.

    Returns the plan with `written` and `written_reserved_bytes`.
    """
    answer = planned.candidates[0]
    try:
        program, lines = write_program(planned, edits_of(answer.techniques, answer.facts))
    except ConfigurationError as error:
        return replace(planned, written=(str(error),))
    # Variables of the environment stand in front of the command, not in the script: this run is given them too.
    carried = tuple(entry for entry in answer.techniques if entry.environment())
    command = f"{variables(places_of(carried, {}).environment)} {shlex.join(program.command)}"
    lines.append(f"run by itself: {command.lstrip()}")
    by_itself = replace(search, program=program, skipped={}).run(carried)
    if not by_itself.ran:
        reason = TIME_UP if by_itself.use.timed_out else by_itself.facts.get("message", "it ended")
        lines.append(f"  not verified, since it did not come to the end of its steps: {reason}")
        return replace(planned, written=tuple(lines))
    verdict = "fits" if by_itself.fits else "does NOT fit, against the plan"
    if by_itself.reserved_bytes != answer.reserved_bytes:
        verdict += f"; the plan had {answer.reserved_bytes:,}"
    lines.append(
        f"  needs {format_bytes(by_itself.needed_bytes)} ({by_itself.reserved_bytes:,} bytes reserved), {verdict}"
    )
    return replace(planned, written=tuple(lines), written_reserved_bytes=by_itself.reserved_bytes)


def write_program(planned: Fit, edits: Sequence[Edit]) -> tuple[Program, list[str]]:
    """Write the script with the edits; return its command, and lines that show what was written.

    Raises ConfigurationError: an edit cannot be written, or the file is there already with another text.
    """
    program = planned.program
    place = None
    lines: list[str] = []
    flags: list[str] = []
    for edit in edits:
        flags += edit.flags
    if any(edit.write for edit in edits):
        text = rewrite_script(program, edits)
        assert program.file is not None
        place = program.file.with_stem(f"{program.file.stem}_fits_{planned.card.gpu.name.replace('-', '_')}")
        if place.exists() and place.read_text(encoding="utf-8") != text:
            raise ConfigurationError(f"plan: {place} is there already, with another text. Move it away.")
        write_whole(place, text)
        before = program.file.read_text(encoding="utf-8")
        lines += unified_diff(before.splitlines(), text.splitlines(), str(program.file), str(place), n=1, lineterm="")
        lines.append(f"written: {place}")
    return program.replace_script(place, flags), lines
