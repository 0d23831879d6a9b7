import pytest
from transformers import GPT2Config

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.techniques import Lora

C, LAYERS = 64, 2
SHAPES = {"c_attn": [(C, 3 * C)], "c_fc": [(C, 4 * C)], "c_proj": [(C, C), (4 * C, C)]}  # (in, out) in each block


def trained(rank, targets):
    """A is (in, rank), B is (rank, out)."""
    return LAYERS * rank * sum(a + b for target in targets.split("+") for a, b in SHAPES[target])


KINDS = pytest.mark.parametrize(
    "lora",
    [Lora(targets="c_attn"), Lora(rank=2, targets="c_attn"), Lora(rank=4, targets="c_attn+c_fc+c_proj")],
    ids=str,
)


@KINDS
def test_the_first_loss_is_the_baselines_since_b_is_zero(recipe, fine_tuned, lora):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | lora)
    assert adapted.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert adapted.held_out_loss_before == pytest.approx(plain.held_out_loss_before, rel=1e-6)


@KINDS
def test_it_learns_something_else(recipe, fine_tuned, lora):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | lora)
    assert adapted.losses[1:] != plain.losses[1:]
    assert adapted.held_out_loss < adapted.held_out_loss_before


@KINDS
def test_the_trainable_parameters_are_those_of_the_formula(recipe, fine_tuned, lora):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | lora)
    assert adapted.trainable_parameters == trained(lora.rank, lora.targets)
    assert adapted.parameters == plain.parameters + trained(lora.rank, lora.targets)
    assert plain.trainable_parameters == plain.parameters


@KINDS
def test_gradients_and_states_exist_for_a_and_b_alone(recipe, fine_tuned, lora):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | lora)
    matrices = 2 * LAYERS * sum(len(SHAPES[target]) for target in lora.targets.split("+"))
    assert adapted.maximum_by_category[Category.GRADIENTS] == 4 * trained(lora.rank, lora.targets)
    assert adapted.maximum_by_category[Category.OPTIMIZER_STATES] == 8 * trained(lora.rank, lora.targets) + 4 * matrices
    for category in Lora.attacks:
        assert adapted.maximum_by_category[category] < 0.1 * plain.maximum_by_category[category]


def test_the_weights_grow_by_the_adapter(recipe, fine_tuned):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | Lora())
    grown = adapted.maximum_by_category[Category.WEIGHTS] - plain.maximum_by_category[Category.WEIGHTS]
    assert grown == 4 * trained(8, "c_attn")


def test_the_customary_learning_rate_is_ten_times_higher(recipe, fine_tuned):
    from dataclasses import replace

    customary = replace(recipe, learning_rate=None, steps=1)
    plain, adapted = fine_tuned(customary), fine_tuned(customary | Lora())
    assert plain.learning_rate == 1e-3
    assert adapted.learning_rate == pytest.approx(1e-2)
    assert fine_tuned(recipe | Lora()).learning_rate == recipe.learning_rate


def test_the_models_dropout_leaves_the_adapters_own_alone(gpt2_folder, recipe):
    pass
    from workbench.run.trainer import prepare_model

    source = locate(recipe.model)
    model = prepare_model(recipe | Lora(dropout=0.3), load_model(source, load_config(source)))
    rates = {
        name.split(".")[-1] if "lora" not in name else "lora": m.p
        for name, m in model.named_modules()
        if hasattr(m, "p")
    }
    assert rates.pop("lora") == 0.3
    assert set(rates.values()) == {0.0}


@pytest.mark.parametrize("targets", ["q_proj", "c_attn+q_proj", "+", "c_attn,c_fc"])
def test_an_unknown_matrix_is_named_with_the_known_ones(targets):
    with pytest.raises(ConfigurationError, match="lora: gpt2 has no matrix .*Choose from c_attn, c_fc, c_proj, joi"):
        Lora(targets=targets).check_config(GPT2Config())
