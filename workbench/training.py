"""`run(recipe)`: fine-tune, measure, and leave a record, whatever happens."""

import math
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerCallback, set_seed

from workbench import corpus, devices, models
from workbench.errors import OutOfMemoryError, UnavailableError
from workbench.locations import runs_folder
from workbench.memory.allocators import allocator_for
from workbench.memory.meter import Meter
from workbench.preparation import Plan, check_machine, check_outputs, prepare
from workbench.recipe import Recipe
from workbench.record import Record, Status, find
from workbench.techniques import REGISTRY, Numerics
from workbench.techniques.base import Arguments
from workbench.trainer import SeamTrainer, assemble, prepare_data, prepare_model, training_arguments

WARM_UP_STEPS = 3
OOM_WORDS = (  # of cuBLAS, the driver, MPS, and the CPU on Linux and Windows, which raise no torch.OutOfMemoryError
    "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "MPS backend out of memory", "can't allocate memory",
    "not enough memory: you tried to allocate",
)  # fmt: skip


def run(
    recipe: Recipe,
    *,
    device: str | None = None,
    reuse: bool = False,
    save: str | None = None,
    sample_tokens: int = 0,
    folder: Path | None = None,
) -> Record:
    """Fine-tune a recipe and measure memory, loss and speed.

    Args:
        device: `"cpu"`, `"cuda"` or `"mps"`; by default the fastest that is there.
        reuse: return the newest `ok` record of the same recipe, text, device and versions, if there is one.
        save: `"merged"` or `"adapter"`, to keep the fine-tuned model in the folder `record.model_path`.
        sample_tokens: continue the beginning of the held-out text by so many tokens, before and after.
        folder: where records go; by default `data/runs`.

    Returns:
        The record, status `ok` or `diverged` (the loss stopped being a finite number; the record says at which step).

    Raises:
        ConfigurationError: something in the recipe cannot be used; nothing was loaded and nothing recorded.
        UnavailableError: this machine cannot run it; recorded as `unavailable`.
        OutOfMemoryError: recorded as `oom`. Other failures are recorded as `failed` or `interrupted` and raised.
    """
    folder = folder or runs_folder()
    chosen = devices.pick(device)
    recipe = replace(recipe, model=models.resolve(recipe.model, chosen.type))
    facts = {"device": devices.describe(chosen), "data_sha256": corpus.load(recipe.corpus).sha256}
    if reuse and save is None and (known := find(recipe, sampled=bool(sample_tokens), folder=folder, **facts)):
        return known
    plan = prepare(recipe, chosen)
    check_outputs(plan, save, sample_tokens)
    record = Record.start(recipe, model=recipe.model, learning_rate=plan.learning_rate, **facts)
    try:
        check_machine(plan)
    except UnavailableError as error:
        replace(record, status=Status.UNAVAILABLE, error=str(error)).save(folder)
        raise
    record.save(folder)
    record = _execute(plan, record, save, sample_tokens, folder)
    record.save(folder)
    if record.status is Status.OOM:
        # raised here, where no handler is active: a chained traceback would keep the run's tensors alive
        exact = ", ".join(name for name, t in REGISTRY.items() if t.numerics is Numerics.EXACT)
        cure = f"Use a smaller effective_batch_size or sequence_length, or a technique with the same loss: {exact}."
        raise OutOfMemoryError(f"{record.label} did not fit into the memory of {record.device}: {record.error} {cure}")
    return record


