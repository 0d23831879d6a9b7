"""The clinic of notebook 19: a reader names the cause of a failure, and two switches that cure it.

The page judges the cause, and where it has a kernel the case's own trial (`trials.py`) tries the switches.
"""

import html
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import ipywidgets as w
from IPython.display import HTML, display

from workbench.base.errors import ConfigurationError
from workbench.base.paths import read_beside
from workbench.base.settings import check_names
from workbench.lessons.exercise import exercise
from workbench.lessons.live import live_page
from workbench.lessons.trials import TRIALS, Trial, prediction_trial
from workbench.recipe import Recipe

TEXTS = read_beside(__file__, "clinic.toml")
CAUSES: dict[str, str] = TEXTS["causes"]
SECOND = "Then: which two of the switches are enough together?"


@dataclass(frozen=True)
class Case:
    """A case of `clinic.toml`: a report, its cause, the switches, one right pair of them, and a tempting one.

    Args:
        trial: the function that tells what the case needs under some switches.
        clues: sentences that begin a clue, each with the switches whose need ends it.
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
        """The need before anything is switched, and the clues; the largest part is for the reader to find."""
        text = f"It {self.trial(()).need}."
        for clue, switches in self.clues.items():
            text += f" {clue} {self.trial(switches).need}."
        return text

    def judge(self, pair: Collection[str]) -> str:
        """Say whether two switches are enough together, with the numbers."""
        if len(set(pair)) != 2:
            return "Choose two different switches."
        try:
            outcome = self.trial(pair)
        except ConfigurationError as refusal:
            return f"{' + '.join(pair)}: {refusal}"
        verdict = "is enough" if outcome.fits else "is not enough"
        return f"{' + '.join(pair)} {verdict}: it {outcome}."


def _case(name: str, gpu: str = "", recipe: Mapping[str, Any] | None = None, **texts: Any) -> Case:
    if recipe:
        return Case(name, prediction_trial(Recipe.from_dict(recipe), gpu), **texts)
    return Case(name, TRIALS[name], **texts)


CASES = {name: _case(name, **texts) for name, texts in TEXTS["cases"].items()}


def ask(*names: str, solve: bool = True) -> None:
    """Show cases: the report and the need, the question for the cause, a form for the switches if there is a kernel,
    and a hint and the answer, folded.

    Args:
        solve: whether the reference answers are tried too.

    Raises:
        ConfigurationError: there is no such case.
    """
    for name in check_names(dict.fromkeys(names), CASES, "clinic", "case"):
        case = CASES[name]
        reference = f"{' + '.join(case.reference)}."
        if solve:
            reference = case.judge(case.reference)
        question = f"What took the memory? The switches are {' · '.join(case.switches)}."
        causes = list(CAUSES.values())
        display(_report(case), exercise(question, CAUSES[case.cause], SECOND, choices=causes))
        if live_page():
            display(form(case))
        display(_fold("Hint", case.hint), _fold("Two switches that are enough", f"{reference} {case.answer}"))


def form(case: Case) -> w.interactive:
    """Return two choices and a button; the verdict comes below them."""
    choices = w.interactive(
        lambda first, second: HTML(f'<div role="status">{html.escape(case.judge((first, second)))}</div>'),
        {"manual": True, "manual_name": "Check"},
        first=case.switches,
        second=case.switches,
    )
    for box in choices.kwargs_widgets:
        box.layout.width = "min(34em, 100%)"  # the names of switches are long
    return choices


def _report(case: Case) -> HTML:
    number = list(CASES).index(case.name) + 1
    parts = [f"<h3>{number} · {html.escape(case.title)}</h3>", f"<p>{html.escape(case.report)}</p>"]
    if case.code:
        parts.append(f'<pre style="font-family: monospace">{html.escape(case.code.strip())}</pre>')
    parts.append(f"<p><b>{html.escape(case.needs)}</b></p>")
    return HTML("".join(parts))


def _fold(summary: str, text: str) -> HTML:
    return HTML(f"<details><summary>{summary}</summary><p>{html.escape(text)}</p></details>")
