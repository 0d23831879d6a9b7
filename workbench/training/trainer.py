"""The Hugging Face `Trainer` of a recipe, built with what the techniques change of it. No technique is named here.

A *seam* is a method of `Technique` that says what to change at one place of a training: `dataset`, `collator`,
`trainer` and others (`techniques/base.py`).
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import pyarrow.compute as pc
import torch
from datasets import Dataset
from safetensors import SafetensorError
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from workbench.base.categories import Phase
from workbench.base.errors import ConfigurationError, explain_errors
from workbench.base.patches.accelerate import leave_deepspeed_alone
from workbench.base.paths import disk_refusal
from workbench.journal import checkpoints
from workbench.measure.meter import Meter
from workbench.recipe import Recipe
from workbench.texts.corpus import Blocks
from workbench.training.stopwatch import WARM_UP_STEPS

leave_deepspeed_alone()


class MeteredTrainer(Trainer):
    """The Trainer, which tells a meter its phases, counts tokens, writes checkpoints that are whole or not there, and
    can put the longest example first.

    Args:
        meter: it is told when the forward pass, the backward pass, the optimizer step and an evaluation begin.

    Attributes:
        tokens_seen, padding_tokens: of all steps until now; the first without padding.
        micro_batch_size: sequences of the last micro-batch.
        warnings: sentences for the record.
        reporters: the callbacks of programs that it reports to, as TensorBoard.
    """

    def __init__(self, *, meter: Meter, **kwargs: Any) -> None:
        self._meter = meter
        self.tokens_seen = 0
        self.padding_tokens = 0
        self.micro_batch_size = 0
        self.warnings: list[str] = []
        self._aside: Path | None = None
        self._longest: int | None = None
        super().__init__(**kwargs)
        self.reporters: list[Any] = []
        for callback in self.callback_handler.callbacks:
            if type(callback) in INTEGRATION_TO_CALLBACK.values():
                self.reporters.append(callback)
                # The last evaluation comes after the training and is reported, too: `end_reports` ends them then.
                vars(callback)["on_train_end"] = lambda *_, **__: None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        self._meter.watch(optimizer)
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        self._meter.enter_phase(Phase.FORWARD)
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self._meter.enter_phase(Phase.BACKWARD)
        return loss

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.micro_batch_size = len(inputs["input_ids"])
        padding = count_padding(inputs)
        self.padding_tokens += padding
        self.tokens_seen += inputs["input_ids"].numel() - padding
        self._meter.label_inputs([*inputs.values(), *args])
        loss = super().training_step(model, inputs, *args, **kwargs)
        # Clipping is part of it. Where the step is not yet due, the next micro-batch ends the phase at once.
        self._meter.enter_phase(Phase.OPTIMIZER_STEP)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._meter.set_tracking(True)
        try:
            with self._meter.phase(Phase.EVALUATION):
                return super().evaluate(*args, **kwargs)
        finally:
            self._meter.set_tracking(False)

    def end_reports(self) -> None:
        """Tell the programs that are reported to that the run is over."""
        for reporter in self.reporters:
            type(reporter).on_train_end(reporter, self.args, self.state, self.control, model=self.model)
            if wandb := getattr(reporter, "_wandb", None):
                wandb.finish()  # otherwise the next run of this process would be reported as the same one

    def put_longest_first(self) -> None:
        """Let every batch of the warm-up steps begin with the longest example: the tracker is on in these, and a run
        that cannot fit fails at once. Where that changes nothing, a warning says so."""
        rows: Any = self.train_dataset
        if not isinstance(rows, Dataset):
            self.warnings.append("longest_first: a stream has no order; nothing was changed")
            return
        lengths = row_lengths(rows)
        if lengths.min() == lengths.max():
            self.warnings.append(f"longest_first: all examples have {lengths.max()} tokens; nothing was changed")
            return
        self._longest = int(lengths.argmax())

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if self._longest is None or sampler is None:
            return sampler
        size = self.args.per_device_train_batch_size
        until = WARM_UP_STEPS * size * self.args.gradient_accumulation_steps
        return LongestFirst(self._longest, sampler, size, until)

    def train_from(self, checkpoint: Path | None) -> None:
        """Train all steps, or those that are left after a whole checkpoint of the same recipe."""
        if checkpoint is not None:
            vars(self).update(checkpoints.read_counters(checkpoint))
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        with checkpoints.name_unusable(resume_from_checkpoint, torch.OutOfMemoryError):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        with checkpoints.name_unusable(checkpoint, torch.OutOfMemoryError):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        with checkpoints.name_unusable(checkpoint):
            super()._load_rng_state(checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint aside, and give it its name when it is whole. A full disk costs the checkpoint, not the
        run: a warning says so."""
        folder = Path(str(self.args.output_dir), checkpoints.FOLDER)
        name = f"checkpoint-{self.state.global_step}"
        self._aside = folder / checkpoints.ASIDE
        shutil.rmtree(self._aside, ignore_errors=True)
        try:
            super()._save_checkpoint(model, trial)
            seen = {name: getattr(self, name) for name in checkpoints.COUNTERS}
            checkpoints.commit(self._aside / name, folder / name, seen)
        except (OSError, RuntimeError, SafetensorError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.warnings.append(f"no {name}: {disk_refusal(folder, error)}")
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside = None


def row_lengths(rows: Dataset) -> Any:
    """Return how many tokens every row has, (rows,)."""
    return pc.list_value_length(rows.with_format("arrow")[:]["input_ids"]).to_numpy()


@dataclass(eq=False)
class LongestFirst(Sampler[int]):
    """A sampler that puts the longest row at the head of every batch, at the beginning of each epoch.

    Attributes:
        longest: the number of that row.
        others: the sampler whose order all other rows have.
        size: rows of a batch.
        until: how many rows of an epoch it arranges so.
    """

    longest: int
    others: Sampler[int]
    size: int
    until: int

    def __iter__(self) -> Iterator[int]:
        others = (row for row in self.others if row != self.longest)
        for place in range(len(self)):
            is_head = place < self.until and place % self.size == 0
            yield self.longest if is_head else next(others, self.longest)

    def __len__(self) -> int:
        return len(self.others)  # type: ignore[arg-type]


def count_padding(inputs: dict[str, torch.Tensor]) -> int:
    """Return how many tokens the attention mask leaves out. They are counted on the batch's device: one short wait."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return 0
    return int((mask == 0).sum())


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Turn B rows of T tokens into `input_ids` and `labels`, both (B, T). The model shifts the labels itself. Where the
    rows have no labels, all tokens count."""
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    if "labels" not in rows[0]:
        return {"input_ids": input_ids, "labels": input_ids.clone()}
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": input_ids, "labels": labels}


def prepare_data(recipe: Recipe, blocks: Blocks) -> dict[str, Any]:
    """Return the Trainer's data arguments, after every technique's seams `examples`, `dataset` and `collator`.

    Raises:
        ConfigurationError: a technique cannot cut its examples from this text.
    """
    train: Any = blocks.train
    collator = cast("Callable[..., Any]", collate)
    for technique in recipe.techniques:
        make_examples = technique.examples()
        if make_examples:
            try:
                train = make_examples(*blocks.text, recipe.seed)
            except ValueError as error:
                raise ConfigurationError(f"{technique.name}: {error}") from None
    for technique in recipe.techniques:
        change_rows = technique.dataset()
        if change_rows:
            train = change_rows(train)
        collate_otherwise = technique.collator()
        if collate_otherwise:
            collator = partial(collate_otherwise, collator)
    return {"train_dataset": train, "eval_dataset": blocks.held_out, "data_collator": collator}


def make_callbacks(recipe: Recipe) -> list[TrainerCallback]:
    """Make the callbacks that a recipe names.

    Raises:
        ConfigurationError: Python finds no such class, or it is no TrainerCallback.
    """
    callbacks: list[TrainerCallback] = []
    for name in recipe.callbacks:
        with explain_errors(f"callbacks: {name} cannot be used", "Name a TrainerCallback, as package.module:Class."):
            callback_class = resolve_name(name)
            if not issubclass(callback_class, TrainerCallback):
                raise TypeError("it is no TrainerCallback")
            callbacks.append(callback_class())
    return callbacks


def build_trainer(
    recipe: Recipe,
    model: PreTrainedModel,
    data: dict[str, Any],
    arguments: TrainingArguments,
    meter: Meter,
    callbacks: list[TrainerCallback],
    trainer_kind: Callable[..., MeteredTrainer] = MeteredTrainer,
) -> MeteredTrainer:
    """Build the Trainer for a recipe whose data and model have been prepared, with every technique's seam `trainer`.

    Args:
        data: as `prepare_data` returns it.
        trainer_kind: what makes it: another on one of several ranks.
    """
    trainer = trainer_kind(meter=meter, model=model, args=arguments, callbacks=callbacks, **data)
    trainer.remove_callback(PrinterCallback)
    for technique in recipe.techniques:
        change_trainer = technique.trainer()
        if change_trainer:
            change_trainer(trainer)
    return trainer
