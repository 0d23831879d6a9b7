"""The clinic of notebook 19: a reader says what took the memory and which two switches cure it, and a judge tries them.

What is tried is the case's own trial (`trials.py`). Where nothing can be tried, the reference answer in `clinic.toml`
decides, and the verdict and the score say so.
"""

import html
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ipywidgets as w
import pandas as pd
from IPython.display import HTML, display

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.base.paths import beside
from workbench.base.settings import named
from workbench.lessons.exercise import exercise
from workbench.lessons.live import live_page
from workbench.lessons.trials import TRIALS, Trial, of_file

TEXTS = beside(__file__, "clinic.toml")
CAUSES: dict[str, str] = TEXTS["causes"]


class Judgement(NamedTuple):
    """Whether an answer is right, why, and whether it was tried or only looked up."""

    right: bool
    text: str
    tried: bool


@dataclass(frozen=True)
class Case:
    """A case of `clinic.toml`: what is said, its cause, what can be switched, one right pair, and a tempting one."""

    name: str
    title: str
    report: str
    cause: str
    switches: list[str]
    reference: list[str]
    tempting: list[str]
    hint: str
    answer: str
    code: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    clues: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def trial(self) -> Trial:
        """What it needs under some switches."""
        return of_file(self.recipe) if self.recipe else TRIALS[self.name]

    def told(self, trial: Trial) -> str:
        """What it needs before anything is switched, and its clues; its largest part is for the reader to find."""
        try:
            needs = {"It": trial(())} | {clue: trial(switches) for clue, switches in self.clues.items()}
        except UnavailableError as missing:
            return f"What it needs is not predicted here: {missing}"
        return " ".join(f"{subject} {replace(tried, largest=('', 0))}." for subject, tried in needs.items())

    def judge(self, cause: str, pair: Collection[str], trial: Trial) -> Judgement:
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
            true_cause, _ = trial(()).largest
        is_cause = cause == true_cause
        enough = self._try(pair, trial)
        on_cause = "That is the cause." if is_cause else "The cause is another one."
        return Judgement(is_cause and enough.right, f"{on_cause} {enough.text}", enough.tried)

    def _try(self, pair: Collection[str], trial: Trial) -> Judgement:
        try:
            tried = trial(pair)
        except ConfigurationError as refusal:
            return Judgement(False, str(refusal), tried=True)
        except UnavailableError as missing:
            is_listed = set(pair) == set(self.reference)
            these = "These two are the listed answer" if is_listed else "These two are not the listed answer"
            return Judgement(is_listed, f"{these}, and nothing was tried: {missing}", tried=False)
        enough = "is enough" if tried.fits else "is not enough"
        return Judgement(tried.fits, f"{' + '.join(pair)} {enough}: it {tried}.", tried=True)


CASES = {name: Case(name, **texts) for name, texts in TEXTS["cases"].items()}


class Clinic:
    """Asks the cases of a notebook and keeps the score.

    Args:
        solve: the judge tries the reference answers too.
        live: somebody can press a button; otherwise the page itself judges the cause, without a kernel. By default
            what is so.
        trials: instead of the cases' own.
    """

    def __init__(self, solve: bool = True, live: bool | None = None, trials: Mapping[str, Trial] | None = None) -> None:
        self.solve = solve
        self.live = live_page() if live is None else live
        self.others = trials or {}
        self.board = w.HTML()
        self.trials: dict[str, Trial] = {}
        self.solved: set[str] = set()
        self.judged: list[dict[str, Any]] = []  # reference answers: rows of the table that `grade` shows
        self.wrong: list[str] = []  # the cases of those that the judge does not take
        self.untried: list[str] = []  # and of those that nothing here can try

    def ask(self, *names: str) -> None:
        """Show cases: what is said and needed, a form, a folded hint and a folded answer.

        Raises:
            ConfigurationError: there is no such case.
        """
        for case in named(dict.fromkeys(names), CASES, "clinic", "case"):
            self._ask(CASES[case])

    def _ask(self, case: Case) -> None:
        trial = self.others.get(case.name) or case.trial
        self.trials[case.name] = trial
        cause = CAUSES[case.cause]
        pair = " + ".join(case.reference)
        answer = f"{pair}. {case.answer}"
        if self.solve:
            verdict = case.judge(case.cause, case.reference, trial)
            row = {"case": case.title, "cause": cause, "switches": pair, "right": verdict.right}
            self.judged.append(row | {"judged": verdict.text})
            if not verdict.right:
                self.wrong.append(case.name)
            if not verdict.tried:
                self.untried.append(case.title)
            answer += f" {verdict.text}"
        display(_report(case, trial, len(self.trials)))
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
            verdict = case.judge(cause, pair, self.trials[case.name])
        except WorkbenchError as error:
            return str(error)
        if verdict.right:
            self.solved.add(case.name)
        return f"{'Right.' if verdict.right else 'Not yet.'} {verdict.text} {self.score}"

    @property
    def score(self) -> str:
        return f"Solved: {len(self.solved)} of {len(self.trials)}."

    def grade(self) -> None:
        """Show the reader's score, and folded, since it has the answers, what the judge says of the reference.

        Raises:
            WorkbenchError: a reference answer was judged wrong.
        """
        self.board.value = _status(self.score)
        if self.live:
            display(self.board)
        if self.judged:
            tried = len(self.judged) - len(self.untried)
            summary = f"The judge tried {tried} of {len(self.judged)} reference answers; unfold them when you are done"
            if self.untried:
                summary += f" (nothing here can try: {', '.join(self.untried)})"
            table = pd.DataFrame(self.judged).to_html(index=False)
            display(HTML(f"<details><summary>{summary}</summary>{table}</details>"))
        if self.wrong:
            raise WorkbenchError(
                f"clinic: the judge calls these reference answers wrong: {', '.join(self.wrong)}. "
                "Change clinic.toml, or the case in the notebook."
            )


def _report(case: Case, trial: Trial, number: int) -> HTML:
    parts = [f"<h3>{number} · {html.escape(case.title)}</h3>", f"<p>{html.escape(case.report)}</p>"]
    if case.code:
        parts.append(f'<pre style="font-family: monospace">{html.escape(case.code.strip())}</pre>')
    parts.append(f"<p><b>{html.escape(case.told(trial))}</b></p>")
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
