"""A recipe becomes a Hugging Face `Trainer`, assembled through the techniques' seams. No technique is named here."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from safetensors import SafetensorError
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from workbench.measure.categories import Phase
from workbench.measure.meter import Meter
from workbench.recipe import Recipe
from workbench.records import checkpoints
from workbench.techniques import Technique
from workbench.techniques.base import Arguments
from workbench.texts.corpus import Blocks


class SeamTrainer(Trainer):
    """The Trainer, with the techniques' seams and the meter's phases.

    Args:
        techniques: in the order in which their seams apply.
        meter: told when the forward pass, the backward pass, the optimizer step and evaluation begin.
    """

    def __init__(self, *, techniques: tuple[Technique, ...], meter: Meter, **kwargs: Any) -> None:
        self._techniques, self._meter = techniques, meter
        self.tokens_seen, self.padding_tokens, self.micro_batch_size = 0, 0, 0
        self.warnings: list[str] = []
        self._aside: Path | None = None
        self._longest: list[int] = []
        self._plain_model: PreTrainedModel = kwargs["model"]
        super().__init__(**kwargs)
        self._loss = super().compute_loss
        for technique in techniques:
            self._loss = technique.compute_loss(self._loss)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        for technique in self._techniques:
            if self.optimizer is None:
                self.optimizer = technique.optimizer(self._plain_model, self.args)
        optimizer = super().create_optimizer(model)
        self._meter.watch(optimizer)
        return optimizer

    def compute_loss_context_manager(self) -> ExitStack:
        stack = super().compute_loss_context_manager()
        for technique in self._techniques:
            stack.enter_context(technique.forward_context(self._plain_model))
        return stack

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return self._loss(model, inputs, *args, **kwargs)
        self._meter.enter_phase(Phase.FORWARD)
        loss = self._loss(model, inputs, *args, **kwargs)
        self._meter.enter_phase(Phase.BACKWARD)
        return loss

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.micro_batch_size = len(inputs["input_ids"])
        padding = count_padding(inputs)
        self.padding_tokens += padding
        self.tokens_seen += inputs["input_ids"].numel() - padding
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._meter.enter_phase(Phase.OPTIMIZER_STEP)  # clipping included; the next micro-batch ends it at once
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._meter.attribute(True)
        try:
            with self._meter.phase(Phase.EVALUATION):
                return super().evaluate(*args, **kwargs)
        finally:
            self._meter.attribute(False)

    def put_longest_first(self) -> None:
        """Let the first step consist of the longest examples. A warning is noted where that changes nothing."""
        rows: Any = self.train_dataset
        if not isinstance(rows, Dataset):
            self.warnings.append("longest_first: a stream has no order to change; its examples come as they are")
            return
        lengths = np.array([len(ids) for ids in rows["input_ids"]])
        if lengths.min() == lengths.max():
            self.warnings.append(f"longest_first: all examples have {lengths.max()} tokens; nothing was changed")
            return
        step = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        self._longest = np.argsort(-lengths, kind="stable")[:step].tolist()

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        return LongestFirst(self._longest, sampler) if self._longest and sampler is not None else sampler

    def resume(self, checkpoint: Path | None) -> None:
        """Train from the beginning, or from a whole checkpoint of the same recipe."""
        if checkpoint is not None:
            seen = checkpoints.counters(checkpoint)
            self.tokens_seen, self.padding_tokens = seen["tokens_seen"], seen["padding_tokens"]
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The Trainer's, but aside first. A disk that is full costs the checkpoint, not the run."""
        folder, name = Path(str(self.args.output_dir)), f"checkpoint-{self.state.global_step}"
        self._aside = folder / ".aside"
        shutil.rmtree(self._aside, ignore_errors=True)
        try:
            super()._save_checkpoint(model, trial)
            seen = {"tokens_seen": self.tokens_seen, "padding_tokens": self.padding_tokens}
            checkpoints.commit(self._aside / name, folder / name, seen)
        except (OSError, RuntimeError, SafetensorError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.warnings.append(f"no {name}: {str(error).splitlines()[0]}")
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside = None


class LongestFirst(Sampler[int]):
    """The rows of `longest`, then all others in the order of another sampler. So in every epoch."""

    def __init__(self, longest: list[int], others: Sampler[int]) -> None:
        self.longest, self.others = longest, others

    def __iter__(self) -> Iterator[int]:
        first = set(self.longest)
        yield from self.longest
        yield from (row for row in self.others if row not in first)

    def __len__(self) -> int:
        return len(self.others)  # type: ignore[arg-type]


def count_padding(inputs: dict[str, torch.Tensor]) -> int:
    """Tokens that the attention mask leaves out; counted where the batch is, which costs a GPU one short wait."""
    mask = inputs.get("attention_mask")
    return 0 if mask is None else int((mask == 0).sum())


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """B rows of T tokens to `input_ids` and `labels`, both (B, T); the model shifts the labels itself."""
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def prepare_data(recipe: Recipe, blocks: Blocks) -> dict[str, Any]:
    """The Trainer's data arguments, after every technique's examples, dataset and collator seams."""
    train: Any = blocks.train
    collator = cast("Callable[..., Any]", collate)
    for technique in recipe.techniques:
        examples = technique.examples(blocks.text, recipe.seed)
        train = train if examples is None else examples
    for technique in recipe.techniques:
        train = technique.dataset(train)
    for technique in recipe.techniques:
        collator = technique.collator(collator)
    return {"train_dataset": train, "eval_dataset": blocks.held_out, "data_collator": collator}


def prepare_model(recipe: Recipe, model: PreTrainedModel) -> PreTrainedModel:
    """Apply the recipe's dropout and every technique's model seam."""
    if recipe.dropout is not None:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = recipe.dropout
    for technique in recipe.techniques:
        model = technique.model(model)
    return model


def argument_values(recipe: Recipe, learning_rate: float) -> Arguments:
    """The recipe's own `TrainingArguments` and those that are the same for every run, wherever it runs."""
    decided = recipe.training_arguments()
    tokens = decided["per_device_train_batch_size"] * recipe.shape.tokens
    return {
        **decided,
        "learning_rate": learning_rate,
        "warmup_steps": decided["max_steps"] // 10,
        # evaluation is on the recipe's own blocks, whatever length is trained on; no more tokens at once than there
        "per_device_eval_batch_size": max(1, tokens // recipe.sequence_length),
        "eval_on_start": True,
        "prediction_loss_only": True,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # the default would log a diverged loss as zero
        "save_strategy": "no",
        "report_to": "none",
    }


def training_arguments(
    recipe: Recipe, learning_rate: float, device: torch.device, folder: Path, checkpoint_every: int | None = None
) -> TrainingArguments:
    """The arguments of a run on one device; `checkpoint_every` so many steps, a checkpoint goes into `folder`."""
    values = {"dataloader_pin_memory": device.type == "cuda", **argument_values(recipe, learning_rate)}
    if checkpoint_every:
        values |= {"save_strategy": "steps", "save_steps": checkpoint_every}
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=device.type == "cpu", disable_tqdm=True, **values)
    arguments._n_gpu = min(arguments.n_gpu, 1)  # with several, DataParallel would multiply the batch
    return arguments


def assemble(
    recipe: Recipe,
    model: PreTrainedModel,
    data: dict[str, Any],
    arguments: TrainingArguments,
    meter: Meter,
    callbacks: list[TrainerCallback],
) -> SeamTrainer:
    """The Trainer for a recipe whose data and model have been prepared."""
    trainer = SeamTrainer(
        techniques=recipe.techniques, meter=meter, model=model, args=arguments, callbacks=callbacks, **data
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
