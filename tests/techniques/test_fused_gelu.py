import torch
from transformers import GPT2Config

from workbench.base.categories import Category
from workbench.models.family import family_of
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.techniques import FusedGelu

GPT2 = family_of(GPT2Config())

LAYERS, C = 2, 64
B, T = 8, 32


def test_three_tensors_of_four_times_the_width_are_not_kept(recipe, fine_tuned):
    plain = fine_tuned(recipe).maximum_by_category
    fused = fine_tuned(recipe | FusedGelu()).maximum_by_category
    assert plain[Category.ACTIVATIONS] - fused[Category.ACTIVATIONS] == LAYERS * 3 * B * T * 4 * C * 4


def test_values_and_gradients_are_those_of_the_formula():
    x = torch.linspace(-6, 6, 10_001, requires_grad=True)
    old, new = (_gelu(name) for name in ("gelu_new", "gelu_pytorch_tanh"))
    torch.testing.assert_close(new(x), old(x), rtol=0, atol=2e-6)
    torch.testing.assert_close(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (new, old)), rtol=0, atol=2e-6)


def _gelu(name):
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def test_saved_and_new_models_take_it_with_the_same_weights(subtests):
    for name in ("gpt2-tiny", "random:gpt2-tiny"):
        with subtests.test(name):
            source = locate(name)
            config = load_config(source)
            plain = load_model(source, config)
            fused = load_model(source, config, **FusedGelu().model_arguments(GPT2))
            assert config.activation_function == plain.config.activation_function == "gelu_new"
            assert fused.config.activation_function == "gelu_pytorch_tanh"
            assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fused.parameters(), strict=True))
