"""The clinic of notebook 19: a reader says what took the memory and which two switches cure it, and a judge tries them.

What is tried is the case's own trial: a prediction, or a small run or a life that the notebook has written out. Where
nothing can be tried, the reference answer in `clinic.toml` decides, and the verdict says so.
"""

import html
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import ipywidgets as w
import pandas as pd
from IPython.display import HTML, display

from workbench.advise.candidate import Candidate
from workbench.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.lessons.exercise import exercise
from workbench.measure.categories import Category, format_bytes
from workbench.paths import beside
from workbench.predict.predict import predict
from workbench.recipe import Recipe
from workbench.settings import named
from workbench.techniques import parse_technique

TEXTS = beside(__file__, "clinic.toml")
CAUSES: dict[str, str] = TEXTS["causes"]
WORDS: dict[str, str] = TEXTS["words"]


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
        (name, size), sizes = self.largest, map(format_bytes, (self.needed_bytes, self.budget_bytes))
        most = WORDS["most"].format(name=name.replace("_", " "), size=format_bytes(size)) if name else ""
        return WORDS["needs"].format(*sizes) + most + f"; {self.short}" * bool(self.short)


Trial = Callable[[Collection[str]], Tried]


def predicted_on(recipe: Recipe, gpu: str) -> Trial:
    """A training step on a GPU, predicted."""

    def trial(switches: Collection[str]) -> Tried:
        now = changed(recipe, switches)
        one = Candidate(now, (), predict(now, gpu), 0)
        return Tried(one.needed_bytes, one.predicted.capacity_bytes or 0, one.dominant)

    return trial


def changed(recipe: Recipe, switches: Collection[str]) -> Recipe:
    """The recipe with techniques set, as on the command line (`lora=rank:4`), or dropped (`no lora`).

    Raises:
        ConfigurationError: a switch is neither, or they do not go together.
    """
    for switch in switches:
        name = switch.removeprefix("no ").partition("=")[0]
        added = () if switch.startswith("no ") else (parse_technique(switch),)
        recipe = replace(recipe, techniques=(*(t for t in recipe.techniques if t.name != name), *added))
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
        found = cause == (trial(()).largest[0] if self.cause in list(Category) else self.cause)
        try:
            tried = trial(pair)
            enough, told = tried.fits, WORDS["enough" if tried.fits else "not_enough"].format(" + ".join(pair), tried)
        except ConfigurationError as refusal:
            enough, told = False, str(refusal)
        except UnavailableError as missing:
            enough = set(pair) == set(self.reference)
            told = WORDS["listed" if enough else "not_listed"].format(missing)
        return found and enough, f"{WORDS['cause_right' if found else 'cause_wrong']} {told}"


CASES = {name: Case(name, **texts) for name, texts in TEXTS["cases"].items()}


class Clinic:
    """Asks the cases of a notebook and keeps the score.

    Args:
        solve: the judge tries the reference answers too.
        live: somebody can press a button; otherwise the page itself judges the cause, without a kernel.
    """

    def __init__(self, solve: bool, live: bool) -> None:
        self.solve, self.live, self.board = solve, live, w.HTML()
        self.trials: dict[str, Trial] = {}
        self.rows: dict[str, tuple[Any, ...]] = {}  # of the table that `grade` shows
        self.solved: set[str] = set()

    def ask(self, name: str, trial: Trial) -> None:
        """Show a case's form, a folded hint and a folded answer.

        Raises:
            ConfigurationError: there is no such case.
        """
        self.trials |= named({name: trial}, CASES, "clinic", "case")
        case = CASES[name]
        cause, pair, told = CAUSES[case.cause], " + ".join(case.reference), ""
        if self.solve:
            right, told = case.judge(case.cause, case.reference, trial)
            self.rows[name] = (case.title, cause, pair, right, told)
        answer = f"{pair}. {case.answer} {told}"
        if self.live:
            display(self.form(case), _folded("Answer", f"{cause}; {answer}"))
        else:
            question = WORDS["question"].format(" · ".join(case.switches))
            display(exercise(question, cause, answer, choices=list(CAUSES.values())))
        display(_folded("Hint", case.hint))

    def form(self, case: Case) -> w.VBox:
        """Three choices, a button, and the verdict."""
        causes, switches = [(text, name) for name, text in CAUSES.items()], [(name, name) for name in case.switches]
        boxes = [_choice(*each) for each in zip(TEXTS["boxes"], (causes, switches, switches), strict=True)]
        check, verdict = w.Button(description="Check", button_style="primary"), w.HTML(_status(""))

        def press(_: Any) -> None:
            check.disabled, verdict.value = True, _status(WORDS["trying"])
            verdict.value = _status(self.answer(case, *(box.value for box in boxes)))
            check.disabled, self.board.value = False, _status(self.score)

        check.on_click(press)
        return w.VBox([*boxes, check, verdict])

    def answer(self, case: Case, cause: str, *pair: str) -> str:
        """The verdict on a reader's answer, in words, with the score."""
        if not all((cause, *pair)):
            return WORDS["incomplete"]
        try:
            right, words = case.judge(cause, pair, self.trials[case.name])
        except WorkbenchError as error:
            return str(error)
        self.solved |= {case.name} if right else set()
        return f"{WORDS['right' if right else 'not_yet']} {words} {self.score}"

    @property
    def score(self) -> str:
        return WORDS["score"].format(len(self.solved), len(self.trials))

    def grade(self) -> None:
        """Show the reader's score, and folded, since it has the answers, what the judge says of the reference.

        Raises:
            WorkbenchError: a reference answer was judged wrong.
        """
        self.board.value = _status(self.score)
        if self.live:
            display(self.board)
        wrong = [name for name, (_, _, _, right, _) in self.rows.items() if not right]
        if self.rows:
            judged = WORDS["judged"].format(len(self.rows) - len(wrong), len(self.rows))
            table = pd.DataFrame(self.rows.values(), columns=TEXTS["columns"]).to_html(index=False)
            display(HTML(f"<details><summary>{judged}</summary>{table}</details>"))
        if wrong:
            raise WorkbenchError(WORDS["wrong"].format(", ".join(wrong)))


def _choice(words: str, options: list[tuple[str, str]]) -> w.Dropdown:
    style, layout = {"description_width": "8em"}, {"width": "min(44em, 100%)"}
    return w.Dropdown(description=words, options=[(WORDS["choose"], ""), *options], style=style, layout=layout)


def _status(words: str) -> str:
    return f'<div role="status" style="line-height: 1.5; max-width: 60em">{html.escape(words)}</div>'


def _folded(summary: str, words: str) -> HTML:
    return HTML(f"<details><summary>{summary}</summary><p>{html.escape(words)}</p></details>")
