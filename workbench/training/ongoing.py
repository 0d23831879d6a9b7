"""A run while it goes on: between its job, which says what to do, and its record, which says what came of it.

`workbench.training.execute` tells the story of a run in terms of these methods. Several ranks load, place and save a
model in another way, and keep one record: `ranks.run` has a subclass for them.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, set_seed
from transformers.initialization import no_init_weights

from workbench.base.errors import ConfigurationError
from workbench.base.paths import disk_refusal
from workbench.gpus.emulator.padding import announce_padding
from workbench.journal import checkpoints, store
from workbench.journal.record import Record
from workbench.measure.meter import Meter
from workbench.measure.out_of_memory import Refusal, numbers_in
from workbench.models import generate
from workbench.models.load import count_parameters, save_model, storage_type
from workbench.training.job import Job
from workbench.training.trainer import MeteredTrainer


class DeviceBehaviour:
    """The behaviour of a device that computes: weights have values, and a run can measure everything.

    Attributes:
        unmeasured: fields of a record that a run on this device cannot measure, with their empty values.
    """

    unmeasured: Mapping[str, Any] = {}

    def load(self, job: Job) -> PreTrainedModel:
        """Load the job's model on the host, and do on it what every technique does to a model."""
        model = self.load_weights(job)
        set_seed(job.recipe.seed)  # techniques draw the weights that they add
        prepared: PreTrainedModel = job.recipe.prepare_model(model)
        return prepared

    def load_weights(self, job: Job) -> PreTrainedModel:
        """Load the job's model on the host, as it comes."""
        model: PreTrainedModel = job.recipe.load_from(job.material.source, job.material.config)
        return model

    def on_trainer_built(self, trainer: MeteredTrainer) -> None:
        """Prepare the device for what this Trainer will do."""


class EmulatedBehaviour(DeviceBehaviour):
    """The behaviour of an emulated GPU, which allocates as the real one would and computes nothing: a run measures its
    memory, and has no loss, no text and no speed."""

    unmeasured: Mapping[str, Any] = {
        "losses": [],
        "held_out_loss_before": None,
        "held_out_loss": None,
        "padding_tokens": None,
        "timed_steps": 0,
        "step_time_s": None,
        "tokens_per_s": None,
        "step_processor_s": None,
        "contended_share": None,
    }

    def load_weights(self, job: Job) -> PreTrainedModel:
        with no_init_weights():  # nobody reads the numbers, so none are drawn
            model = super().load_weights(job)
        model.tie_weights()  # transformers ties weights where it draws them, which was left out
        return model

    def on_trainer_built(self, trainer: MeteredTrainer) -> None:
        announce_padding(trainer)