def _execute(plan: Plan, record: Record, save: str | None, sample_tokens: int, folder: Path) -> Record:
    """The finished record. A failure is recorded, with what was measured until then, and raised; but not an
    out-of-memory, which the record alone tells."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as contexts:
        for technique in plan.recipe.techniques:
            contexts.enter_context(technique.run_context())
        job = _Run(plan, record, Path(scratch))
        try:
            return job.execute(save, sample_tokens, folder)
        except KeyboardInterrupt:
            replace(job.so_far(), status=Status.INTERRUPTED, error="interrupted by the user").save(folder)
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            if isinstance(error, torch.OutOfMemoryError) or any(known in words for known in OOM_WORDS):
                return replace(job.so_far(), status=Status.OOM, error=words.splitlines()[0])
            replace(job.so_far(), status=Status.FAILED, error=words).save(folder)
            raise


def _show_progress() -> bool:
    """In a terminal and in JupyterLab; not where output is collected, as under papermill or in a pipe."""
    return sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ


class _Run:
    """One execution of a plan: load, train, measure, save."""

    def __init__(self, plan: Plan, record: Record, scratch: Path) -> None:
        self.plan, self.record, self.scratch = plan, record, scratch
        self.trainer: SeamTrainer | None = None
        self.meter: Meter | None = None

    def execute(self, save: str | None, sample_tokens: int, folder: Path) -> Record:
        plan, allocator = self.plan, allocator_for(self.plan.device)
        allocator.prepare()
        before = allocator.in_use()
        data = prepare_data(plan.recipe, plan.blocks)
        with models.quiet():
            model = self._load()
            text_before = self._sample(model, sample_tokens)
            with Meter(model, before_bytes=before) as meter:
                self.meter = meter
                watch = _Watch(meter, plan)
                arguments = training_arguments(plan.recipe, plan.learning_rate, plan.device, self.scratch)
                trainer = self.trainer = assemble(plan.recipe, model, data, arguments, meter, [watch])
                set_seed(plan.recipe.seed)
                trainer.train()
                held_out_loss = trainer.evaluate()["eval_loss"] if watch.finite else math.nan
            self._note_actual(trainer, watch, model)
            text_after = self._sample(model, sample_tokens)
            model_path = self._keep(model, save, folder)
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

    def so_far(self) -> Record:
        """The record with what the Trainer and the meter have seen until now."""
        if self.trainer is None or self.meter is None:
            return self.record
        history = self.trainer.state.log_history
        return replace(
            self.record,
            **_memory(self.meter),
            micro_batch_size=self.trainer.micro_batch_size,
            gradient_accumulation_steps=self.trainer.args.gradient_accumulation_steps,
            steps_done=self.trainer.state.global_step,
            tokens_seen=self.trainer.tokens_seen,
            losses=[entry["loss"] for entry in history if math.isfinite(entry.get("loss", math.nan))],
            held_out_loss_before=next((entry["eval_loss"] for entry in history if "eval_loss" in entry), None),
        )

    def _load(self) -> PreTrainedModel:
        plan = self.plan
        arguments: Arguments = {}
        for technique in plan.recipe.techniques:
            arguments = technique.model_arguments(arguments)
        model = models.load(plan.source, plan.config, **arguments)
        set_seed(plan.recipe.seed)
        model = prepare_model(plan.recipe, model)
        model.to(plan.device)  # type: ignore[arg-type]  # the stub takes no device
        return model

    def _sample(self, model: PreTrainedModel, tokens: int) -> str:
        prompt = corpus.prompt(self.plan.text)
        return models.generate(model, self.plan.tokenizer, prompt, tokens) if tokens else ""

    def _note_actual(self, trainer: SeamTrainer, watch: "_Watch", model: PreTrainedModel) -> None:
        autocast = trainer.accelerator.mixed_precision
        self.record = replace(
            self.record,
            dtype=f"autocast {autocast}" if autocast != "no" else str(model.dtype).removeprefix("torch."),
            parameters=sum(p.numel() for p in model.parameters()),
            trainable_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            skipped_steps=watch.skipped_steps,
            **watch.speed(trainer.tokens_seen / max(trainer.state.global_step, 1)),
        )

    def _keep(self, model: PreTrainedModel, form: str | None, folder: Path) -> str:
        if form is None:
            return ""
        path = folder / self.record.id / "model"
        models.save(model, self.plan.tokenizer, self.plan.source, form, path)
        return str(path)


def _memory(meter: Meter) -> dict[str, Any]:
    """The meter's report as fields of a record; none if the run ended before the first phase did."""
    try:
        report = meter.report()
    except ValueError:
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
    """Looks on at every step: attributes the warm-up steps, times the others, stops at a loss that is not finite."""

    def __init__(self, meter: Meter, plan: Plan) -> None:
        self.meter, self.device = meter, plan.device
        self.finite, self.skipped_steps = True, 0
        self.step_ends: list[float] = []
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
        self.meter.attribute(state.global_step - self.skipped_steps < WARM_UP_STEPS)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.skipped_steps += bool(getattr(optimizer, "step_was_skipped", False))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter.enter_phase(None)
        self.meter.attribute(False)
        if self.device.type != "cpu" and state.global_step in (WARM_UP_STEPS, state.max_steps):
            torch.accelerator.synchronize()
        self.step_ends.append(time.perf_counter())
        self.bar.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}")
            if not math.isfinite(logs["loss"]):
                self.finite, control.should_training_stop = False, True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.bar.close()

    def speed(self, step_tokens: float) -> dict[str, Any]:
        """Over the steps after the warm-up; unknown (None) if there are none."""
        timed = len(self.step_ends) - WARM_UP_STEPS
        if timed < 1:
            return {"timed_steps": 0}
        step_time = (self.step_ends[-1] - self.step_ends[WARM_UP_STEPS - 1]) / timed
        return {"timed_steps": timed, "step_time_s": step_time, "tokens_per_s": step_tokens / step_time}
