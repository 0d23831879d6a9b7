"""The table of a lesson on cards that people have: what it says of a prediction, and of a card that cannot."""

from dataclasses import replace

import pytest

from tests.lessons.test_timeline import one_step, prediction
from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS
from workbench.lessons import cards as module
from workbench.lessons.cards import cards, predict_known, step_on_card
from workbench.techniques import GradientCheckpointing, Lora

GIB = 2**30
SMALL = {"models": ("gpt2",)}
T4, RTX3090 = "NVIDIA T4, 14.6 GiB", "GeForce RTX 3090, 23.7 GiB"


@pytest.fixture
def asked(monkeypatch):
    """Predictions by (GPU, label) in place of the engines' own, and which of them were asked for."""
    answers, wanted = {}, []

    def known_predictions(recipe, gpus, timeline=False):
        wanted.extend((name, recipe.label) for name in gpus)
        return [answers[name, recipe.label] for name in gpus]

    monkeypatch.setattr(module, "known_predictions", known_predictions)
    return answers, wanted


def found(gpu, allocated, reserved):
    return prediction(
        one_step(),
        gpu=gpu,
        source=f"emulated:{gpu}",
        capacity_bytes=GPUS[gpu].memory_bytes,
        peak_allocated_bytes=int(allocated * GIB),
        peak_reserved_bytes=int(reserved * GIB),
    )


def test_each_card_is_asked_itself_and_the_peak_is_that_of_the_first(asked):
    """Where memory is short, PyTorch gives cached blocks back: a smaller card reserves less."""
    answers, wanted = asked
    answers |= {("t4", "baseline"): found("t4", 15, 16), ("rtx3090", "baseline"): found("rtx3090", 15.5, 17)}
    table = cards(**SMALL)
    assert wanted == [("t4", "baseline"), ("rtx3090", "baseline")]
    row = table.loc["gpt2", "baseline"]
    assert row[T4] == "✗ 1.9 GiB over"
    assert row[RTX3090] == "✓ 6.2 GiB left"
    assert row["peak, emulated"] == "15.0 GiB"
    assert row["reserved"] == "16.0 GiB"


def test_a_saving_on_a_card_is_one_of_reserved_bytes(asked):
    """Half of the tensors gone, and nothing of what is reserved: the card has no more room than before."""
    answers, _ = asked
    needs = {"baseline": (12, 13), "gradient_checkpointing": (6, 13), "lora": (12, 5)}
    answers |= {("t4", label): found("t4", *sizes) for label, sizes in needs.items()}
    table = cards(GradientCheckpointing(), Lora(), gpus=("t4",), **SMALL)
    assert list(table["peak, emulated"]) == ["12.0 GiB", "6.0 GiB", "12.0 GiB"]
    assert list(table["reserved"]) == ["13.0 GiB", "13.0 GiB", "5.0 GiB"]
    assert list(table[T4]) == ["✓ 1.1 GiB left", "✓ 1.1 GiB left", "✓ 9.1 GiB left"]


def test_a_card_that_cannot_says_why_and_the_peak_is_that_of_the_next(asked):
    answers, _ = asked
    refused = ConfigurationError("predict: no bf16")
    answers |= {("t4", "baseline"): refused, ("rtx3090", "baseline"): found("rtx3090", 5, 6)}
    row = cards(**SMALL).loc["gpt2", "baseline"]
    assert row[T4] == "no bf16"
    assert row[RTX3090].startswith("✓")
    assert row["peak, emulated"] == "5.0 GiB"
    assert row["reserved"] == "6.0 GiB"


def test_where_no_card_can_there_is_no_number(asked):
    answers, _ = asked
    answers["t4", "baseline"] = ConfigurationError("predict: no.")
    row = cards(gpus=("t4",), **SMALL).loc["gpt2", "baseline"]
    assert (row["peak, predicted"], row["reserved"], row[T4]) == ("–", "–", "no.")


def test_variants_may_be_several_techniques_together(asked):
    answers, wanted = asked
    for label in ("baseline", "lora", "gradient_checkpointing + lora"):
        answers["t4", label] = found("t4", 5, 6)
    cards(Lora(), (Lora(), GradientCheckpointing()), gpus=("t4",), **SMALL)
    assert [label for _, label in wanted] == ["baseline", "lora", "gradient_checkpointing + lora"]


def test_a_prediction_that_is_refused_is_raised(asked):
    answers, _ = asked
    answers["t4", "baseline"] = ConfigurationError("predict: no.")
    with pytest.raises(ConfigurationError, match="predict: no"):
        predict_known(module.on_cards("gpt2", (), 1024)[0])


def test_a_step_is_a_frame_to_drag_through(asked):
    answers, _ = asked
    answers |= {("t4", label): replace(found("t4", 5, 6), label=label) for label in ("baseline", "lora")}
    frame = step_on_card(Lora()).data
    assert 'title="Memory over the operations of a training step: baseline, LoRA"' in frame
    assert "{{" not in frame
