from dataclasses import replace

import pytest

from workbench.errors import ConfigurationError
from workbench.predict import beside
from workbench.predict.beside import predictions_beside, style_predictions
from workbench.recipe import Recipe
from workbench.records.record import Record, Status
from workbench.techniques import GradientCheckpointing


def record(recipe, peak):
    return replace(Record.start(recipe), status=Status.OK, peak_allocated_bytes=peak, memory_source="cpu-tracker")


@pytest.fixture
def three(recipe):
    return [record(recipe, 100), record(replace(recipe, seed=1), 101), record(recipe | GradientCheckpointing(), 50)]


def test_each_recipe_once_with_both_numbers(three):
    table = predictions_beside(three, "t4")
    assert list(table.index) == ["baseline", "gradient_checkpointing"]
    assert table["measured_bytes"].tolist() == [100, 50]
    assert (table["predicted_bytes"] > 0).all()
    assert table.loc["gradient_checkpointing", "predicted_bytes"] < table.loc["baseline", "predicted_bytes"]
    page = style_predictions(table).to_html()
    assert "predicted for t4" in page
    assert "Predicted, not measured: " in page
    assert "by the shadow of its step" in page
    assert "in the backward, at" in page


def test_what_cannot_be_predicted_says_why_and_hides_nothing_else(three, monkeypatch):
    def refuse(recipe, gpu):
        raise ConfigurationError("<b>cannot</b> be traced")

    monkeypatch.setattr(beside, "predict", refuse)
    page = style_predictions(predictions_beside(three, "t4")).to_html()
    assert "&lt;b&gt;cannot" in page
    assert "100 B" in page


def test_an_unknown_gpu_is_refused_by_the_prediction(recipe):
    table = predictions_beside([record(Recipe(model=recipe.model), 1)], "h1000")
    assert "h100" in table["remark"].iloc[0]
