"""A question with its answer folded: the reader guesses before a measurement, and the page judges.

`exercise.html` is the form. It needs no kernel and no network, so that it works in JupyterLab, in VS Code and on the
built pages. In a headless run nobody guesses, and the answer lies folded in the output.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from IPython.display import HTML
from jinja2 import Template

from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError

FORM = Path(__file__).with_name("exercise.html")


def exercise(
    question: str,
    answer: float | str,
    why: str,
    *,
    number: int | None = None,
    choices: Sequence[str] = (),
    unit: str = "bytes",
    within: float = 0.1,
) -> HTML:
    """Return a form that judges a guess.

    Args:
        question: one or two sentences, plain text.
        answer: a number, or one of `choices`.
        why: the reason, which the folded answer adds.
        number: the number of an exercise at the end of a lesson; None: a guess before a measurement.
        choices: the answers to choose from; none: the reader types a number.
        unit: the unit of the number. "bytes" are typed with their own ("4.2 MiB"), other numbers as they are.
        within: a guess is right when it is off by no more than this share of the answer.

    Raises:
        ConfigurationError: the answer is none of the choices.
    """
    if (choices or isinstance(answer, str)) and answer not in choices:
        listed = ", ".join(choices) or "there are none"
        raise ConfigurationError(f"exercise: {answer!r} is none of the choices: {listed}. Add it to them.")
    if not isinstance(answer, str):
        answer = float(answer)  # json cannot write the numbers of numpy
    label = f"Exercise {number}." if number else "Your guess."
    judged = json.dumps({"answer": answer, "choices": [*choices], "unit": unit, "within": within})
    answer_in_words = _in_words(answer, unit)
    form = Template(FORM.read_text(encoding="utf-8"), autoescape=True)
    return HTML(form.render(label=label, question=question, answer=answer_in_words, why=why, exercise=judged))


def _in_words(answer: float | str, unit: str) -> str:
    if isinstance(answer, str):
        return answer
    if unit == "bytes":
        return format_bytes(int(answer))
    digits = f"{answer:.3g}"
    if answer.is_integer() or abs(answer) >= 1000:
        digits = f"{answer:,.0f}"
    return f"{digits} {unit}".strip()
