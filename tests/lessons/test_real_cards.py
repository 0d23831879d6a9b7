"""The table of a lesson on cards that people have: what it says of a prediction, and when it asks for another."""

import re
from dataclasses import replace

import pytest

from tests.lessons.test_timeline import one_step, prediction
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS
from workbench.lessons import real_cards
from workbench.lessons.real_cards import on_real_cards, step_on_card
from workbench.lessons.timeline import in_words
from workbench.techniques import GradientCheckpointing, Lora

GIB = 2**30
SMALL = {"models": ("gpt2",)}


@pytest.fixture
def asked(monkeypatch):
    """Predictions by (GPU, label) in place of the engines' own, and which of them were asked for."""
    answers, wanted = {}, []

    def predict_all(recipe, gpus):
        wanted.extend((name, recipe.label) for name in gpus)
        return [answers[name, recipe.label] for name in gpus]

    monkeypatch.setattr(real_cards, "predict_all", predict_all)
    return answers, wanted


def found(gpu, allocated, reserved, **more):
    card, parts = GPUS[gpu], dict.fromkeys(map(str, Category), 0)
    parts |= {"activations": int(allocated * GIB), "unattributed": 2**20}
    return prediction(
        one_step(), gpu=gpu, source=f"emulated:{gpu}", by_category=parts, capacity_bytes=card.memory_bytes,
        peak_allocated_bytes=int(allocated * GIB), peak_reserved_bytes=int(reserved * GIB),
        peak_operation="aten._log_softmax_backward_data.default in loss", **more,
    )  # fmt: skip


def cells(styler):
    """The texts of the table, row by row, without the head."""
    rows = re.findall(r"<tr>(.*?)</tr>", styler.to_html(), flags=re.DOTALL)[1:]
    found = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, flags=re.DOTALL) for row in rows]
    return [[text.replace("\xa0", " ").strip() for text in row] for row in found]


def test_each_card_is_asked_itself_and_the_peak_is_that_of_the_first(asked):
    """Where memory is short, PyTorch gives cached blocks back: a smaller card reserves less."""
    answers, wanted = asked
    answers |= {("t4", "baseline"): found("t4", 15, 16), ("rtx3090", "baseline"): found("rtx3090", 15.5, 17)}
    ((*_, t4, rtx3090, peak, reserved, unattributed, largest, comes),) = cells(on_real_cards(**SMALL))
    assert wanted == [("t4", "baseline"), ("rtx3090", "baseline")]
    assert t4.startswith("✗ 1.9 GiB over")
    assert rtx3090.startswith("✓ 6.2 GiB left")
    assert (peak, reserved, unattributed) == ("15.0 GiB", "16.0 GiB", "1.0 MiB")
    assert largest == "activations, 15.0 GiB"
    assert comes == "backward phase: gradient of log-softmax of the logits"


def test_a_card_that_cannot_says_why_and_the_next_is_asked(asked):
    answers, _ = asked
    refused = ConfigurationError("predict: <b>no</b> bf16")
    answers |= {("t4", "baseline"): refused, ("rtx3090", "baseline"): found("rtx3090", 5, 6)}
    ((_, _, t4, rtx3090, peak, *_),) = cells(on_real_cards(**SMALL))
    assert t4 == "predict: &lt;b&gt;no&lt;/b&gt; bf16"
    assert (rtx3090[0], peak) == ("✓", "5.0 GiB")


def test_where_no_card_can_there_is_no_number_and_the_others_have_theirs(asked):
    answers, _ = asked
    answers |= {("t4", "baseline"): ConfigurationError("predict: no."), ("t4", "lora"): found("t4", 5, 6)}
    without, whole = cells(on_real_cards(Lora(), gpus=("t4",), **SMALL))
    assert without[1:] == ["baseline", "predict: no.", "–", "–", "–", "–", "–"]
    assert whole[-5:-3] == ["5.0 GiB", "6.0 GiB"]
    answers["t4", "lora"] = answers["t4", "baseline"]
    assert "predict: no." in on_real_cards(Lora(), gpus=("t4",), **SMALL).to_html()


def test_variants_may_be_several_techniques_together(asked):
    answers, wanted = asked
    for label in ("baseline", "lora", "gradient_checkpointing + lora"):
        answers["t4", label] = found("t4", 5, 6)
    on_real_cards(Lora(), (Lora(), GradientCheckpointing()), gpus=("t4",), **SMALL)
    assert [label for _, label in wanted] == ["baseline", "lora", "gradient_checkpointing + lora"]


def test_the_caption_says_that_nothing_was_measured_and_by_whom(asked):
    answers, _ = asked
    answers["t4", "baseline"] = replace(found("t4", 5, 6), source="predicted:t4")
    page = on_real_cards(gpus=("t4",), length=512, **SMALL).to_html()
    assert "8 × 512 tokens a step" in page
    assert "Predicted, not measured, with the NVIDIA T4's kernels by the shadow of its step." in page


def test_a_step_is_a_frame_to_drag_through(monkeypatch):
    monkeypatch.setattr(real_cards, "predict", lambda recipe, gpu: prediction(one_step(), label=recipe.label))
    frame = step_on_card(Lora()).data
    assert 'title="Memory over the operations of a training step: baseline, lora"' in frame
    assert "{{" not in frame


def test_operations_in_words():
    for operation, words in (
        ("aten._log_softmax_backward_data.default in loss", "gradient of log-softmax of the logits"),
        ("aten.mm.default in transformer.h.3.mlp", "matrix product"),
        ("aten._foreach_sqrt.default", "square root"),
        ("bitsandbytes.dequantize_4bit.default in lm_head", "dequantize 4bit"),
        ("given", "there before the step"),
    ):
        assert in_words(operation) == words
