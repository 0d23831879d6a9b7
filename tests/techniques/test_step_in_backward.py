import gc
from dataclasses import dataclass, replace

import pytest
import torch

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.recipe import Recipe
from workbench.run.run import run
from workbench.techniques import (
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Optimizer,
    OptimizerOffloading,
    StepInBackward,
    Technique,
)
from workbench.techniques.base import Numerics, Stage

UNCLIPPED = StepInBackward(max_grad_norm=0.0)
PARTNERS = [
    GradientCheckpointing(), ChunkedCrossEntropy(), Lora(rank=4), MixedPrecision(), Optimizer(kind="adafactor"),
    Optimizer(kind="muon"), OptimizerOffloading(to="disk"),
]  # fmt: skip


@dataclass(frozen=True)
class NoClipping(Technique):
    """The Trainer without its clipping by the norm of all gradients."""

    name = "no_clipping"
    title = costs = ""
    stage = Stage.WRAP
    numerics = Numerics.DIFFERENT

    def training_arguments(self, arguments):
        return {**arguments, "max_grad_norm": 0.0}


def test_without_clipping_every_loss_is_the_same(recipe, fine_tuned):
    plain, stepped = fine_tuned(recipe | NoClipping()), fine_tuned(recipe | UNCLIPPED)
    assert stepped.losses == plain.losses
    assert stepped.held_out_loss == plain.held_out_loss < plain.held_out_loss_before - 0.1


@pytest.mark.parametrize("partner", PARTNERS, ids=str)
def test_it_is_exact_beside_other_techniques_too(recipe, fine_tuned, partner):
    """Whichever optimizer there is takes its own step; offloading adds up at other elements."""
    plain = fine_tuned(recipe | partner | NoClipping())
    stepped = fine_tuned(recipe | partner | UNCLIPPED)
    assert stepped.losses == pytest.approx(plain.losses, rel=1e-6)
    assert stepped.held_out_loss == pytest.approx(plain.held_out_loss, rel=1e-6)


def test_of_all_gradients_few_live_at_once(recipe, fine_tuned):
    plain, stepped = fine_tuned(recipe), fine_tuned(recipe | StepInBackward())
    largest = 4 * 4096 * 64  # the tied embedding's lives from the head to the end
    assert plain.maximum_by_category[Category.GRADIENTS] == 4 * plain.parameters
    assert largest <= stepped.maximum_by_category[Category.GRADIENTS] < 0.8 * 4 * plain.parameters
    assert (
        stepped.maximum_by_category[Category.OPTIMIZER_STATES] == plain.maximum_by_category[Category.OPTIMIZER_STATES]
    )


def test_each_gradient_is_clipped_by_its_own_norm(recipe, fine_tuned):
    """A norm that no gradient reaches changes nothing; one that all exceed does."""
    unclipped = fine_tuned(recipe | UNCLIPPED).losses
    assert fine_tuned(recipe | StepInBackward(max_grad_norm=1e6)).losses == unclipped
    sgd = recipe | Optimizer(kind="sgd")
    free, held = (fine_tuned(sgd | StepInBackward(max_grad_norm=norm)).losses for norm in (0.0, 1e-4))
    assert held[0] == free[0]
    assert held[-1] != free[-1]


def test_a_run_goes_on_where_it_was_interrupted(recipe, tmp_path):
    chosen = replace(recipe, steps=6) | StepInBackward() | Optimizer(kind="adamw_fused")
    whole = run(chosen, device="cpu", folder=tmp_path / "whole")
    seen = []

    def stop(_):
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(chosen, device="cpu", folder=tmp_path, checkpoint_every=2, observe=stop)
    resumed = run(chosen, device="cpu", folder=tmp_path, checkpoint_every=2, resume=True)
    assert resumed.resumed_at_steps
    assert resumed.losses == whole.losses
    assert resumed.held_out_loss == whole.held_out_loss


def test_nothing_of_a_run_stays_alive(recipe):
    """A hook that held its optimizer would keep the model, and no collector would find it."""

    def alive():
        gc.collect()
        return {id(thing) for thing in gc.get_objects() if type(thing) is torch.nn.Parameter}

    run(recipe, device="cpu")  # what any run leaves: caches of libraries
    before = alive()
    run(recipe | StepInBackward(), device="cpu")
    assert alive() <= before


@pytest.mark.parametrize(
    ("other", "why"),
    [(GradientAccumulation(steps=2), "gradients summed"), (MixedPrecision(dtype="fp16"), "a scaled loss")],
)
def test_what_needs_all_gradients_is_refused(other, why):
    with pytest.raises(ConfigurationError, match=f"brings {why}.* which step_in_backward forbids"):
        Recipe(techniques=(StepInBackward(), other))


def test_bf16_scales_no_loss():
    Recipe(techniques=(StepInBackward(), MixedPrecision(dtype="bf16")))
