import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.techniques import GradientCheckpointing
from workbench.training.run import run


def test_more_checkpoints_keep_less_until_the_backward_pass(recipe, fine_tuned):
    none, half, every = (
        fine_tuned(r).by_phase["forward"]
        for r in (recipe, recipe | GradientCheckpointing(every_n_layers=2), recipe | GradientCheckpointing())
    )
    assert every < half < none


def gpt2(layers):
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_layer=layers, n_embd=8, n_head=2, bos_token_id=0, eos_token_id=0)
    )


def test_every_nth_block_is_checkpointed(subtests):
    for n, expected in ((1, [True] * 5), (2, [True, False, True, False, True]), (5, [True] + [False] * 4)):
        for use_reentrant in (False, True):
            with subtests.test(n=n, use_reentrant=use_reentrant):
                model = gpt2(layers=5)
                GradientCheckpointing(every_n_layers=n, use_reentrant=use_reentrant).apply_to(model)
                assert [block.gradient_checkpointing for block in model.transformer.h] == expected
                assert model.config.use_cache is False


# ---- inputs of the blocks that wait on the host ----


def test_without_a_gpu_there_is_nothing_to_offload(recipe, runs_folder):
    with pytest.raises(UnavailableError, match="offload:true needs a CUDA device; a cpu's memory is the host's"):
        run(recipe | GradientCheckpointing(offload=True), device="cpu")


def test_an_older_transformers_says_that_it_cannot_offload(monkeypatch):
    model = gpt2(layers=1)
    monkeypatch.setattr(model, "activation_checkpointing_enable", lambda kwargs=None: None)  # an older form
    with pytest.raises(ConfigurationError, match="gradient_checkpointing: .*unexpected keyword argument 'offload'"):
        GradientCheckpointing(offload=True).apply_to(model)
    GradientCheckpointing().apply_to(model)


@pytest.mark.gpu
@pytest.mark.values
def test_on_a_gpu_the_losses_are_those_without_offloading(recipe):
    plain, moved = run(recipe, device="cuda"), run(recipe | GradientCheckpointing(offload=True), device="cuda")
    assert moved.losses == pytest.approx(plain.losses, rel=1e-6)
