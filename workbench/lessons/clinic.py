"""The clinic of notebook 19: a reader says what took the memory and which two switches cure it, and a judge tries them.

What is tried is the case's own trial (`trials.py`).
"""

import html
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ipywidgets as w
from IPython.display import HTML, display

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.paths import beside
from workbench.base.settings import named
from workbench.lessons.exercise import exercise
from workbench.lessons.live import live_page
from workbench.lessons.trials import TRIALS, Trial, of_file

TEXTS = beside(__file__, "clinic.toml")
CAUSES: dict[str, str] = TEXTS["causes"]


class Judgement(NamedTuple):
    """Whether an answer is right, and why."""

    right: bool
    text: str


@dataclass(frozen=True)
class Case:
    """A case of `clinic.toml`: what is said, its cause, what can be switched, one right pair, and a tempting one.

    Args:
        trial: what it needs under some switches.
    """

    name: str
    trial: Trial
    title: str
    report: str
    cause: str
    switches: list[str]
    reference: list[str]
    tempting: list[str]
    hint: str
    answer: str
    code: str = ""
    clues: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        """What it needs before anything is switched, and its clues; its largest part is for the reader to find."""
        needs = {"It": self.trial(())} | {clue: self.trial(switches) for clue, switches in self.clues.items()}
        return " ".join(f"{subject} {replace(tried, largest=('', 0))}." for subject, tried in needs.items())

    def judge(self, cause: str, pair: Collection[str]) -> Judgement:
        """Whether this is the cause and the two switches together are enough; and that in words, with the numbers.

        Raises:
            ConfigurationError: no such cause or switch, or not two different ones.
        """
        named({cause: ""}, CAUSES, f"clinic: {self.name}", "cause")
        named(dict.fromkeys(pair), self.switches, f"clinic: {self.name}", "switch")
        if len(set(pair)) != 2:
            raise ConfigurationError(f"clinic: {self.name} asks for two different switches. Choose another one.")
        true_cause = self.cause
        if true_cause in list(Category):
            true_cause, _ = self.trial(()).largest
        is_cause = cause == true_cause
        on_cause = "That is the cause." if is_cause else "The cause is another one."
        try:
            tried = self.trial(pair)
        except ConfigurationError as refusal:
            return Judgement(False, f"{on_cause} {refusal}")
        enough = "is enough" if tried.fits else "is not enough"
        return Judgement(is_cause and tried.fits, f"{on_cause} {' + '.join(pair)} {enough}: it {tried}.")


def _case(name: str, recipe: Mapping[str, Any] | None = None, **texts: Any) -> Case:
    return Case(name, of_file(recipe) if recipe else TRIALS[name], **texts)


CASES = {name: _case(name, **texts) for name, texts in TEXTS["cases"].items()}


class Clinic:
    """Asks the cases of a notebook and keeps the score.

    Where nobody can press a button, the page itself judges the cause, without a kernel.

    Args:
        solve: the judge tries the reference answers too.
    """

    def __init__(self, solve: bool = True) -> None:
        self.solve = solve
        self.live = live_page()
        self.board = w.HTML()
        self.asked: list[str] = []
        self.solved: set[str] = set()

    def ask(self, *names: str) -> None:
        """Show cases: what is said and needed, a form, a folded hint and a folded answer.

        Raises:
            ConfigurationError: there is no such case.
            WorkbenchError: the judge takes a reference answer for wrong.
        """
        for name in named(dict.fromkeys(names), CASES, "clinic", "case"):
            self.asked.append(name)
            self._ask(CASES[name])

    def _ask(self, case: Case) -> None:
        cause = CAUSES[case.cause]
        answer = f"{' + '.join(case.reference)}. {case.answer}"
        if self.solve:
            verdict = case.judge(case.cause, case.reference)
            answer += f" {verdict.text}"
            if not verdict.right:
                raise WorkbenchError(
                    f"clinic: the judge calls the reference answer of {case.name} wrong: {verdict.text} Change it in "
                    "clinic.toml."
                )
        display(_report(case, len(self.asked)))
        if self.live:
            display(self.form(case), _folded("Answer", f"{cause}; {answer}"))
        else:
            switches = " · ".join(case.switches)
            question = f"What took the memory? And which two of these switches are enough together: {switches}?"
            display(exercise(question, cause, answer, choices=list(CAUSES.values())))
        display(_folded("Hint", case.hint))

    def form(self, case: Case) -> w.VBox:
        """Three choices, a button, and the verdict."""
        causes = [(text, name) for name, text in CAUSES.items()]
        switches = [(name, name) for name in case.switches]
        boxes = [_choice("cause", causes), _choice("first switch", switches), _choice("second switch", switches)]
        check = w.Button(description="Check", button_style="primary")
        verdict = w.HTML(_status(""))

        def press(_: Any) -> None:
            check.disabled = True
            verdict.value = _status("Trying it …")
            verdict.value = _status(self.answer(case, *(box.value for box in boxes)))
            self.board.value = _status(self.score)
            check.disabled = False

        check.on_click(press)
        return w.VBox([*boxes, check, verdict])

    def answer(self, case: Case, cause: str, *pair: str) -> str:
        """The verdict on a reader's answer, in words, with the score."""
        if not all((cause, *pair)):
            return "Choose a cause and two switches first."
        try:
            verdict = case.judge(cause, pair)
        except WorkbenchError as error:
            return str(error)
        if verdict.right:
            self.solved.add(case.name)
        return f"{'Right.' if verdict.right else 'Not yet.'} {verdict.text} {self.score}"

    @property
    def score(self) -> str:
        if not self.live:
            return "The score is kept where the notebook has a kernel."
        return f"Solved: {len(self.solved)} of {len(self.asked)}."

    def grade(self) -> None:
        """Show the reader's score, which every answer from then on brings up to date."""
        self.board.value = _status(self.score)
        display(self.board if self.live else HTML(self.board.value))


def _report(case: Case, number: int) -> HTML:
    parts = [f"<h3>{number} · {html.escape(case.title)}</h3>", f"<p>{html.escape(case.report)}</p>"]
    if case.code:
        parts.append(f'<pre style="font-family: monospace">{html.escape(case.code.strip())}</pre>')
    parts.append(f"<p><b>{html.escape(case.needs)}</b></p>")
    return HTML("".join(parts))


def _choice(description: str, options: list[tuple[str, str]]) -> w.Dropdown:
    return w.Dropdown(
        description=description,
        options=[("choose …", ""), *options],
        style={"description_width": "8em"},
        layout={"width": "min(44em, 100%)"},
    )


def _status(text: str) -> str:
    return f'<div role="status" style="line-height: 1.5; max-width: 60em">{html.escape(text)}</div>'


def _folded(summary: str, text: str) -> HTML:
    return HTML(f"<details><summary>{summary}</summary><p>{html.escape(text)}</p></details>")
