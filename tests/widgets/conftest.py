"""What the tests of the panel share: a made-up prediction, a form, and a panel."""

from dataclasses import replace
from importlib import import_module

import pytest
from parts import Forecast

from workbench.recipe import Recipe
from workbench.widgets.controls import RecipeForm
from workbench.widgets.playground import Playground


@pytest.fixture
def predicted(monkeypatch):
    """No worker: the answers are made up, the questions are kept."""
    asked = []

    def predictor(recipe, gpu, **_):
        asked.append((recipe, gpu))
        return Forecast()

    for name in ("part.predict", "gauge.predict_known", "savings.predict_known", "playground.predict_known"):
        monkeypatch.setattr(f"workbench.widgets.{name}", predictor)
    monkeypatch.setattr(import_module("workbench.prediction.predict"), "predict", predictor)
    return asked


@pytest.fixture
def form():
    changes = []
    made = RecipeForm(Recipe(model="gpt2-tiny"))
    made.on_change = lambda: changes.append(1)
    made.changes = changes
    made.suit("a100-80gb")
    return made


@pytest.fixture
def playground(recipe, predicted, tmp_path):
    return Playground(replace(recipe, steps=2), folder=tmp_path)
