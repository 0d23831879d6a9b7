"""The clinic of notebook 19: a reader says what took the memory and which two switches cure it, and a judge tries them.

What is tried is the case's own trial: a prediction, or a small run or a life that the notebook has written out. Where
nothing can be tried, the reference answer in `clinic.toml` decides, and the verdict says so.
"""

import html
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import ipywidgets as w
import pandas as pd
from IPython.display import HTML, display

from workbench.base.categories import Category, format_bytes
from workbench.base.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.base.paths import beside
from workbench.base.settings import named
from workbench.lessons.exercise import exercise
from workbench.prediction.predict import predict
from workbench.recipe import Recipe
from workbench.techniques import parse_technique

TEXTS = beside(__file__, "clinic.toml")
CAUSES: dict[str, str] = TEXTS["causes"]


@dataclass(frozen=True)
class Tried:
    """What a case needs under some switches.

    Args:
        largest: the largest category at the peak, and its bytes.
        short: what else is missing, in words; it does not fit then, whatever the device has.
    """

    needed_bytes: int
    budget_bytes: int
    largest: tuple[str, int] = ("", 0)
    short: str = ""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget_bytes and not self.short

    def __str__(self) -> str:
        text = f"needs {format_bytes(self.needed_bytes)} of {format_bytes(self.budget_bytes)}"
        category, size = self.largest
        if category:
            text += f", most of it {category.replace('_', ' ')}: {format_bytes(size)}"
        return f"{text}; {self.short}" if self.short else text


Trial = Callable[[Collection[str]], Tried]


def predicted_on(recipe: Recipe, gpu: str) -> Trial:
    """A training step on a GPU, predicted."""

    def trial(switches: Collection[str]) -> Tried:
        prediction = predict(changed(recipe, switches), gpu)
        largest = max(prediction.by_category.items(), key=itemgetter(1))
        return Tried(prediction.need_bytes, prediction.capacity_bytes or 0, largest)

    return trial


def changed(recipe: Recipe, switches: Collection[str]) -> Recipe:
    """The recipe with techniques set, as on the command line (`lora=rank:4`), or dropped (`no lora`).

    Raises:
        ConfigurationError: a switch is neither, or they do not go together.
    """
    for switch in switches:
        name = switch.removeprefix("no ").partition("=")[0]
        techniques = [technique for technique in recipe.techniques if technique.name != name]
        if not switch.startswith("no "):
            techniques.append(parse_technique(switch))
        recipe = replace(recipe, techniques=tuple(techniques))
    return recipe


@dataclass(frozen=True)
class Case:
    """A case of `clinic.toml`: its cause, what can be switched, one right pair, and one that only sounds right."""

    name: str
    title: str
    cause: str
    switches: list[str]
    reference: list[str]
    tempting: list[str]
    hint: str
    answer: str

    def judge(self, cause: str, pair: Collection[str], trial: Trial) -> tuple[bool, str]:
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
        is_enough, tried = self._try(pair, trial)
        verdict = "That is the cause." if is_cause else "The cause is another one."
        return is_cause and is_enough, f"{verdict} {tried}"

    def _try(self, pair: Collection[str], trial: Trial) -> tuple[bool, str]:
        try:
            tried = trial(pair)
        except ConfigurationError as refusal:
            return False, str(refusal)
        except UnavailableError as missing:
            is_listed = set(pair) == set(self.reference)
            these = "These two are the listed answer" if is_listed else "These two are not the listed answer"
            return is_listed, f"{these}, and nothing was tried: {missing}"
        enough = "is enough" if tried.fits else "is not enough"
        return tried.fits, f"{' + '.join(pair)} {enough}: it {tried}."


CASES = {name: Case(name, **texts) for name, texts in TEXTS["cases"].items()}


class Clinic:
    """Asks the cases of a notebook and keeps the score.

    Args:
        solve: the judge tries the reference answers too.
        live: somebody can press a button; otherwise the page itself judges the cause, without a kernel.
    """

    def __init__(self, solve: bool, live: bool) -> None:
        self.solve = solve
        self.live = live
        self.board = w.HTML()
        self.trials: dict[str, Trial] = {}
        self.solved: set[str] = set()
        self.judged: list[dict[str, Any]] = []  # reference answers: rows of the table that `grade` shows
        self.wrong: list[str] = []  # the cases of those that the judge does not take

    def ask(self, name: str, trial: Trial) -> None:
        """Show a case's form, a folded hint and a folded answer.

        Raises:
            ConfigurationError: there is no such case.
        """
        self.trials |= named({name: trial}, CASES, "clinic", "case")
        case = CASES[name]
        cause = CAUSES[case.cause]
        pair = " + ".join(case.reference)
        answer = f"{pair}. {case.answer}"
        if self.solve:
            right, verdict = case.judge(case.cause, case.reference, trial)
            row = {"case": case.title, "cause": cause, "switches": pair, "right": right, "judged": verdict}
            self.judged.append(row)
            if not right:
                self.wrong.append(name)
            answer += f" {verdict}"
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
            right, verdict = case.judge(cause, pair, self.trials[case.name])
        except WorkbenchError as error:
            return str(error)
        if right:
            self.solved.add(case.name)
        return f"{'Right.' if right else 'Not yet.'} {verdict} {self.score}"

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
            right = f"{len(self.judged) - len(self.wrong)} of {len(self.judged)}"
            summary = f"{right} reference answers judged right; unfold them when you are done"
            table = pd.DataFrame(self.judged).to_html(index=False)
            display(HTML(f"<details><summary>{summary}</summary>{table}</details>"))
        if self.wrong:
            raise WorkbenchError(
                f"clinic: the judge calls these reference answers wrong: {', '.join(self.wrong)}. "
                "Change clinic.toml, or the case in the notebook."
            )


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
