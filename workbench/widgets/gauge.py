"""The predicted peak against what a GPU has, or against a budget, within a second of a toggle."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from workbench.base.categories import parse_bytes
from workbench.base.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS, Gpu
from workbench.prediction.predict import CPU, Prediction
from workbench.recipe import Recipe
from workbench.widgets.light import HTML, Dropdown, HBox, Text
from workbench.widgets.pages import CONTEXT, UNUSED, page, small
from workbench.widgets.part import URGENT, Part

LOOK = {"_dom_classes": ("wb-choice",)}


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
    def card(self) -> Gpu | None:
        """None is this machine."""
        return GPUS.get(self.gpu)

    @property
    def title(self) -> str:
        if self.budget_bytes:
            return "the limit"
        return self.card.title if self.card else "this machine"

    @property
    def have_bytes(self) -> int:
        """For the parts of a prediction together, as `parts_of` names them."""
        if self.budget_bytes:
            return self.budget_bytes
        return self.card.memory_bytes if self.card else int(psutil.virtual_memory().total)

    @property
    def limit_bytes(self) -> int:
        """As `have_bytes`, for what is reserved and the context together."""
        if self.budget_bytes and self.card:
            return self.budget_bytes + self.card.context_bytes_estimate
        return self.have_bytes

    def parts_of(self, prediction: Prediction) -> dict[str, int]:
        """All that the prediction needs, by name: the tensors by category, and what is around them."""
        reserved_bytes = prediction.need_bytes - prediction.context_bytes
        return {
            **prediction.by_category,
            UNUSED: reserved_bytes - prediction.peak_allocated_bytes,
            CONTEXT: 0 if self.budget_bytes else prediction.context_bytes,
        }


class Gauge(Part):
    """The verdict on the chosen recipe, for a GPU and a limit that can be chosen too.

    Args:
        gpu: what to predict for, at first.

    Attributes:
        shown: called after every answer, mostly in the thread.
        prediction: the last one; None while another recipe is predicted.
    """

    quiet_s = 0.0

    def __init__(self, gpu: str = "t4") -> None:
        super().__init__()
        self.shown: Callable[[], object] = nothing
        self.prediction: Prediction | None = None
        cards = [(card.title, card.name) for card in GPUS.values()]
        options = [*cards, ("this machine's CPU", CPU)]
        self.gpu = Dropdown(description="predict for", options=options, value=gpu, **LOOK)
        self.budget = Text(
            description="limit",
            placeholder="all it has, or as 8GiB",
            continuous_update=False,
            **LOOK,
        )
        self.status = HTML()
        choices = HBox([self.gpu, self.budget, self.status], _dom_classes=("wb-row",))
        style, _ = self.view.children
        self.view.children = (style, choices, self.page)
        self.view.add_class("workbench-gauge")

    def on_choice(self, function: Callable[..., object]) -> None:
        """Call this whenever another GPU or another limit is chosen; it should show the recipe again."""
        for field in (self.gpu, self.budget):
            field.observe(function, names="value")

    @property
    def limit(self) -> Limit:
        """Raises ConfigurationError for a limit that cannot be read."""
        text = self.budget.value.strip()
        return Limit(self.gpu.value, parse_bytes(text, "limit") if text else None)

    def show(self, recipe: Recipe | None) -> None:
        """Predict this recipe from now on; None while there is no valid one."""
        self.prediction = None
        self.status.value = small(f"predicting {recipe.label} …") if recipe else ""
        try:
            super().show(recipe, self.limit)
        except WorkbenchError as error:
            self.refuse(error)

    def answers(self, recipe: Recipe, limit: Limit) -> Iterator[str]:
        with URGENT:
            prediction = self.predictor(recipe, limit.gpu)
        parts = limit.parts_of(prediction)
        text = page("gauge", p=prediction, parts=parts, have=limit.have_bytes, title=limit.title)
        self.go_on()
        self.prediction = prediction
        yield text

    def put(self, answer: str) -> None:
        super().put(answer)
        self.status.value = ""
        self.shown()


def nothing() -> None:
    """What happens when nobody looks on."""
