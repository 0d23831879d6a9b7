"""The predicted peak against what a GPU has, or against a budget, within a second of a toggle."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ipywidgets as w
import psutil

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS
from workbench.measure.categories import format_bytes, parse_bytes
from workbench.predict.predict import CPU, Prediction, predict
from workbench.recipe import Recipe
from workbench.widgets.background import Newest
from workbench.widgets.pages import CONTEXT, UNUSED, alarm, bar, escaped, legend

NARROW = {"width": "19em", "max_width": "100%"}
LABEL = {"description_width": "initial"}
DIMMED = "opacity: 0.45"


@dataclass(frozen=True)
class Limit:
    """What a recipe may need.

    Args:
        gpu: a name of the catalogue, or `"cpu"` for this machine.
        budget_bytes: for the allocator alone, as a memory cap is; None: all that the device has.
    """

    gpu: str
    budget_bytes: int | None = None

    @property
    def title(self) -> str:
        return "the limit" if self.budget_bytes else GPUS[self.gpu].title if self.gpu in GPUS else "this machine"

    @property
    def have_bytes(self) -> int:
        """For the parts of a prediction together, as `parts_of` names them."""
        device = GPUS[self.gpu].memory_bytes if self.gpu in GPUS else psutil.virtual_memory().total
        return self.budget_bytes or device

    @property
    def limit_bytes(self) -> int:
        """As `have_bytes`, for what is reserved and the context together."""
        beside = GPUS[self.gpu].context_bytes_estimate if self.budget_bytes and self.gpu in GPUS else 0
        return self.have_bytes + beside

    def parts_of(self, p: Prediction) -> dict[str, int]:
        """All that the prediction needs, by name: the tensors by category, and what is around them."""
        beside = {UNUSED: (p.peak_reserved_bytes or p.peak_allocated_bytes) - p.peak_allocated_bytes}
        return {**p.by_category, **beside, CONTEXT: 0 if self.budget_bytes else p.context_bytes}


class Gauge:
    """Asks the prediction's worker in a thread of its own: neither the page nor a training waits for it.

    Args:
        gpu: what to predict for, at first.
        predictor: `predict`, or something that answers like it.
        changed: called without arguments when another GPU or another limit is chosen.
        shown: called without arguments after every answer, in the thread.
        quiet_s: how long it waits for another change before it predicts.
    """

    def __init__(
        self,
        gpu: str = "t4",
        predictor: Callable[..., Prediction] | None = None,
        changed: Callable[[], None] = lambda: None,
        shown: Callable[[], None] = lambda: None,
        quiet_s: float = 0.0,
    ) -> None:
        self.predictor, self.changed, self.shown = predictor or predict, changed, shown
        options = [(g.title, g.name) for g in GPUS.values()] + [("this machine's CPU", CPU)]
        self.gpu = w.Dropdown(options=options, value=gpu, description="predict for", style=LABEL, layout=NARROW)
        self.budget = w.Text(
            description="limit",
            placeholder="all it has, or as 8GiB",
            continuous_update=False,
            style=LABEL,
            layout=NARROW,
        )
        self.page = w.HTML("<p>predicting …</p>", layout=w.Layout(min_height="6em"))
        self.view = w.VBox([w.HBox([self.gpu, self.budget], layout=w.Layout(flex_flow="row wrap")), self.page])
        self.view.add_class("workbench-gauge")
        self._recipe: Recipe | None = None
        self.prediction: Prediction | None = None  # the last one; None where there is none
        self._last = ""
        self._newest = Newest(self._answers, self._show, quiet_s)
        for made in (self.gpu, self.budget):
            made.observe(lambda _: self._ask(), names="value")

    @property
    def limit(self) -> Limit:
        """Raises ConfigurationError for a limit that cannot be read."""
        text = self.budget.value.strip()
        return Limit(self.gpu.value, parse_bytes(text, "limit") if text else None)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of the chosen card; None for a CPU."""
        return GPUS[self.gpu.value].compute_capability if self.gpu.value in GPUS else None

    def show(self, recipe: Recipe | None) -> None:
        """Predict this recipe from now on; None while there is no valid one."""
        self._recipe = recipe
        self._predict()

    def wait(self, seconds: float = 60.0) -> None:
        """Until the newest request is answered; for tests and for pages without a live kernel."""
        self._newest.wait(seconds)

    def _ask(self) -> None:
        self._predict()
        self.changed()

    def _predict(self) -> None:
        asked = f"predicting {self._recipe.label} …" if self._recipe else ""
        self.page.value = f"<p><small>{escaped(asked)}</small></p><div style='{DIMMED}'>{self._last}</div>"
        try:
            self._newest.ask((self._recipe, self.limit))
        except WorkbenchError as error:
            self._newest.ask((None, error))

    def _show(self, answer: tuple[str, Prediction | None]) -> None:
        self.page.value, self.prediction = answer
        self._last = self.page.value
        self.shown()

    def _answers(
        self, question: tuple[Recipe | None, Limit | WorkbenchError]
    ) -> Iterator[tuple[str, Prediction | None]]:
        recipe, limit = question
        if isinstance(limit, WorkbenchError):
            yield alarm(limit), None
        elif recipe is None:
            yield alarm("The recipe cannot be used as it is: see the remark beside its settings."), None
        else:
            yield self._answer(recipe, limit)

    def _answer(self, recipe: Recipe, limit: Limit) -> tuple[str, Prediction | None]:
        try:
            found = self.predictor(recipe, limit.gpu)
            return page_of(found, limit), found
        except WorkbenchError as error:
            return alarm(error), None
        except Exception as error:
            return alarm(f"no prediction: {error}"), None


def page_of(p: Prediction, limit: Limit) -> str:
    """The verdict in words, the bar, the parts and the moment of the peak."""
    parts, have = limit.parts_of(p), limit.have_bytes
    words = verdict(sum(parts.values()), have)
    moment = f"{p.peak_phase.replace('_', ' ')}, at {p.peak_operation}"
    told = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts.items() if size)
    against = f"{format_bytes(sum(parts.values()))} of the {format_bytes(have)} of {limit.title}"
    return (
        f"<p aria-live='polite'><b>{escaped(words)}</b> {escaped(against)}</p>{bar(parts, have, f'{words} {told}')}"
        f"{legend(parts)}<p><small>Predicted for {escaped(p.gpu)}, not measured ({escaped(p.source)}): "
        f"{format_bytes(p.peak_allocated_bytes)} of tensors at the peak, in the {escaped(moment)}.</small></p>"
    )


def verdict(need: int, have: int) -> str:
    return "✓ Fits." if need <= have else f"✗ Does not fit, over by {format_bytes(need - have)}."
