from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category, Phase
from workbench.measure.meter import Meter
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.predict.predict import predict
from workbench.recipe import Recipe
from workbench.techniques import (
    ActivationOffloading,
    Attention,
    ChunkedCrossEntropy,
    FusedGelu,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    PureBf16,
    Qlora,
    SelectiveCheckpointing,
)
from workbench.techniques.selective_checkpointing import is_kept

SELECTIVE = SelectiveCheckpointing()
PARTNERS = [
    Lora(rank=4, dropout=0.1), Qlora(rank=4), GradientAccumulation(steps=2), MixedPrecision(), PureBf16(),
    ChunkedCrossEntropy(), Attention(), FusedGelu(),
]  # fmt: skip
UNIT = 4 * 8 * 32 * 64  # (B, T, C) in fp32
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default


def weights(record):
    return load_file(Path(record.model_path) / "model.safetensors")


def test_losses_and_weights_are_the_same_to_the_last_bit(recipe, fine_tuned):
    plain, saved = fine_tuned(recipe), fine_tuned(recipe | SELECTIVE)
    assert saved.losses == plain.losses
    assert saved.losses[-1] != saved.losses[0]
    assert (saved.held_out_loss, saved.held_out_loss_before) == (plain.held_out_loss, plain.held_out_loss_before)
    one, other = weights(plain), weights(saved)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("partner", PARTNERS, ids=lambda technique: technique.name)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_it_is_exact_beside_other_techniques_and_dropout_is_repeated(recipe, fine_tuned, partner, dropout):
    alone = fine_tuned(replace(recipe, dropout=dropout) | partner)
    both = fine_tuned(replace(recipe, dropout=dropout) | partner | SELECTIVE)
    assert both.losses == alone.losses
    assert both.losses[-1] != both.losses[0]
    assert both.maximum_by_category[Category.ACTIVATIONS] < alone.maximum_by_category[Category.ACTIVATIONS]


def test_nothing_that_belongs_to_the_model_shrinks(recipe, fine_tuned):
    plain = fine_tuned(recipe).maximum_by_category
    saved = fine_tuned(recipe | SELECTIVE).maximum_by_category
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES, Category.LOGITS_AND_LOSS):
        assert saved[category] == plain[category]


def one_step(recipe, *techniques):
    """The peak of the forward pass, and the operations of the whole step."""
    torch.manual_seed(0)
    model = load_model(locate(recipe.model), load_config(locate(recipe.model))).train()
    for technique in techniques:
        model = technique.applied_to(model)
    batch = torch.randint(4096, (8, 32))
    with Meter(model) as meter, FlopCounterMode(display=False) as operations:
        with meter.phase(Phase.FORWARD):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        with meter.phase(Phase.BACKWARD):
            loss.backward()
    return meter.report().by_phase[Phase.FORWARD], operations.get_total_flops()


def test_eleven_units_of_a_block_are_kept_instead_of_28(recipe):
    """By hand: the input, queries, keys and values, attention, both projections, and 4 of the MLP's first."""
    kept = {
        words: one_step(recipe, *techniques)[0]
        for words, techniques in (("none", ()), ("all", (GradientCheckpointing(),)), ("some", (SELECTIVE,)))
    }
    logsumexp = 4 * 8 * 32 * 4  # of the heads, which comes with the attention's output
    assert kept["some"] - kept["all"] == 2 * ((11 - 1) * UNIT + logsumexp)


def test_no_product_is_computed_twice(recipe):
    operations = [one_step(recipe, *techniques)[1] for techniques in ((), (SELECTIVE,), (GradientCheckpointing(),))]
    assert operations[1] == operations[0] < operations[2]


@pytest.mark.parametrize(("dropout", "more"), [(0.0, 0.0), (0.1, 0.05)])
@pytest.mark.parametrize("gpu", ["t4", "h100"])
def test_on_a_card_a_third_less_for_a_twentieth_more(gpu, dropout, more):
    recipe = Recipe(model="random:gpt2", effective_batch_size=4, sequence_length=1024, dropout=dropout)
    plain, saved = predict(recipe, gpu), predict(recipe | SELECTIVE, gpu)
    assert saved.maximum_by_category["activations"] < 0.7 * plain.maximum_by_category["activations"]
    assert plain.flops <= saved.flops <= (1 + more) * plain.flops


def test_attention_that_draws_its_dropout_is_computed_again():
    q = torch.empty(1, 2, 8, 16)
    assert is_kept(None, ATTENTION, q, q, q)
    assert is_kept(None, ATTENTION, q, q, q, 0.0)
    assert not is_kept(None, ATTENTION, q, q, q, 0.1)
    assert not is_kept(None, ATTENTION, q, q, q, dropout_p=0.1)
    assert not is_kept(None, torch.ops.aten.gelu.default, q)


def test_every_kind_of_model_learns_the_same(kinds):
    for folder in kinds.iterdir():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).train()
        batch = torch.randint(50, (2, 16))
        found = []
        for changed in (model, SELECTIVE.applied_to(model)):
            torch.manual_seed(1)
            changed.zero_grad()
            loss = changed(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert len(found[0]) == len(found[1]) > 2, folder.name
        assert all(map(torch.equal, *found)), folder.name


@pytest.mark.parametrize(
    ("other", "why"), [(GradientCheckpointing(), "computed a second time"), (ActivationOffloading(), "wait elsewhere")]
)
def test_what_it_cannot_be_with_is_refused(other, why):
    with pytest.raises(ConfigurationError, match=f"{why}, which (selective|gradient)_checkpointing forbids"):
        Recipe(techniques=(SELECTIVE, other))


@pytest.mark.gpu
@pytest.mark.values
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_on_a_gpu_it_is_exact_too(recipe, tmp_path, dropout):
    from workbench.run.run import run

    dropping = replace(recipe, dropout=dropout)
    plain, saved = (run(each, device="cuda", folder=tmp_path) for each in (dropping, dropping | SELECTIVE))
    assert saved.losses == plain.losses
