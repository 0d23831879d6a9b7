"""The shadow's `train` repeats by hand what `Trainer.train` does: the same calls, in the same order, in the same state.

Both run here on true tensors. A transformers that changes its order fails this.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from transformers import Trainer

from workbench.measure.meter import Meter
from workbench.models.load import load_config, load_model, quiet
from workbench.models.source import locate
from workbench.predict.rows import STEPS
from workbench.predict.shadow.step import train
from workbench.run.trainer import SeamTrainer, assemble, collate, training_arguments
from workbench.techniques import GradientAccumulation

CPU = torch.device("cpu")


def gradients(parameters: Any) -> int:
    return sum(parameter.grad is not None for parameter in parameters)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every call that matters to memory, with what it finds: it grows while something trains."""
    log: list[tuple[Any, ...]] = []

    def note(owner: type, name: str, facts: Any) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if (found := facts(*args, **kwargs)) is not None:
                log.append((name, *found))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    def prepare(accelerator: Any, *prepared: Any, **_: Any) -> tuple[Any, ...] | None:
        kinds = tuple(type(one).__name__ for one in prepared)
        return None if kinds == ("DataLoader",) else kinds  # the shadow has no loader

    def training_step(trainer: Any, model: Any, inputs: Any, items: Any = None) -> tuple[Any, ...]:
        state = trainer.accelerator.gradient_state.sync_gradients, trainer.current_gradient_accumulation_steps
        wrapped = model is trainer.model_wrapped
        return *state, wrapped, tuple(inputs["input_ids"].shape), int(items), gradients(model.parameters())

    def clip(accelerator: Any, parameters: Any, limit: float, *_: Any, **__: Any) -> tuple[Any, ...]:
        return limit, accelerator.gradient_state.sync_gradients

    def step(optimizer: Any, *_: Any) -> tuple[Any, ...]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return optimizer.gradient_state.sync_gradients, gradients(held), len(optimizer.state)

    note(SeamTrainer, "create_optimizer", lambda *_: ())
    note(Accelerator, "prepare", prepare)
    note(Trainer, "get_batch_samples", lambda trainer, batches, count, *_: (count,))
    note(SeamTrainer, "training_step", training_step)
    note(Accelerator, "clip_grad_norm_", clip)
    note(AcceleratedOptimizer, "step", step)
    note(AcceleratedOptimizer, "zero_grad", lambda *_, **options: tuple(options.items()))
    note(torch.nn.Module, "zero_grad", lambda model, *options: (gradients(model.parameters()), *options))
    return log


@pytest.mark.parametrize("limit", [1.0, 0.0])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_shadow_calls_what_the_trainer_calls(recipe, calls, tmp_path, micro_batches, limit):
    short = replace(recipe, steps=STEPS)
    short = short | GradientAccumulation(steps=micro_batches) if micro_batches > 1 else short

    def assembled(folder: Path) -> tuple[SeamTrainer, Meter]:
        source = locate(short.model)
        with quiet():
            model = load_model(source, load_config(source))
        arguments = training_arguments(short, 1e-4, CPU, folder)
        arguments.eval_on_start, arguments.max_grad_norm = False, limit
        count = STEPS * short.effective_batch_size
        rows = Dataset.from_dict({"input_ids": [list(range(short.sequence_length))] * count})
        data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate}
        meter = Meter(model, before_bytes=0)
        return assemble(short, model, data, arguments, meter, []), meter

    trainer, meter = assembled(tmp_path / "real")
    with quiet(), meter:
        trainer.train()
    real = calls.copy()
    calls.clear()
    trainer, meter = assembled(tmp_path / "shadow")
    size = short.effective_batch_size // micro_batches
    batch = collate([{"input_ids": list(range(short.sequence_length))}] * size)
    with meter:
        list(train(trainer, meter, [batch] * micro_batches))
    names = [name for name, *_ in real]
    assert names.count("training_step") == micro_batches * STEPS  # the notes are complete
    assert names.count("step") == names.count("clip_grad_norm_") == STEPS
    assert calls == real
