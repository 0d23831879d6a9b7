"""One execution of a plan: load, train, measure, save; and the record of it, whatever happens."""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed

from workbench.measure.allocators import allocator_for, capped
from workbench.measure.garbage import freeze_living_objects
from workbench.measure.leaks import clear_frames
from workbench.measure.meter import Meter
from workbench.measure.out_of_memory import Refusal, read
from workbench.models.family import family_of
from workbench.models.generate import generate
from workbench.models.load import count_parameters, load_model, quiet, save_model, storage_type
from workbench.records import checkpoints
from workbench.records.record import Record, Status
from workbench.records.store import begin, checkpoint_folder, end
from workbench.run.checks import Prepared
from workbench.run.trainer import (
    SeamTrainer,
    assemble,
    model_arguments,
    prepare_data,
    prepare_model,
    training_arguments,
)
from workbench.techniques.base import Call
from workbench.texts import corpus

WARM_UP_STEPS = 3
OOM_WORDS = (  # of cuBLAS, the driver, MPS, and the CPU on Linux and Windows, which raise no torch.OutOfMemoryError
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "MPS backend out of memory", "can't allocate memory",
    "not enough memory: you tried to allocate",
)  # fmt: skip

Observer = Callable[[Callable[[], Record]], None]


@dataclass(frozen=True)
class Options:
    """What `run` was asked for beside the recipe."""

    folder: Path
    save: str | None = None
    sample_tokens: int = 0
    checkpoint_every: int | None = None
    observe: Observer | None = None


def execute(plan: Prepared, record: Record, options: Options) -> Record:
    """The finished record. A failure is recorded, with what was measured until then, and raised; but not an
    out-of-memory, which the record alone tells."""
    job = _Run(plan, begin(record, options.folder), options)
    try:
        with ExitStack() as contexts:
            for technique in job.plan.recipe.techniques:
                contexts.enter_context(technique.run_context())
            contexts.enter_context(capped(job.plan.device, job.record.memory_cap_bytes))
            record = job.execute()
        return job.end(record)
    except (KeyboardInterrupt, SystemExit) as error:
        job.end(replace(job.so_far(), status=Status.INTERRUPTED, error="interrupted by the user"))
        job.let_go(error)
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError) or any(known in words for known in OOM_WORDS):
            facts = {"status": Status.OOM, "error": words.splitlines()[0], **job.refusal(words)}
            record = job.end(replace(job.so_far(), **facts))
            job.let_go(error)
            return record
        job.end(replace(job.so_far(), status=Status.FAILED, error=words))
        job.let_go(error)
        raise


def _show_progress() -> bool:
    """In a terminal and in JupyterLab; not where output is collected, as under papermill or in a pipe."""
    return sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ


