"""`run(recipe)`: fine-tune, measure, and leave a record, whatever happens.

First every check (`workbench.run.job`), then one execution: load, train, measure, save.
"""

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerCallback, set_seed
from transformers.initialization import no_init_weights

from workbench.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.gpus.emulator.call import also_on_emulated_devices
from workbench.gpus.emulator.padding import announce_padding
from workbench.measure.allocators import allocator_for, capped, total_bytes
from workbench.measure.emulated import NOT_COMPUTED, emulated
from workbench.measure.garbage import clear_frames, freeze_living_objects
from workbench.measure.meter import Meter
from workbench.measure.out_of_memory import Refusal, read
from workbench.models.family import family_of
from workbench.models.generate import generate
from workbench.models.load import count_parameters, load_model, quiet, save_model, storage_type
from workbench.paths import FULL, beside, check_writable, runs_folder, unwritten
from workbench.recipe import Recipe
from workbench.records import checkpoints, store
from workbench.records.record import Record, Status, find_equal
from workbench.run import trainer as seams
from workbench.run.job import Job, check_resuming, check_saving, memory_cap_bytes, prepare, why_not_here
from workbench.run.stopwatch import WARM_UP_STEPS, Stopwatch
from workbench.run.world import World, refuse_several_ranks
from workbench.techniques.base import Call
from workbench.texts import corpus

WRITE_EVERY_S = 2.0  # what a killed run has measured until then
OOM_WORDS: list[str] = beside(__file__, "out_of_memory.toml")["words"]

_going_on: dict[int, str] = {}  # the run of this process, by its number: a fork has another

Observer = Callable[[Callable[[], Record]], None]


@dataclass(frozen=True)
class Options:
    """What `run` was asked for beside the recipe."""

    folder: Path | None
    save: str | None = None
    sample_tokens: int = 0
    checkpoint_every: int | None = None
    observe: Observer | None = None
    callbacks: Sequence[TrainerCallback] = ()


@also_on_emulated_devices
def run(
    recipe: Recipe,
    *,
    device: str | None = None,
    reuse: bool = False,
    save: str | None = None,
    sample_tokens: int = 0,
    checkpoint_every: int | None = None,
    resume: bool = False,
    memory_cap: str | int | None = None,
    longest_first: bool = False,
    observe: Observer | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    folder: Path | None = None,
    execution: "type[Execution] | None" = None,
) -> Record:
    """Fine-tune a recipe and measure memory, loss and speed.

    Args:
        device: `"cpu"`, `"cuda"` or `"mps"`; by default the fastest that is there. `"emulated:t4"`: a GPU in software,
            of `workbench.gpus.catalogue`; such a record has memory, and neither loss nor speed.
        reuse: return the newest `ok` record of the same recipe, text, device and versions, if there is one.
        save: `"merged"` or `"adapter"`, to keep the fine-tuned model in the folder `record.model_path`.
        sample_tokens: continue the beginning of the held-out text by so many tokens, before and after.
        checkpoint_every: write a checkpoint every so many steps; they are removed when the run has ended well.
        resume: go on with the newest unfinished run of this recipe from its last whole checkpoint. On a CPU the
            losses are those of a run that was never interrupted. With nothing to resume it begins at the beginning.
        memory_cap: pretend that the device has no more than this, `"8GiB"` or a number of bytes. On CUDA the allocator
            keeps to it, at no cost. Elsewhere the tracker watches the bytes of tensors in every step, which takes
            time: such a run records no speed.
        longest_first: let every batch of the first three steps begin with the longest example, so that a run that
            cannot fit fails at once: compare such a run's memory, not its loss. Where all examples are equally long,
            or a stream, it changes nothing, and the record warns of that.
        observe: called after every step with a function that returns the record so far; a KeyboardInterrupt raised
            in it ends the run, as Ctrl-C does.
        callbacks: for the Trainer, beside those of the recipe; the record has their names among these, and such a run
            is not taken for another (`reuse`).
        folder: where records go; by default `data/runs`.
        execution: what executes it; by default this process alone (`workbench.ranks` has one for several).

    Returns:
        The record, status `ok` or `diverged` (the loss stopped being a finite number; the record says at which step).

    Raises:
        ConfigurationError: something in the recipe cannot be used, the run to resume is of another recipe or text, or
            torchrun started this process; nothing was loaded and nothing recorded.
        UnavailableError: this machine cannot run it; recorded as `unavailable`. Or a program that it reports to is not
            installed; nothing was recorded.
        OutOfMemoryError: recorded as `oom`; it says where, and `diagnose(record)` what to change.
            Other failures are recorded as `failed` or `interrupted` and raised.
    """
    execution = execution or Execution
    execution.check()
    with only_run(recipe):
        if not reuse:
            check_writable(folder or runs_folder())
        store.mark_killed(folder)
        world = execution.world(device)
        cap, total = memory_cap_bytes(memory_cap, world.device), total_bytes(world.device)
        check_saving(recipe, save)
        check_resuming(recipe, checkpoint_every, resume, longest_first)
        lacking = why_not_here(recipe, world.device)
        seams.check_reports(seams.training_arguments(recipe, 1.0, world.device, Path(), reports=True))
        made = [*seams.make_callbacks(recipe), *callbacks]
        given = [f"{type(each).__module__}:{type(each).__name__}" for each in callbacks]
        recipe = replace(recipe, callbacks=(*recipe.callbacks, *given))
        job = prepare(recipe, world.device, sample_tokens)
        record = Record.start(
            job.recipe, model=job.recipe.model, data_sha256=job.text.sha256, learning_rate=job.learning_rate,
            memory_cap_bytes=cap, device_bytes=total, longest_first=longest_first, **asdict(world),
        )  # fmt: skip
        reuse = reuse and save is None and not callbacks
        if reuse and (known := find_equal(record, sampled=bool(sample_tokens), folder=folder)):
            return known
        if lacking:
            execution.end(replace(record, status=Status.UNAVAILABLE, error=lacking), folder, None)
            raise UnavailableError(lacking)
        record = execution.begin(record, folder, resume)
        options = Options(folder, save, sample_tokens, checkpoint_every, observe, made)
        record, error = execute(execution(job, record, options))
        record = execution.end(record, folder, error)
        # raised here, where no handler is active: a chained traceback would keep the run's tensors alive
        if record.status is Status.OOM:
            allocator_for(world.device).prepare()  # collects what the run's reference cycles still hold
            raise store.out_of_memory_error(record)
        if error is not None:
            raise error
        return record


