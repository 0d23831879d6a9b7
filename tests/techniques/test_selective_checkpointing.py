from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from workbench.base.categories import Phase
from workbench.measure.meter import Meter
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.prediction.predict import predict
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, SelectiveCheckpointing
from workbench.techniques.selective_checkpointing import is_kept
from workbench.training.run import run

SELECTIVE = SelectiveCheckpointing()
UNIT = 4 * 8 * 32 * 64  # (B, T, C) in fp32
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default


def one_step(recipe, *techniques):
    """The peak of the forward pass, and the operations of the whole step."""
    torch.manual_seed(0)
    model = load_model(locate(recipe.model), load_config(locate(recipe.model))).train()
    for technique in techniques:
        model = technique.apply_to(model)
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


@pytest.mark.dear
def test_on_a_card_a_third_less_for_a_twentieth_more(subtests):
    for gpu, (dropout, more) in product(("t4", "h100"), ((0.0, 0.0), (0.1, 0.05))):
        with subtests.test(gpu=gpu, dropout=dropout):
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


def test_every_kind_of_model_learns_the_same(kinds, subtests):
    for folder in kinds.iterdir():
        with subtests.test(folder.name):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).train()
            batch = torch.randint(50, (2, 16))
            losses_and_gradients = []
            for changed in (model, SELECTIVE.apply_to(model)):
                torch.manual_seed(1)
                changed.zero_grad()
                loss = changed(input_ids=batch, labels=batch, use_cache=False).loss
                loss.backward()
                gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
                losses_and_gradients.append([loss.detach(), *gradients])
            plain, recomputed = losses_and_gradients
            assert len(plain) == len(recomputed) > 2
            assert all(map(torch.equal, plain, recomputed))


@pytest.mark.gpu
@pytest.mark.values
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_on_a_gpu_it_is_exact_too(recipe, tmp_path, dropout):
    dropping = replace(recipe, dropout=dropout)
    plain, saved = (run(chosen, device="cuda", folder=tmp_path) for chosen in (dropping, dropping | SELECTIVE))
    assert saved.losses == plain.losses
