"""The shadow's `train` repeats by hand what `Trainer.train` does: the same calls, in the same order, in the same state.

Both run here on true tensors. Other tests compare bytes; this one names the call that a new transformers has moved.
"""

from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from transformers import Trainer

from workbench.measure.meter import Meter
from workbench.models.load import load_config, load_model, quiet
from workbench.models.source import locate
from workbench.prediction.rows import STEPS
from workbench.prediction.shadow.step import train
from workbench.techniques import GradientAccumulation
from workbench.training.arguments import build_training_arguments, complete_arguments
from workbench.training.trainer import MeteredTrainer, build_trainer, collate


def gradients(parameters):
    return sum(parameter.grad is not None for parameter in parameters)


# ---- of each call that matters to memory, what it finds ----


def prepare(accelerator, *prepared, **_):
    kinds = tuple(type(thing).__name__ for thing in prepared)
    return None if kinds == ("DataLoader",) else kinds  # the shadow has no loader


def training_step(trainer, model, inputs, items=None):
    synchronizes = trainer.accelerator.gradient_state.sync_gradients
    count, shape = trainer.current_gradient_accumulation_steps, tuple(inputs["input_ids"].shape)
    return synchronizes, count, model is trainer.model_wrapped, shape, int(items), gradients(model.parameters())


def clip(accelerator, parameters, limit, *_, **__):
    return limit, accelerator.gradient_state.sync_gradients


def optimizer_step(optimizer, *_):
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return optimizer.gradient_state.sync_gradients, gradients(stepped), len(optimizer.state)


CALLS = (
    (MeteredTrainer, "create_optimizer", lambda *_: ()),
    (Accelerator, "prepare", prepare),
    (Trainer, "get_batch_samples", lambda trainer, batches, count, *_: (count,)),
    (MeteredTrainer, "training_step", training_step),
    (Accelerator, "clip_grad_norm_", clip),
    (AcceleratedOptimizer, "step", optimizer_step),
    (AcceleratedOptimizer, "zero_grad", lambda *_, **options: tuple(options.items())),
    (torch.nn.Module, "zero_grad", lambda model, *options: (gradients(model.parameters()), *options)),
)


@pytest.fixture
def calls(monkeypatch):
    """The log of these calls: it grows while something trains."""
    log = []

    def note(owner, name, facts):
        function = getattr(owner, name)

        def noted(*args, **kwargs):
            if (finds := facts(*args, **kwargs)) is not None:
                log.append((name, *finds))
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    for call in CALLS:
        note(*call)
    return log


def assembled(recipe, limit, folder):
    source = locate(recipe.model)
    with quiet():
        model = load_model(source, load_config(source))
    arguments = build_training_arguments(complete_arguments(recipe, 1e-4), "cpu", folder)
    arguments.eval_on_start, arguments.max_grad_norm = False, limit
    rows = Dataset.from_dict(
        {"input_ids": [list(range(recipe.sequence_length))] * (STEPS * recipe.effective_batch_size)}
    )
    data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate}
    meter = Meter(model, before_bytes=0)
    return build_trainer(recipe, model, data, arguments, meter, []), meter


def test_the_shadow_calls_what_the_trainer_calls(recipe, calls, tmp_path, subtests):
    for micro_batches, limit in ((1, 1.0), (2, 0.0)):
        asked = replace(recipe, steps=STEPS)
        if micro_batches > 1:
            asked |= GradientAccumulation(steps=micro_batches)
        trainer, meter = assembled(asked, limit, tmp_path / "real")
        with quiet(), meter:
            trainer.train()
        of_the_trainer = calls.copy()
        calls.clear()
        trainer, meter = assembled(asked, limit, tmp_path / "shadow")
        size = asked.effective_batch_size // micro_batches
        batch = collate([{"input_ids": list(range(asked.sequence_length))}] * size)
        with meter:
            list(train(trainer, meter, [batch] * micro_batches))
        names = [name for name, *_ in of_the_trainer]
        with subtests.test(micro_batches=micro_batches, limit=limit):
            assert names.count("training_step") == micro_batches * STEPS  # the notes are complete
            assert names.count("step") == names.count("clip_grad_norm_") == STEPS
            assert calls == of_the_trainer
        calls.clear()
