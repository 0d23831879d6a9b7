"""The predicted peak against what a GPU has, or against a budget, within a second of a toggle."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ipywidgets as w
import psutil

from workbench.advise.candidate import Predictor
from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS
from workbench.measure.categories import parse_bytes
from workbench.predict.predict import CPU, Prediction, predict
from workbench.recipe import Recipe
from workbench.widgets.background import URGENT
from workbench.widgets.light import HTML, LABEL
from workbench.widgets.pages import CONTEXT, UNUSED, page, small
from workbench.widgets.part import Answer, Part

NARROW = {"width": "19em", "max_width": "100%"}


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


class Gauge(Part):
    """The verdict on the chosen recipe, for a GPU and a limit that can be chosen too.

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
        predictor: Predictor | None = None,
        changed: Callable[[], None] = lambda: None,
        shown: Callable[[], None] = lambda: None,
        quiet_s: float = 0.0,
    ) -> None:
        self.quiet_s = quiet_s
        super().__init__(lambda _: None)
        self.predictor = predictor or predict
        self.changed, self.shown = changed, shown
        options = [(g.title, g.name) for g in GPUS.values()] + [("this machine's CPU", CPU)]
        self.gpu = w.Dropdown(options=options, value=gpu, description="predict for", style=LABEL, layout=NARROW)
        self.budget = w.Text(
            description="limit", placeholder="all it has, or as 8GiB", continuous_update=False,
            style=LABEL, layout=NARROW,
        )  # fmt: skip
        self.asked = HTML()
        choices = w.HBox([self.gpu, self.budget, self.asked], layout=w.Layout(flex_flow="row wrap"))
        self.view.children = (choices, self.page)
        self.view.add_class("workbench-gauge")
        self.recipe: Recipe | None = None
        self.prediction: Prediction | None = None  # the last one
        for made in (self.gpu, self.budget):
            made.observe(lambda _: self._choose(), names="value")

    @property
    def limit(self) -> Limit:
        """Raises ConfigurationError for a limit that cannot be read."""
        text = self.budget.value.strip()
        return Limit(self.gpu.value, parse_bytes(text, "limit") if text else None)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of the chosen card; None for a CPU."""
        return GPUS[self.gpu.value].compute_capability if self.gpu.value in GPUS else None

    def show(self, *question: Any) -> None:
        """Predict this recipe from now on; None while there is no valid one."""
        (self.recipe,) = question
        self.asked.value = small(f"predicting {self.recipe.label} …" if self.recipe else "")
        try:
            super().show(self.recipe, self.limit)
        except WorkbenchError as error:
            super().show(self.recipe, error)

    def _choose(self) -> None:
        self.show(self.recipe)
        self.changed()

    def answers(self, recipe: Recipe, limit: Limit | WorkbenchError) -> Iterator[Answer]:
        self.prediction = None
        if isinstance(limit, WorkbenchError):
            raise limit
        with URGENT:
            self.prediction = found = self.predictor(recipe, limit.gpu)
        yield page("gauge", p=found, parts=limit.parts_of(found), have=limit.have_bytes, title=limit.title), ()

    def _put(self, answer: Answer) -> None:
        super()._put(answer)
        self.asked.value = ""
        self.shown()