class OngoingRun:
    """A run while it goes on, in one process, alone with its device.

    Attributes:
        job: what to do, as the gate has prepared it.
        record: what is known so far.
        behaviour: how a model is loaded for the job's device, and what it cannot measure.
        error: what ended the run before its end, if anything did.
        trainer, meter: those of the training; None before it begins.
    """

    trainer_kind: Callable[..., MeteredTrainer] = MeteredTrainer
    meter_kind: type[Meter] = Meter

    def __init__(self, job: Job) -> None:
        self.job = job
        self.record = job.record
        self.behaviour = DeviceBehaviour()
        if job.device.emulated_gpu:
            self.behaviour = EmulatedBehaviour()
        self.error: BaseException | None = None
        self.trainer: MeteredTrainer | None = None
        self.meter: Meter | None = None

    # ---- the record ----

    def begin(self) -> None:
        """Write the record as `running`; to resume, go on with that of the unfinished run.

        Raises:
            ConfigurationError: it cannot be written, or the run not be resumed.
        """
        self.record = store.begin(self.record, self.job.folder, self.job.resume)

    def note(self, **facts: Any) -> None:
        """Set fields of the record, those that the device cannot measure to their empty values."""
        unmeasured = self.behaviour.unmeasured
        self.record = replace(self.record, **{name: unmeasured.get(name, value) for name, value in facts.items()})

    def note_progress(self) -> None:
        """Note what the Trainer and the meter have measured until now."""
        if self.trainer is None or self.meter is None:
            return
        history = self.trainer.state.log_history
        held_out_losses = finite_values(history, "eval_loss")
        self.note(
            **memory_facts(self.meter, self.record.peak_allocated_bytes or 0),
            warnings=list(dict.fromkeys([*self.record.warnings, *self.trainer.warnings])),
            micro_batch_size=self.trainer.micro_batch_size,
            gradient_accumulation_steps=self.trainer.args.gradient_accumulation_steps,
            steps_done=self.trainer.state.global_step,
            tokens_seen=self.trainer.tokens_seen,
            padding_tokens=self.trainer.padding_tokens,
            losses=finite_values(history, "loss"),
            held_out_loss_before=held_out_losses[0] if held_out_losses else None,
        )

    def write_progress(self) -> None:
        """Write what is known until now: a killed run leaves that."""
        self.note_progress()
        with suppress(OSError):  # a full disk ends no run
            self.record.save(self.job.folder)

    def end(self) -> Record:
        """Write the record as the run ended, and return it."""
        self.record = store.end(self.record, self.job.folder)
        return self.record

    # ---- the model ----

    def load(self) -> PreTrainedModel:
        """Load the model, do on it what every technique does to a model, and move it to where it is trained."""
        return self.move_to_device(self.behaviour.load(self.job))

    def move_to_device(self, model: PreTrainedModel) -> PreTrainedModel:
        model.to(self.job.device.torch)  # type: ignore[arg-type]  # the stub takes no device
        return model

    def sample(self, model: PreTrainedModel) -> str:
        """Return the prompt with the model's continuation; empty if no sample was asked for."""
        if not self.job.sample_tokens:
            return ""
        material = self.job.material
        return generate.generate(model, material.tokenizer, material.prompt, self.job.sample_tokens)

    def model_facts(self, model: PreTrainedModel, trainer: MeteredTrainer) -> dict[str, Any]:
        """Return fields of a record: how many parameters were trained, and in which precision."""
        parameters, trainable_parameters = count_parameters(model)
        dtype = storage_type(model)
        autocast = trainer.accelerator.mixed_precision
        if autocast != "no":
            dtype = f"autocast {autocast}"
        return {"dtype": dtype, "parameters": parameters, "trainable_parameters": trainable_parameters}

    def save(self, model: PreTrainedModel) -> None:
        """Write the fine-tuned model, if that was asked for. If the disk refuses, the record has a warning, and all
        that was measured."""
        if self.job.save is None:
            return
        folder = self.folder / "model"
        material = self.job.material
        try:
            save_model(model, material.tokenizer, material.source, self.job.save, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            warning = f"the model was not saved: {disk_refusal(folder.parent, error)}"
            self.note(warnings=[*self.record.warnings, warning])
        else:
            self.note(model_path=str(folder))

    # ---- what lies beside the record ----

    @property
    def folder(self) -> Path:
        """The folder of the run, named after its record: an older one where a run is resumed."""
        return self.job.folder / self.record.id

    def choose_checkpoint(self) -> Path | None:
        """Return the checkpoint to go on from, and note its step in the record; None for a run that begins anew."""
        newest = checkpoints.newest_checkpoint(self.folder / checkpoints.FOLDER)
        if newest is not None:
            step = int(newest.name.rpartition("-")[2])
            self.note(resumed_at_steps=[*self.record.resumed_at_steps, step])
        return newest

    def refusal_facts(self, message: str) -> dict[str, Any]:
        """Return fields of a record: which request for memory was refused.

        The tracker knows its numbers where it enforces a cap; where the device refused, they are read off the message.
        """
        refused = Refusal()
        failed_operation = ""
        if self.meter:
            refused = self.meter.tracker.refusal
            failed_operation = self.meter.tracker.failed_operation
        if refused.requested_bytes is None:
            with suppress(ConfigurationError):  # a message without numbers
                refused = Refusal(**numbers_in(message))
        return {
            "failed_operation": failed_operation,
            "requested_bytes": refused.requested_bytes,
            "allocated_at_failure_bytes": refused.allocated_bytes,
            "reserved_at_failure_bytes": refused.reserved_bytes,
        }


def memory_facts(meter: Meter, earlier_peak_bytes: int) -> dict[str, Any]:
    """Return the meter's report as fields of a record.

    There are none if the run ended before its first phase did, or if a resumed run had a higher peak before it was
    interrupted: the record keeps that one.
    """
    with suppress(ValueError):
        report = meter.report()
        if report.peak_allocated_bytes >= earlier_peak_bytes:
            return vars(report)
    return {}


def finite_values(history: list[dict[str, float]], name: str) -> list[float]:
    """Return what the Trainer has logged under a name, without NaN and infinity, which JSON does not have."""
    values = []
    for entry in history:
        if math.isfinite(entry.get(name, math.nan)):
            values.append(entry[name])
    return values
