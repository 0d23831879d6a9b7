"""An optimizer that steps inside the backward pass: its gradients are gradients, measured and predicted alike."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from tests.conftest import EMBEDDING, VOCABULARY
from workbench import predict
from workbench.base.categories import Category
from workbench.techniques import GradientCheckpointing, MixedPrecision, Numerics, Technique
from workbench.techniques.base import Call

BATCH_BYTES = 2 * 8 * 32 * 8  # token ids and labels of 8 × 32, 8 bytes each


class StepsInBackward(torch.optim.SGD):
    """Each gradient is used and freed as soon as the backward pass has made it; `step` finds none."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        for parameter in self.param_groups[0]["params"]:
            parameter.register_post_accumulate_grad_hook(self.use)

    def use(self, parameter):
        parameter.data.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
        parameter.grad = None


@dataclass(frozen=True)
class InBackward(Technique):
    name: ClassVar[str] = "in_backward"
    title: ClassVar[str] = "In backward"
    attacks: ClassVar[tuple[Category, ...]] = (Category.GRADIENTS,)
    costs: ClassVar[str] = "nothing"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def trainer(self):
        return Call(step_in_backward)


def step_in_backward(trainer):
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    trainer.optimizer = StepsInBackward(trained, lr=trainer.args.learning_rate)


@pytest.mark.parametrize("technique", [None, GradientCheckpointing(), MixedPrecision()], ids=str)
def test_predicted_and_measured_are_equal_but_for_the_batch(technique, recipe, fine_tuned):
    """To the byte; the batch itself is made before the tracker looks, and copied by the shadow."""
    plain = fine_tuned(recipe)
    recipe |= InBackward()
    if technique is not None:
        recipe |= technique
    measured, predicted = fine_tuned(recipe), predict(recipe, "cpu")
    batch = {Category.ACTIVATIONS: BATCH_BYTES, Category.TEMPORARIES: BATCH_BYTES}
    for category in Category:
        near = batch.get(category, 0)
        assert predicted.by_category[category] == pytest.approx(measured.by_category[category], abs=near, rel=0)
        most = measured.maximum_by_category[category]
        assert predicted.maximum_by_category[category] == pytest.approx(most, abs=near, rel=0)
    largest = 4 * VOCABULARY * EMBEDDING  # that of the tied embedding, which comes last, when all others are freed
    for memory in (measured, predicted):
        assert memory.maximum_by_category[Category.GRADIENTS] == largest
        assert sum(memory.by_category.values()) == memory.peak_allocated_bytes
    # without it the same bytes live longer
    assert plain.maximum_by_category[Category.GRADIENTS] > 1.3 * largest
