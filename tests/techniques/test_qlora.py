import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from workbench.base.categories import Category
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.journal.record import Status, read_all
from workbench.measure.meter import find_attached_tensors
from workbench.models.family import family_of
from workbench.models.load import load_config, load_model
from workbench.models.source import ModelSource, locate
from workbench.techniques import Lora, MixedPrecision, Qlora, qlora
from workbench.techniques.base import Call
from workbench.training.run import run

GPT2 = family_of(GPT2Config())

pytest.importorskip("bitsandbytes", reason="QLoRA needs bitsandbytes: pip install bitsandbytes")

C, LAYERS, RANK = 64, 2, 8
MATRICES = [3 * C * C, C * C, 4 * C * C, 4 * C * C]  # c_attn, c_proj, c_fc and the MLP's c_proj, of each block
IN_MATRICES = LAYERS * sum(MATRICES)
TRAINED = LAYERS * RANK * 4 * C


def overhead_bytes(double):
    """Scales and code books. A scale for every 64 numbers: fp32, or one byte, with a scale in fp32 for every 256."""
    scales = [math.ceil(numbers / 64) for numbers in MATRICES]
    if not double:
        return LAYERS * sum(4 * count + 16 * 4 for count in scales)
    return LAYERS * sum(count + 4 * math.ceil(count / 256) + 256 * 4 + 16 * 4 + 4 for count in scales)


def test_the_weights_are_half_a_byte_a_number_and_their_scales(recipe, fine_tuned, subtests):
    plain = fine_tuned(recipe)
    for double in (True, False):
        with subtests.test(double_quantization=double):
            quantized = fine_tuned(replace(recipe, steps=1) | Qlora(double_quantization=double))
            by_hand = 4 * (plain.parameters - IN_MATRICES) + IN_MATRICES // 2 + overhead_bytes(double) + 4 * TRAINED
            assert quantized.maximum_by_category[Category.WEIGHTS] == by_hand
            assert quantized.by_category[Category.UNATTRIBUTED] == 0


def test_parameters_are_numbers_not_bytes(recipe, fine_tuned):
    plain, quantized = fine_tuned(recipe), fine_tuned(recipe | Qlora())
    assert quantized.parameters == plain.parameters + TRAINED
    assert quantized.trainable_parameters == TRAINED
    assert (plain.dtype, quantized.dtype) == ("float32", "nf4 + float32")
    assert fine_tuned(replace(recipe, steps=1) | Qlora(format="fp4")).dtype == "fp4 + float32"


def test_gradients_states_and_activations_are_those_of_lora(recipe, fine_tuned):
    lora, quantized = fine_tuned(recipe | Lora()), fine_tuned(recipe | Qlora())
    for category in (Category.GRADIENTS, Category.OPTIMIZER_STATES, Category.ACTIVATIONS):
        assert quantized.maximum_by_category[category] == lora.maximum_by_category[category]


def test_the_loss_is_near_but_not_that_of_lora(recipe, fine_tuned):
    """Weights rounded to 16 values: within 1% here, and never equal."""
    lora, quantized = fine_tuned(recipe | Lora()), fine_tuned(recipe | Qlora())
    assert quantized.losses[0] == pytest.approx(lora.losses[0], rel=1e-2)
    assert quantized.losses[0] != pytest.approx(lora.losses[0], rel=1e-7)


def loading(technique):
    """The arguments of loading, as a run makes them."""
    return {name: v() if isinstance(v, Call) else v for name, v in technique.model_arguments(GPT2).items()}


def _adapted(recipe):
    source, technique = locate(recipe.model), Qlora()
    torch.manual_seed(0)
    base = load_model(source, load_config(source), **loading(technique))
    return technique.apply_to(base)


def test_an_evaluation_before_training_changes_no_gradient(recipe):
    """bitsandbytes 0.50 repacks weights in evaluation on some CPUs, and they no longer pass a gradient then."""
    tokens = torch.arange(64).reshape(2, 32)
    gradients = []
    for evaluate in (False, True):
        model = _adapted(recipe)
        if evaluate:
            with torch.no_grad():
                model.eval()(input_ids=tokens)
        model.train()(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 2 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(gradient.abs().sum() > 0 for gradient in gradients[1][1::2])  # of B; A's is zero while B is


def test_random_and_saved_weights_are_quantized_alike(recipe, tmp_path):
    """A model from a config has the same 4-bit weights as the same model saved and loaded."""
    source = locate(recipe.model)
    config, arguments = load_config(source), loading(Qlora())
    load_model(source, config).save_pretrained(tmp_path)
    saved = load_model(ModelSource("saved", str(tmp_path), random=False), config, **arguments)
    for one, other in zip(load_model(source, config, **arguments).parameters(), saved.parameters(), strict=True):
        assert torch.equal(one, other)
    assert sum(type(p).__name__ == "Params4bit" for p in saved.parameters()) == 4 * LAYERS
    assert sum(t.numel() * t.element_size() for t in find_attached_tensors(saved)) > overhead_bytes(True)


def test_it_goes_with_mixed_precision_and_bfloat16(recipe):
    record = run(replace(recipe, steps=2) | Qlora(compute="bfloat16") | MixedPrecision(), device="cpu")
    assert record.status is Status.OK
    assert record.dtype == "autocast bf16"
    assert record.losses[-1] < record.losses[0] * 1.01


def test_it_cannot_be_merged_and_says_so_before_training(recipe, runs_folder):
    with pytest.raises(ConfigurationError, match="qlora brings quantized weights, .* Save it as 'adapter'"):
        run(recipe | Qlora(), device="cpu", save="merged")
    assert not runs_folder.exists()


def test_its_adapter_loads_on_the_whole_base(recipe, fine_tuned):
    record = fine_tuned(recipe | Qlora())
    assert (Path(record.model_path) / "adapter_model.safetensors").exists()
    further = run(replace(recipe, model=record.model_path, steps=1), device="cpu")
    assert further.held_out_loss_before == pytest.approx(record.held_out_loss, rel=1e-2)
    again = run(replace(recipe, model=record.model_path, steps=1) | Qlora(), device="cpu")
    assert again.held_out_loss_before == pytest.approx(record.held_out_loss, rel=1e-2)


def test_without_bitsandbytes_it_is_unavailable_with_the_cure(recipe, monkeypatch):
    monkeypatch.setattr(qlora, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="qlora needs the package bitsandbytes.*: pip install bitsandbytes"):
        run(recipe | Qlora(), device="cpu")
    assert read_all()[0].status is Status.UNAVAILABLE


def test_a_device_without_kernels_is_named():
    assert "no 4-bit kernels for mps" in Qlora().missing(Device("mps"))
    assert Qlora().missing(Device("cpu")) is None
