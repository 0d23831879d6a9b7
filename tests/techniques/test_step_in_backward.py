from dataclasses import replace

import pytest

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.techniques import MixedPrecision, Optimizer, StepInBackward

UNCLIPPED = StepInBackward(max_grad_norm=0.0)


def test_of_all_gradients_few_live_at_once(recipe, fine_tuned):
    plain, stepped = fine_tuned(recipe), fine_tuned(recipe | StepInBackward())
    largest = 4 * 4096 * 64  # the tied embedding's lives from the head to the end
    assert plain.maximum_by_category[Category.GRADIENTS] == 4 * plain.parameters
    assert largest <= stepped.maximum_by_category[Category.GRADIENTS] < 0.8 * 4 * plain.parameters


def test_each_gradient_is_clipped_by_its_own_norm(recipe, fine_tuned):
    """A norm that no gradient reaches changes nothing; one that all exceed does."""
    short = replace(recipe, steps=2)
    unclipped = fine_tuned(short | UNCLIPPED).losses
    assert fine_tuned(short | StepInBackward(max_grad_norm=1e6)).losses == unclipped
    sgd = short | Optimizer(kind="sgd")
    free, held = (fine_tuned(sgd | StepInBackward(max_grad_norm=norm)).losses for norm in (0.0, 1e-4))
    assert held[0] == free[0]
    assert held[-1] != free[-1]


@pytest.mark.parametrize("kind", ["adamw_fused", "muon"])
def test_a_run_goes_on_where_it_was_interrupted(recipe, interrupted, kind):
    whole, resumed = interrupted(recipe | StepInBackward() | Optimizer(kind=kind))
    assert resumed.losses == whole.losses
    assert resumed.held_out_loss == whole.held_out_loss


def test_what_scales_its_loss_needs_all_gradients_and_is_refused():
    with pytest.raises(ConfigurationError, match="brings a scaled loss.* which step_in_backward forbids"):
        Recipe(techniques=(StepInBackward(), MixedPrecision(dtype="fp16")))
    assert Recipe(techniques=(StepInBackward(), MixedPrecision(dtype="bf16")))
