"""The predicted peak against what a GPU has, or against a budget, within a second of a toggle."""

from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets as w

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS
from workbench.measure.categories import format_bytes, parse_bytes
from workbench.predict.predict import CPU, Prediction, predict
from workbench.recipe import Recipe
from workbench.widgets.background import Newest
from workbench.widgets.pages import bar, escaped, legend

NARROW = {"width": "20em", "max_width": "100%"}


class Gauge:
    """Asks the prediction's worker in a thread of its own: neither the page nor a training waits for it.

    Of requests that come faster than answers, only the newest is asked.

    Args:
        gpu: what to predict for, at first.
        predictor: `predict`, or something that answers like it.
    """

    def __init__(self, gpu: str = "h100", predictor: Callable[..., Prediction] = predict) -> None:
        self.predictor = predictor
        options = [(g.title, g.name) for g in GPUS.values()] + [("this machine's CPU", CPU)]
        self.gpu = w.Dropdown(options=options, value=gpu, description="for", layout=NARROW)
        self.budget = w.Text(description="budget", placeholder="all it has, or as 8GiB", layout=NARROW)
        self.page = w.HTML("<p>predicting …</p>", layout=w.Layout(min_height="6.5em"))
        self.view = w.VBox([w.HBox([self.gpu, self.budget], layout=w.Layout(flex_flow="row wrap")), self.page])
        self._recipe: Recipe | None = None
        self._newest = Newest(self._answers, self._show)
        for made in (self.gpu, self.budget):
            made.observe(lambda _: self._ask(), names="value")

    def show(self, recipe: Recipe | None) -> None:
        """Predict this recipe from now on; None while there is no valid one."""
        self._recipe = recipe
        self._ask()

    def wait(self, seconds: float = 60.0) -> None:
        """Until the newest request is answered; for tests and for pages without a live kernel."""
        self._newest.wait(seconds)

    def _ask(self) -> None:
        self._newest.ask((self._recipe, self.gpu.value, self.budget.value))

    def _show(self, page: str) -> None:
        self.page.value = page

    def _answers(self, question: tuple[Recipe | None, str, str]) -> Iterator[str]:
        yield self._answer(*question)

    def _answer(self, recipe: Recipe | None, gpu: str, budget: str) -> str:
        if recipe is None:
            return "<p>The recipe cannot be used as it is: see the remark below the techniques.</p>"
        try:
            limit = parse_bytes(budget, "budget") if budget.strip() else None
            return page_of(self.predictor(recipe, gpu), limit)
        except WorkbenchError as error:
            return f'<p role="alert">⚠ {escaped(error)}</p>'
        except Exception as error:
            return f'<p role="alert">⚠ no prediction: {escaped(error)}</p>'


def page_of(p: Prediction, budget_bytes: int | None = None) -> str:
    """The verdict in words, the bar, the parts and the moment of the peak."""
    need = (p.peak_reserved_bytes or p.peak_allocated_bytes) + (p.context_bytes if budget_bytes is None else 0)
    have = budget_bytes or p.capacity_bytes
    words = verdict(need, have)
    where = "the budget" if budget_bytes else GPUS[p.gpu].title if p.gpu in GPUS else "this machine"
    moment = f"{p.peak_phase.replace('_', ' ')}, at {p.peak_operation}"
    lines = [
        f"<p aria-live='polite'><b>{escaped(words)}</b> {escaped(_against(need, have, where))}</p>",
        bar(
            p.by_category, have or 0, f"{words} {', '.join(f'{n} {format_bytes(b)}' for n, b in p.by_category.items())}"
        ),
        legend(p.by_category),
        f"<p><small>Predicted for {escaped(p.gpu)}, not measured: {format_bytes(p.peak_allocated_bytes)} of tensors at "
        f"the peak, in the {escaped(moment)}.</small></p>",
    ]
    return "".join(lines)


def verdict(need: int, have: int | None) -> str:
    if have is None:
        return "No limit known."
    return "Fits." if need <= have else f"Does not fit, over by {format_bytes(need - have)}."


def _against(need: int, have: int | None, where: Any) -> str:
    return f"{format_bytes(need)} of {format_bytes(have)} of {where}" if have else f"{format_bytes(need)} on {where}"
