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
    """The bytes that a recipe may need: those that PyTorch's allocator reserves, and CUDA's context.

    Args:
        gpu: a name of the catalogue, or `"cpu"` for this machine.
        budget_bytes: a limit below what the device has; None: all that it has.
    """

    gpu: str
    budget_bytes: int | None = None

    @property
    def card(self) -> Gpu | None:
        """The GPU, or None for this machine's CPU."""
        return GPUS.get(self.gpu)

    @property
    def have_bytes(self) -> int:
        return room_bytes(self.gpu, self.budget_bytes)

    @property
    def owner(self) -> str:
        """The words before the limit: the user's own limit, a GPU, or this machine."""
        if self.have_bytes < room_bytes(self.gpu):
            return "the limit is"
        return f"the {self.card.title.removeprefix('NVIDIA ')} has" if self.card else "this machine has"

    def parts_of(self, prediction: Prediction) -> dict[str, int]:
        """Return all that the prediction needs, bytes by name: tensors by category, unused memory, CUDA's context."""
        reserved_bytes = prediction.need_bytes - prediction.context_bytes
        return {
            **prediction.by_category,
            UNUSED: reserved_bytes - prediction.peak_allocated_bytes,
            CONTEXT: prediction.context_bytes,
        }


class Gauge(Part):
    """The verdict on the chosen recipe, for a GPU and a limit that can be chosen too.

    Args:
        gpu: the GPU to predict for at first.

    Attributes:
        gpu, budget: the two input fields, which the panel places.
        on_answer: is called after every answer, mostly in the thread.
        prediction: the newest prediction; None while another recipe is predicted.
    """

    def __init__(self, gpu: str = "t4") -> None:
        super().__init__()
        # predictions that come with the workbench are there at once
        self.predictor = predict_known
        self.on_answer: Callable[[], object] = nothing
        self.prediction: Prediction | None = None
        cards = [(card.title.removeprefix("NVIDIA "), card.name) for card in GPUS.values()]
        options = [*cards, ("this machine's CPU", CPU)]
        self.gpu = Dropdown(description="predict for", options=options, value=device_name(gpu))
        self.budget = Text(description="limit", placeholder="all it has", css="wb-field")
        self.view.add_class("workbench-gauge")

    @property
    def limit(self) -> Limit:
        """The chosen limit. Raises ConfigurationError if it cannot be read."""
        text = self.budget.value.strip()
        return Limit(self.gpu.value, parse_bytes(text, "limit") if text else None)

    def show(self, recipe: Recipe | None) -> None:
        """Predict this recipe from now on; None: there is no valid one."""
        self.prediction = None
        try:
            super().show(recipe, self.limit)
        except WorkbenchError as error:
            self.refuse(error)

    def answers(self, recipe: Recipe, limit: Limit) -> Iterator[str]:
        with URGENT:
            prediction = self.predictor(recipe, limit.gpu)
        text = page("gauge", p=prediction, parts=limit.parts_of(prediction), limit=limit)
        self.check_newest()
        self.prediction = prediction
        yield text

    def show_answer(self, answer: str) -> None:
        super().show_answer(answer)
        self.on_answer()


def nothing(*_: object) -> None:
    """Do nothing: the callback of a part before the panel has set its own."""