@contextmanager
def only_run(recipe: Recipe) -> Iterator[None]:
    """PyTorch's modes, Accelerate's state and the libraries' settings are the whole process's: two runs spoil both.

    Raises:
        ConfigurationError: another run goes on in this process, in another thread or around this one.
    """
    mine = f"{recipe.label} on {recipe.model}, in the thread {threading.current_thread().name}"
    try:
        if (other := _going_on.setdefault(os.getpid(), mine)) is not mine:
            raise ConfigurationError(
                f"run: another run goes on in this process ({other}), and two would spoil each other. Wait for it, "
                "stop it with Ctrl-C or the playground's Stop, or start this one in a process of its own."
            )
        yield
    finally:
        if _going_on.get(os.getpid()) is mine:
            del _going_on[os.getpid()]


def execute(execution: "Execution") -> tuple[Record, BaseException | None]:
    """The finished record, with what was measured until then if the run failed; and what ended it, if
    anything did but a want of memory, which the record tells."""
    facts: dict[str, Any]
    failure: BaseException
    try:
        with ExitStack() as contexts:
            for technique in execution.job.recipe.techniques:
                contexts.enter_context(technique.run_context())
            contexts.enter_context(capped(execution.job.device, execution.record.memory_cap_bytes))
            return execution.complete(), None
    except Exception as error:
        failure, words = error, f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in FULL:
            place = Path(str(error.filename or execution.options.folder or runs_folder()))
            failure = WorkbenchError(words := f"run: {unwritten(place, error)}")
        facts = {"status": Status.FAILED, "error": words}
        if isinstance(error, torch.OutOfMemoryError) or any(known in words for known in OOM_WORDS):
            facts = {"status": Status.OOM, "error": words.splitlines()[0], **execution.refusal(words)}
    except BaseException as error:  # Ctrl-C, sys.exit, a generator that is closed
        failure, facts = error, {"status": Status.INTERRUPTED, "error": "interrupted by the user"}
    record = replace(execution.so_far(), **facts)
    execution.trainer = execution.meter = None  # IPython keeps the traceback of a failed cell, whose frames keep these
    clear_frames(failure)
    return record, None if record.status is Status.OOM else failure


