"""A question with its answer folded: the reader guesses before a measurement, and the page judges.

`exercise.html` is the form. It needs no kernel and no network, so it works in JupyterLab, in VS Code and on the built
pages alike. Run headless, nobody guesses, and the answer lies folded in the output.
"""

import html
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from IPython.display import HTML

from workbench.errors import ConfigurationError
from workbench.measure.categories import format_bytes

FORM = Path(__file__).with_name("exercise.html")
BYTES = "bytes"


def exercise(
    question: str, answer: float | str, why: str, *, choices: Sequence[str] = (), unit: str = BYTES, within: float = 0.1
) -> HTML:
    """A form that judges a guess.

    Args:
        question: one sentence.
        answer: a number, or one of `choices`.
        why: what the folded answer says besides.
        choices: what to choose from; none: a number is asked for.
        unit: of a number: bytes are typed with a unit of their own ("4.2 MiB"), others as they are ("%", "times").
        within: a guess is right when it is off by no more than this share of the answer.

    Raises:
        ConfigurationError: the answer is none of the choices.
    """
    if choices and answer not in choices:
        raise ConfigurationError(f"exercise: {answer!r} is none of the choices: {', '.join(choices)}. Add it to them.")
    told = {"answer": answer, "choices": list(choices), "unit": unit, "within": within}
    if isinstance(answer, str):
        shown = answer
    else:
        shown = format_bytes(int(answer)) if unit == BYTES else f"{answer:,.4g} {unit}"
    page = FORM.read_text(encoding="utf-8").replace("{{id}}", f"exercise-{sha256(question.encode()).hexdigest()[:12]}")
    for name, text in {"told": json.dumps(told), "question": question, "answer": f"{shown}. {why}"}.items():
        page = page.replace(f"{{{{{name}}}}}", html.escape(text))
    return HTML(page)
