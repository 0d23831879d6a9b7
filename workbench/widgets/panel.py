"""What every panel is: a form of switches, the predicted memory, and what each switch would save."""

from collections.abc import Iterable

import ipywidgets as w
from IPython.display import HTML, display

from workbench.gpus.catalogue import GPUS
from workbench.lessons.live import live_page
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY
from workbench.widgets.controls import RecipeForm
from workbench.widgets.gauge import Gauge
from workbench.widgets.savings import Savings


class Panel:
    """A form, the gauge and what each switch saves; both answer every change once `answer` was called.

    Shows itself as the result of a cell. Without a live page, as under papermill, it shows what it would say.
    """

    view: w.Widget

    def __init__(self, recipe: Recipe, gpu: str, techniques: Iterable[str] = REGISTRY) -> None:
        self.gauge = Gauge(gpu)
        self.form = RecipeForm(recipe, techniques)
        self.savings = Savings(self.form.toggles)
        self.gauge.on_choice(self.answer)
        self.form.changed = self.answer

    def answer(self, *_: object) -> None:
        """Something was chosen: the gauge answers at once, the switches after it."""
        gpu = self.gauge.gpu.value
        self.form.suit(GPUS[gpu].compute_capability if gpu in GPUS else None)
        recipe = self.form.valid()
        self.gauge.show(recipe)
        self.savings.show(recipe, gpu)

    def as_page(self) -> str:
        """What it says, as HTML that needs no kernel."""
        return str(self.gauge.page.value)

    def show_live(self) -> None:
        display(self.view)

    def _ipython_display_(self) -> None:
        if live_page():
            self.show_live()
        else:
            self.gauge.wait()
            display(HTML(self.as_page()))