class Execution:
    """One execution of a job: load, train, measure, save."""

    trainer_kind: type[seams.SeamTrainer] = seams.SeamTrainer
    meter_kind: type[Meter] = Meter
    check, begin, world = staticmethod(refuse_several_ranks), staticmethod(store.begin), World.find

    @staticmethod
    def end(record: Record, folder: Path | None, error: BaseException | None) -> Record:
        return store.end(record, folder)

    def __init__(self, job: Job, record: Record, options: Options) -> None:
        self.job, self.record, self.options = job, record, options
        self.emulated = emulated() if job.device.type == "cuda" else ""  # this process may be told to use its CPU
        self.trainer: seams.SeamTrainer | None = None
        self.meter: Meter | None = None

    def complete(self) -> Record:
        """The record of a run that came to its end."""
        job, allocator = self.job, allocator_for(self.job.device)
        allocator.prepare()
        before = allocator.in_use()
        with freeze_living_objects(), quiet():
            data = seams.prepare_data(job.recipe, job.blocks)
            model = self.placed(load_for(job, self.emulated))
            text_before = self._sample(model)
            with self.meter_kind(model, before_bytes=before, cap_bytes=self.record.memory_cap_bytes) as meter:
                self.meter = meter
                watch = _Watch(meter, job, self)
                every, own, told = self.options.checkpoint_every, self._checkpoints.parent, not self.emulated
                arguments = seams.training_arguments(job.recipe, job.learning_rate, job.device, own, every, told)
                callbacks = [watch, *self.options.callbacks]
                trainer = self.trainer = seams.assemble(
                    job.recipe, model, data, arguments, meter, callbacks, self.trainer_kind
                )
                if self.record.longest_first:
                    trainer.put_longest_first()
                if self.emulated:
                    announce_padding(trainer)
                set_seed(job.recipe.seed)
                trainer.resume(self._checkpoint())
                held_out_loss = trainer.evaluate()["eval_loss"] if watch.finite else math.nan
                trainer.end_reports()
            self._note_actual(trainer, watch, model)
            text_after = self._sample(model)
            model_path = self._keep(model)
        record = self.so_far()
        diverged = why_diverged(record, held_out_loss, model.config.vocab_size)
        return replace(
            record, status=Status.DIVERGED if diverged else Status.OK, error=diverged,
            held_out_loss=None if self.emulated or not math.isfinite(held_out_loss) else held_out_loss,
            text_before=text_before, text_after=text_after, model_path=model_path,
        )  # fmt: skip

    def placed(self, model: PreTrainedModel) -> PreTrainedModel:
        model.to(self.job.device)  # type: ignore[arg-type]  # the stub takes no device
        return model

    def write(self) -> None:
        """What has been measured until now: a kill leaves that."""
        with suppress(OSError):
            self.so_far().save(self.options.folder)

    def refusal(self, message: str) -> dict[str, Any]:
        """What was refused, from the cap's keeper or, where the device refused, from its own words."""
        watched = self.meter.tracker.refusal if self.meter else Refusal()
        refused = read(message) if watched.requested_bytes is None else watched
        return {
            "failed_operation": self.meter.tracker.failed_operation if self.meter else "",
            "requested_bytes": refused.requested_bytes, "allocated_at_failure_bytes": refused.allocated_bytes,
            "reserved_at_failure_bytes": refused.reserved_bytes,
        }  # fmt: skip

    @property
    def _checkpoints(self) -> Path:
        return store.checkpoint_folder(self.record, self.options.folder)

    def _checkpoint(self) -> Path | None:
        """Where to go on, noted in the record; None at the beginning of a run that is new."""
        if (found := checkpoints.newest_checkpoint(self._checkpoints)) is not None:
            step = int(found.name.rpartition("-")[2])
            self.record = replace(self.record, resumed_at_steps=[*self.record.resumed_at_steps, step])
        return found

    def so_far(self) -> Record:
        """The record with what the Trainer and the meter have seen until now."""
        if self.trainer is None or self.meter is None:
            return self.record
        history = [] if self.emulated else self.trainer.state.log_history
        remarks = [
            *([NOT_COMPUTED] if self.emulated else []),
            *(f"corpus: {r}" for r in (*self.job.text.remarks, *self.job.blocks.remarks)),
        ]
        return replace(
            self.record,
            **_memory(self.meter, self.record.peak_allocated_bytes or 0),
            warnings=list(dict.fromkeys([*self.record.warnings, *remarks, *self.trainer.warnings])),
            micro_batch_size=self.trainer.micro_batch_size,
            gradient_accumulation_steps=self.trainer.args.gradient_accumulation_steps,
            steps_done=self.trainer.state.global_step, tokens_seen=self.trainer.tokens_seen,
            padding_tokens=None if self.emulated else self.trainer.padding_tokens,
            losses=_finite(history, "loss"), held_out_loss_before=next(iter(_finite(history, "eval_loss")), None),
        )  # fmt: skip

    def _sample(self, model: PreTrainedModel) -> str:
        prompt, tokens = corpus.prompt(self.job.text), self.options.sample_tokens
        return generate(model, self.job.tokenizer, prompt, tokens) if tokens and not self.emulated else ""

    def _note_actual(self, trainer: seams.SeamTrainer, watch: "_Watch", model: PreTrainedModel) -> None:
        autocast = trainer.accelerator.mixed_precision
        parameters, trainable = count_parameters(model)
        self.record = replace(
            self.record,
            dtype=f"autocast {autocast}" if autocast != "no" else storage_type(model),
            parameters=parameters, trainable_parameters=trainable, skipped_steps=watch.skipped_steps, **watch.speed(),
        )  # fmt: skip

    def _keep(self, model: PreTrainedModel) -> str:
        """The folder of the fine-tuned model. If the disk refuses, the measurements are kept all the same."""
        if self.options.save is None:
            return ""
        path = self._checkpoints.with_name("model")
        try:
            save_model(model, self.job.tokenizer, self.job.source, self.options.save, path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(path, ignore_errors=True)
            told = f"the model was not saved: {unwritten(path.parent, error)}"
            self.record = replace(self.record, warnings=[*self.record.warnings, told])
            return ""
        return str(path)


def load_for(job: Job, emulated: str = "") -> PreTrainedModel:
    """The job's model after every technique's model seam, not on its device yet; for an emulated one without values."""
    arguments = seams.model_arguments(job.recipe, family_of(job.config))
    made = {name: value() if isinstance(value, Call) else value for name, value in arguments.items()}
    with no_init_weights() if emulated else nullcontext():  # nobody reads the numbers
        model = load_model(job.source, job.config, **made)
    if emulated:
        model.tie_weights()  # which would have been done with the drawing
    set_seed(job.recipe.seed)
    return seams.prepare_model(job.recipe, model)


def _finite(history: list[dict[str, float]], name: str) -> list[float]:
    return [entry[name] for entry in history if math.isfinite(entry.get(name, math.nan))]


def why_diverged(record: Record, held_out_loss: float, vocabulary: int) -> str:
    """What went wrong with the loss, and the cure; empty if nothing did.

    Who knows nothing and takes all V tokens for equally likely has the loss ln V. A model with new weights begins
    there, within one percent. One that ends above it, and above where it began, has lost what it knew.
    """
    before, blind = record.held_out_loss_before, math.log(vocabulary)
    what = f"the loss was not a finite number after {len(record.losses)} good steps"
    if math.isfinite(held_out_loss):
        if before is None or held_out_loss <= 1.01 * max(before, blind):
            return ""
        what = f"the held-out loss rose from {before:.3f} to {held_out_loss:,.3f}; blind guessing has {blind:.3f}"
    return f"{what}. Lower the learning rate, which was {record.learning_rate:g}."


def _memory(meter: Meter, earlier_peak_bytes: int) -> dict[str, Any]:
    """The meter's report as fields of a record; none if the run ended before the first phase did, or if the part of
    the run before an interruption peaked higher."""
    with suppress(ValueError):
        if (report := meter.report()).peak_allocated_bytes >= earlier_peak_bytes:
            return vars(report)
    return {}


class _Watch(TrainerCallback):
    """Looks on at every step: attributes the warm-up steps, times the others, stops at a loss that is not finite.

    A cap that the meter enforces keeps the tracker on in every step; then none is timed.
    """

    def __init__(self, meter: Meter, job: Job, execution: "Execution") -> None:
        self.meter, self.device, self.execution = meter, job.device, execution
        self.finite, self.skipped_steps, self.written_s = True, 0, time.monotonic()
        self.stopwatch = Stopwatch()
        # in a terminal and in JupyterLab; not where output is collected, as under papermill or in a pipe
        hidden = not (sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ)
        steps = job.recipe.training_arguments()["max_steps"]
        self.bar = tqdm(total=steps, desc=job.recipe.label, unit="step", disable=hidden, leave=False)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.meter.watch(optimizer)  # as it is now: a library may have put another in its place
        # a step that loss scaling skipped has not made optimizer states yet
        warming_up = len(self.stopwatch.laps) - self.skipped_steps < WARM_UP_STEPS
        self.meter.attribute(warming_up or self.meter.enforces_cap)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.skipped_steps += bool(getattr(optimizer, "step_was_skipped", False))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter.enter_phase(None)
        self.meter.attribute(False)
        last = state.global_step == state.max_steps
        control.should_save &= not last  # resumed there, the Trainer would take one step too many
        if self.device.type != "cpu" and (last or len(self.stopwatch.laps) == WARM_UP_STEPS - 1):
            torch.accelerator.synchronize()
        self.stopwatch.lap(getattr(self.execution.trainer, "tokens_seen", 0))
        self.bar.update()
        if self.execution.options.observe is not None:
            self.execution.options.observe(self.execution.so_far)
        if time.monotonic() - self.written_s > WRITE_EVERY_S:
            self.on_save()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.stopwatch.pause()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}")
            if not math.isfinite(logs["loss"]):
                self.finite, control.should_training_stop = False, True

    def on_save(self, *_: Any, **__: Any) -> None:
        self.execution.write()  # now and then, and beside each checkpoint
        self.written_s = time.monotonic()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.bar.close()

    def speed(self) -> dict[str, Any]:
        """Over the steps after the warm-up, padding not counted; unknown (None) if there are none, or if the tracker
        slowed them."""
        known = not (self.meter.enforces_cap or self.execution.emulated)
        return self.stopwatch.speed() if known else {"timed_steps": 0}
