from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workbench.errors import ConfigurationError, UnavailableError
from workbench.measure.categories import Category
from workbench.run.run import run
from workbench.techniques import GradientAccumulation, GradientCheckpointing, Lora, MixedPrecision

KINDS = pytest.mark.parametrize(
    "checkpointing",
    [
        GradientCheckpointing(),
        GradientCheckpointing(use_reentrant=True),
        GradientCheckpointing(every_n_layers=2),
        GradientCheckpointing(every_n_layers=2, use_reentrant=True),
    ],
    ids=["all", "all-reentrant", "half", "half-reentrant"],
)


def weights(record):
    return load_file(Path(record.model_path) / "model.safetensors")


@KINDS
def test_every_loss_is_the_same_to_the_last_bit(recipe, fine_tuned, checkpointing):
    plain, saved = fine_tuned(recipe), fine_tuned(recipe | checkpointing)
    assert saved.losses == plain.losses
    assert saved.held_out_loss == plain.held_out_loss
    assert saved.held_out_loss_before == plain.held_out_loss_before


@KINDS
def test_the_fine_tuned_weights_are_the_same_to_the_last_bit(recipe, fine_tuned, checkpointing):
    plain, saved = weights(fine_tuned(recipe)), weights(fine_tuned(recipe | checkpointing))
    assert plain.keys() == saved.keys()
    assert all(torch.equal(plain[name], saved[name]) for name in plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_is_repeated_in_the_recomputation(recipe, fine_tuned, use_reentrant):
    from dataclasses import replace

    dropping = replace(recipe, dropout=0.2)
    plain, saved = fine_tuned(dropping), fine_tuned(dropping | GradientCheckpointing(use_reentrant=use_reentrant))
    assert plain.losses != fine_tuned(recipe).losses
    assert saved.losses == plain.losses


@KINDS
def test_activations_shrink_and_nothing_that_belongs_to_the_model_does(recipe, fine_tuned, checkpointing):
    plain = fine_tuned(recipe).maximum_by_category
    saved = fine_tuned(recipe | checkpointing).maximum_by_category
    for category in GradientCheckpointing.attacks:
        assert saved[category] < 0.85 * plain[category]
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES, Category.LOGITS_AND_LOSS):
        assert saved[category] == plain[category]


@KINDS
def test_the_peak_falls(recipe, fine_tuned, checkpointing):
    plain, saved = fine_tuned(recipe), fine_tuned(recipe | checkpointing)
    assert saved.peak_allocated_bytes < plain.peak_allocated_bytes


def test_more_checkpoints_keep_less_until_the_backward_pass(recipe, fine_tuned):
    none, half, every = (
        fine_tuned(r).by_phase["forward"]
        for r in (recipe, recipe | GradientCheckpointing(every_n_layers=2), recipe | GradientCheckpointing())
    )
    assert every < half < none


@pytest.mark.parametrize(
    "partner", [Lora(rank=4), GradientAccumulation(steps=2), MixedPrecision()], ids=lambda technique: technique.name
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_it_is_exact_beside_other_techniques_too(recipe, fine_tuned, partner, use_reentrant):
    """With LoRA the input of the first block needs no gradient: the case in which reentrant blocks train nothing."""
    alone = fine_tuned(recipe | partner)
    both = fine_tuned(recipe | partner | GradientCheckpointing(use_reentrant=use_reentrant))
    assert both.losses == alone.losses
    assert both.losses[-1] != both.losses[0]
    assert both.maximum_by_category[Category.ACTIVATIONS] < alone.maximum_by_category[Category.ACTIVATIONS]


@pytest.mark.parametrize(
    ("n", "expected"), [(1, [True] * 5), (2, [True, False, True, False, True]), (5, [True] + [False] * 4)]
)
def test_every_nth_block_is_checkpointed(n, expected):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_layer=5, n_embd=8, n_head=2, bos_token_id=0, eos_token_id=0))
    GradientCheckpointing(every_n_layers=n).applied_to(model)
    assert [block.gradient_checkpointing for block in model.transformer.h] == expected
    assert model.config.use_cache is False


# ---- inputs of the blocks that wait on the host ----


def test_without_a_gpu_there_is_nothing_to_offload(recipe, runs_folder):
    with pytest.raises(UnavailableError, match="offload:true needs a CUDA device; a cpu's memory is the host's"):
        run(recipe | GradientCheckpointing(offload=True), device="cpu")


def test_an_older_transformers_says_that_it_cannot_offload(monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_layer=1, n_embd=8, n_head=2, bos_token_id=0, eos_token_id=0))
    monkeypatch.setattr(model, "activation_checkpointing_enable", lambda kwargs=None: None)  # an older form
    with pytest.raises(ConfigurationError, match="gradient_checkpointing: .*unexpected keyword argument 'offload'"):
        GradientCheckpointing(offload=True).applied_to(model)
    GradientCheckpointing().applied_to(model)


@pytest.mark.gpu
@pytest.mark.values
def test_on_a_gpu_the_losses_are_those_without_offloading(recipe):
    plain, moved = run(recipe, device="cuda"), run(recipe | GradientCheckpointing(offload=True), device="cuda")
    assert moved.losses == pytest.approx(plain.losses, rel=1e-6)
