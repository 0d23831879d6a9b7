"""The verdict: the predicted need of a recipe against what a GPU has, or a limit within it, within a second."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workbench.advise.budget import UNUSED
from workbench.base.categories import parse_bytes
from workbench.base.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS, Gpu, device_name, room_bytes
from workbench.lessons.cards import predict_known
from workbench.prediction.predict import CPU, Prediction
from workbench.recipe import Recipe
from workbench.widgets.light import Dropdown, Text
from workbench.widgets.pages import CONTEXT, page
from workbench.widgets.part import URGENT, Part


@dataclass(frozen=True)
class Limit:
    """What a recipe may need in all: what the allocator reserves, and CUDA's context.

    Args:
        gpu: a name of the catalogue, or `"cpu"` for this machine.
        budget_bytes: less than all that the device has; None: all.
    """

    gpu: str
    budget_bytes: int | None = None

    @property
    def card(self) -> Gpu | None:
        """None is this machine."""
        return GPUS.get(self.gpu)

    @property
    def have_bytes(self) -> int:
        return room_bytes(self.gpu, self.budget_bytes)

    @property
    def owner(self) -> str:
        """Who has that much, in words."""
        if self.have_bytes < room_bytes(self.gpu):
            return "the limit is"
        return f"the {self.card.title.removeprefix('NVIDIA ')} has" if self.card else "this machine has"

    def parts_of(self, prediction: Prediction) -> dict[str, int]:
        """All that the prediction needs, by name: the tensors by category, and what is around them."""
        reserved_bytes = prediction.need_bytes - prediction.context_bytes
        return {
            **prediction.by_category,
            UNUSED: reserved_bytes - prediction.peak_allocated_bytes,
            CONTEXT: prediction.context_bytes,
        }


class Gauge(Part):
    """The verdict on the chosen recipe, for a GPU and a limit that can be chosen too.

    Args:
        gpu: what to predict for, at first.

    Attributes:
        gpu, budget: fields, for whoever shows them.
        shown: called after every answer, mostly in the thread.
        prediction: the last one; None while another recipe is predicted.
    """

    def __init__(self, gpu: str = "t4") -> None:
        super().__init__()
        self.predictor = predict_known  # what comes with the workbench is there at once
        self.shown: Callable[[], object] = nothing
        self.prediction: Prediction | None = None
        cards = [(card.title.removeprefix("NVIDIA "), card.name) for card in GPUS.values()]
        options = [*cards, ("this machine's CPU", CPU)]
        self.gpu = Dropdown(description="predict for", options=options, value=device_name(gpu))
        self.budget = Text(description="limit", placeholder="all it has", css="wb-field")
        self.view.add_class("workbench-gauge")

    @property
    def limit(self) -> Limit:
        """Raises ConfigurationError for a limit that cannot be read."""
        text = self.budget.value.strip()
        return Limit(self.gpu.value, parse_bytes(text, "limit") if text else None)

    def show(self, recipe: Recipe | None) -> None:
        """Predict this recipe from now on; None while there is no valid one."""
        self.prediction = None
        try:
            super().show(recipe, self.limit)
        except WorkbenchError as error:
            self.refuse(error)

    def answers(self, recipe: Recipe, limit: Limit) -> Iterator[str]:
        with URGENT:
            prediction = self.predictor(recipe, limit.gpu)
        text = page("gauge", p=prediction, parts=limit.parts_of(prediction), limit=limit)
        self.go_on()
        self.prediction = prediction
        yield text

    def put(self, answer: str) -> None:
        super().put(answer)
        self.shown()


def nothing(*_: object) -> None:
    """What happens when nobody looks on."""
