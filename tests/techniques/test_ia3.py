from dataclasses import replace

import pytest

from workbench.measure.categories import Category
from workbench.run.run import run
from workbench.techniques import GradientCheckpointing, Ia3

C, LAYERS, B, T = 64, 2, 8, 32
KINDS = pytest.mark.parametrize("ia3", [Ia3(), Ia3(feedforward=False)], ids=str)


def trained(ia3):
    """3 C factors on the outputs of c_attn, 4 C on the inputs of the MLP's c_proj."""
    return LAYERS * (3 + 4 * ia3.feedforward) * C


@KINDS
def test_the_first_loss_is_the_baselines_since_all_factors_are_one(recipe, fine_tuned, ia3):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | ia3)
    assert adapted.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert adapted.held_out_loss_before == pytest.approx(plain.held_out_loss_before, rel=1e-6)


@KINDS
def test_it_learns_something_else(recipe, fine_tuned, ia3):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | ia3)
    assert adapted.losses[1:] != plain.losses[1:]
    assert adapted.held_out_loss < adapted.held_out_loss_before


@KINDS
def test_the_trainable_parameters_are_those_of_the_formula(recipe, fine_tuned, ia3):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | ia3)
    assert adapted.trainable_parameters == trained(ia3)
    assert adapted.parameters == plain.parameters + trained(ia3)


@KINDS
def test_gradients_and_states_exist_for_the_factors_alone(recipe, fine_tuned, ia3):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | ia3)
    vectors = LAYERS * (1 + ia3.feedforward)
    assert adapted.maximum_by_category[Category.GRADIENTS] == 4 * trained(ia3)
    assert adapted.maximum_by_category[Category.OPTIMIZER_STATES] == 8 * trained(ia3) + 4 * vectors
    for category in Ia3.attacks:
        assert adapted.maximum_by_category[category] < 0.1 * plain.maximum_by_category[category]


@KINDS
def test_it_keeps_what_it_multiplies(recipe, fine_tuned, ia3):
    """Of 28 tensors a block, full fine-tuning's, 6 go; 3 C come for c_attn and 4 C for the MLP. Within 3%."""
    by_hand = LAYERS * (22 + 3 + 4 * ia3.feedforward) * B * T * C * 4
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | ia3)
    assert adapted.maximum_by_category[Category.ACTIVATIONS] == pytest.approx(by_hand, rel=0.03)
    more = adapted.maximum_by_category[Category.ACTIVATIONS] > 0.97 * plain.maximum_by_category[Category.ACTIVATIONS]
    assert more == ia3.feedforward


def test_it_goes_with_checkpointing(recipe, fine_tuned):
    plain, checkpointed = fine_tuned(recipe | Ia3()), fine_tuned(recipe | Ia3() | GradientCheckpointing())
    assert checkpointed.losses == pytest.approx(plain.losses, rel=1e-5)


def test_the_merged_model_is_the_trained_one(recipe, fine_tuned):
    record = fine_tuned(recipe | Ia3())
    further = run(replace(recipe, model=record.model_path, steps=1), device="cpu")
    assert further.held_out_loss_before == pytest.approx(record.held_out_loss, rel=1e-5)
