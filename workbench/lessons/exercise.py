"""A question with its answer folded: the reader guesses before a measurement, and the page judges.

`exercise.html` is the form. It needs no kernel and no network, so it works in JupyterLab, in VS Code and on the built
pages alike. Run headless, nobody guesses, and the answer lies folded in the output.
"""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from workbench.errors import ConfigurationError
from workbench.measure.categories import format_bytes

FORM = Path(__file__).with_name("exercise.html")
BYTES = "bytes"


@dataclass(frozen=True, repr=False)
class Exercise:
    """What a notebook shows of a question: the form where there is a page, else one sentence."""

    question: str
    form: str

    def _repr_html_(self) -> str:
        return self.form

    def __repr__(self) -> str:
        return f"{self.question} (The answer is folded: see the notebook in a browser.)"


def exercise(
    question: str, answer: float | str, why: str, *, number: int | None = None, choices: Sequence[str] = (),
    unit: str = BYTES, within: float = 0.1,
) -> Exercise:  # fmt: skip
    """A form that judges a guess.

    Args:
        question: one or two sentences, plain text.
        answer: a number, or one of `choices`.
        why: what the folded answer says besides.
        number: of an exercise at the end of a lesson; without, it is a guess before a measurement.
        choices: what to choose from; none: a number is asked for.
        unit: of a number: bytes are typed with a unit of their own ("4.2 MiB"), others as they are ("%", "times").
        within: a guess is right when it is off by no more than this share of the answer.

    Raises:
        ConfigurationError: the answer is none of the choices, or no number where there are none.
    """
    if choices and answer not in choices:
        raise ConfigurationError(f"exercise: {answer!r} is none of the choices: {', '.join(choices)}. Add it to them.")
    if isinstance(answer, str) and not choices:
        raise ConfigurationError(f"exercise: {answer!r} is no number. Give `choices` to choose it from.")
    told = {"answer": answer if choices else float(answer), "choices": [*choices], "unit": unit, "within": within}
    if isinstance(answer, str) or choices:
        shown = str(answer)
    else:
        digits = f"{answer:,.0f}" if answer == int(answer) or abs(answer) >= 1000 else f"{answer:.3g}"
        shown = format_bytes(int(answer)) if unit == BYTES else f"{digits} {unit}".strip()
    texts = {
        "id": f"exercise-{sha256(question.encode()).hexdigest()[:12]}", "told": json.dumps(told), "question": question,
        "label": f"Exercise {number}." if number else "Your guess.", "answer": f"{shown}. {why}",
    }  # fmt: skip
    form = re.sub(r"{{(\w+)}}", lambda name: html.escape(texts[name[1]]), FORM.read_text(encoding="utf-8"))
    return Exercise(question, form)