class _Run:
    """One execution of a plan: load, train, measure, save."""

    def __init__(self, plan: Prepared, record: Record, options: Options) -> None:
        self.plan, self.record, self.options = plan, record, options
        self.trainer: SeamTrainer | None = None
        self.meter: Meter | None = None

    def execute(self) -> Record:
        plan, allocator = self.plan, allocator_for(self.plan.device)
        allocator.prepare()
        before = allocator.in_use()
        with freeze_living_objects(), quiet():
            data = prepare_data(plan.recipe, plan.blocks)
            model = self._load()
            text_before = self._sample(model)
            with Meter(model, before_bytes=before, cap_bytes=self.record.memory_cap_bytes) as meter:
                self.meter = meter
                watch = _Watch(meter, plan, self)
                trainer = self.trainer = assemble(plan.recipe, model, data, self._arguments(), meter, [watch])
                if self.record.longest_first:
                    trainer.put_longest_first()
                set_seed(plan.recipe.seed)
                trainer.resume(self._checkpoint())
                held_out_loss = trainer.evaluate()["eval_loss"] if watch.finite else math.nan
            self._note_actual(trainer, watch, model)
            text_after = self._sample(model)
            model_path = self._keep(model)
        finite = math.isfinite(held_out_loss)
        return replace(
            self.so_far(),
            status=Status.OK if finite else Status.DIVERGED,
            error="" if finite else f"the loss was not a finite number after {len(self.so_far().losses)} good steps",
            held_out_loss=held_out_loss if finite else None,
            text_before=text_before,
            text_after=text_after,
            model_path=model_path,
        )

    def end(self, record: Record) -> Record:
        """Write the record; the checkpoints of a run that ended well are of no use any more."""
        if record.status is Status.OK:
            shutil.rmtree(self._checkpoints, ignore_errors=True)
        for folder in (self._checkpoints, self._checkpoints.parent):
            with suppress(OSError):
                folder.rmdir()  # the Trainer makes it in any case; only if nothing is in it
        return end(record, self.options.folder)

    def refusal(self, message: str) -> dict[str, Any]:
        """What was refused, from the cap's keeper or, where the device refused, from its own words."""
        watched = self.meter.tracker.refusal if self.meter else Refusal()
        refused = read(message) if watched.requested_bytes is None else watched
        return {
            "failed_operation": self.meter.tracker.failed_operation if self.meter else "",
            "requested_bytes": refused.requested_bytes,
            "allocated_at_failure_bytes": refused.allocated_bytes,
            "reserved_at_failure_bytes": refused.reserved_bytes,
        }

    def let_go(self, error: BaseException) -> None:
        """IPython keeps the traceback of a failed cell, and its frames would keep the model and the optimizer."""
        self.trainer = self.meter = None
        clear_frames(error)

    def keep_progress(self) -> None:
        """Beside each checkpoint, what was measured until then: a kill leaves that."""
        with suppress(OSError):
            self.so_far().save(self.options.folder)

    @property
    def _checkpoints(self) -> Path:
        return checkpoint_folder(self.record, self.options.folder)

    def _arguments(self) -> TrainingArguments:
        plan = self.plan
        return training_arguments(
            plan.recipe, plan.learning_rate, plan.device, self._checkpoints, self.options.checkpoint_every
        )

    def _checkpoint(self) -> Path | None:
        """Where to go on, noted in the record; None at the beginning of a run that is new."""
        found = checkpoints.newest_checkpoint(self._checkpoints)
        if found is not None:
            step = int(found.name.rpartition("-")[2])
            self.record = replace(self.record, resumed_at_steps=[*self.record.resumed_at_steps, step])
        return found

    def so_far(self) -> Record:
        """The record with what the Trainer and the meter have seen until now."""
        if self.trainer is None or self.meter is None:
            return self.record
        history = self.trainer.state.log_history
        return replace(
            self.record,
            **_memory(self.meter, self.record.peak_allocated_bytes or 0),
            warnings=[*(f"corpus: {remark}" for remark in self.plan.text.remarks), *self.trainer.warnings],
            micro_batch_size=self.trainer.micro_batch_size,
            gradient_accumulation_steps=self.trainer.args.gradient_accumulation_steps,
            steps_done=self.trainer.state.global_step,
            tokens_seen=self.trainer.tokens_seen,
            padding_tokens=self.trainer.padding_tokens,
            losses=[entry["loss"] for entry in history if math.isfinite(entry.get("loss", math.nan))],
            held_out_loss_before=next((entry["eval_loss"] for entry in history if "eval_loss" in entry), None),
        )

    def tokens_seen(self) -> int:
        return self.trainer.tokens_seen if self.trainer else 0

    def _load(self) -> PreTrainedModel:
        plan = self.plan
        arguments = model_arguments(plan.recipe, family_of(plan.config))
        made = {name: value() if isinstance(value, Call) else value for name, value in arguments.items()}
        model = load_model(plan.source, plan.config, **made)
        set_seed(plan.recipe.seed)
        model = prepare_model(plan.recipe, model)
        model.to(plan.device)  # type: ignore[arg-type]  # the stub takes no device
        return model

    def _sample(self, model: PreTrainedModel) -> str:
        prompt, tokens = corpus.prompt(self.plan.text), self.options.sample_tokens
        return generate(model, self.plan.tokenizer, prompt, tokens) if tokens else ""

    def _note_actual(self, trainer: SeamTrainer, watch: "_Watch", model: PreTrainedModel) -> None:
        autocast = trainer.accelerator.mixed_precision
        parameters, trainable = count_parameters(model)
        self.record = replace(
            self.record,
            dtype=f"autocast {autocast}" if autocast != "no" else storage_type(model),
            parameters=parameters,
            trainable_parameters=trainable,
            skipped_steps=watch.skipped_steps,
            **watch.speed(),
        )

    def _keep(self, model: PreTrainedModel) -> str:
        """The folder of the fine-tuned model. If the disk refuses, the measurements are kept all the same."""
        if self.options.save is None:
            return ""
        path = self.options.folder / self.record.id / "model"
        try:
            save_model(model, self.plan.tokenizer, self.plan.source, self.options.save, path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(path, ignore_errors=True)
            self.trainer.warnings.append(f"the model was not saved: {error}")  # type: ignore[union-attr]
            return ""
        return str(path)


def _memory(meter: Meter, earlier_peak_bytes: int) -> dict[str, Any]:
    """The meter's report as fields of a record; none if the run ended before the first phase did, or if the part of
    the run before an interruption peaked higher."""
    try:
        report = meter.report()
    except ValueError:
        return {}
    if report.peak_allocated_bytes < earlier_peak_bytes:
        return {}
    return {
        "memory_source": report.source,
        "before_bytes": report.before_bytes,
        "peak_allocated_bytes": report.peak_allocated_bytes,
        "peak_reserved_bytes": report.peak_reserved_bytes,
        "peak_phase": str(report.peak_phase),
        "by_category": {str(key): value for key, value in report.by_category.items()},
        "maximum_by_category": {str(key): value for key, value in report.maximum_by_category.items()},
        "by_phase": {str(key): value for key, value in report.by_phase.items()},
        "peak_host_bytes": report.peak_host_bytes or None,
        "peak_disk_bytes": report.peak_disk_bytes or None,
        "moved_bytes": report.moved_bytes or None,
    }


class _Watch(TrainerCallback):
    """Looks on at every step: attributes the warm-up steps, times the others, stops at a loss that is not finite.

    A cap that the meter enforces keeps the tracker on in every step; then none is timed.
    """

    def __init__(self, meter: Meter, plan: Prepared, job: "_Run") -> None:
        self.meter, self.device, self.job = meter, plan.device, job
        self.finite, self.skipped_steps = True, 0
        self.step_ends: list[tuple[float, int]] = []  # time, and tokens seen until then
        self.bar = tqdm(
            total=plan.recipe.training_arguments()["max_steps"],
            desc=plan.recipe.label,
            unit="step",
            disable=not _show_progress(),
            leave=False,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.meter.watch(optimizer)  # as it is now: a library may have put another in its place
        # a step that loss scaling skipped has not made optimizer states yet
        warming_up = len(self.step_ends) - self.skipped_steps < WARM_UP_STEPS
        self.meter.attribute(warming_up or self.meter.enforces_cap)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.skipped_steps += bool(getattr(optimizer, "step_was_skipped", False))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter.enter_phase(None)
        self.meter.attribute(False)
        last = state.global_step == state.max_steps
        control.should_save &= not last  # resumed there, the Trainer would take one step too many
        if self.device.type != "cpu" and (last or len(self.step_ends) == WARM_UP_STEPS - 1):
            torch.accelerator.synchronize()
        self.step_ends.append((time.perf_counter(), self.job.tokens_seen()))
        self.bar.update()
        if self.job.options.observe is not None:
            self.job.options.observe(self.job.so_far)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}")
            if not math.isfinite(logs["loss"]):
                self.finite, control.should_training_stop = False, True

    def on_save(self, *_: Any, **__: Any) -> None:
        self.job.keep_progress()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.bar.close()

    def speed(self) -> dict[str, Any]:
        """Over the steps after the warm-up, padding not counted; unknown (None) if there are none, or if the tracker
        slowed them."""
        timed = len(self.step_ends) - WARM_UP_STEPS
        if timed < 1 or self.meter.enforces_cap:
            return {"timed_steps": 0}
        (start, before), (end, after) = self.step_ends[WARM_UP_STEPS - 1], self.step_ends[-1]
        return {
            "timed_steps": timed,
            "step_time_s": (end - start) / timed,
            "tokens_per_s": (after - before) / (end - start),
        }
