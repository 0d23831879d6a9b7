"""Where a run takes place, and what is kept of it while it goes on.

The story of a run (`workbench.training.execute`) does not know where it is told. A place loads the model, finds the
checkpoint to go on from, and keeps the record; several ranks do each of these otherwise (`ranks.run`).
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
from workbench.base.paths import unwritten
from workbench.gpus.emulator.padding import announce_padding
from workbench.journal import checkpoints, store
from workbench.journal.record import Record
from workbench.measure.meter import Meter
from workbench.measure.out_of_memory import Refusal, numbers_in
from workbench.models import generate
from workbench.models.load import count_parameters, save_model, storage_type
from workbench.training.job import Job
from workbench.training.trainer import SeamTrainer


class Values:
    """What is kept of what a device computes: everything."""

    def load(self, job: Job) -> PreTrainedModel:
        model: PreTrainedModel = job.recipe.load_from(job.material.source, job.material.config)
        return model

    def assembled(self, trainer: SeamTrainer) -> None:
        pass

    def known(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Of facts about a run, by their names in a record, those that are known."""
        return dict(facts)


class NoValues(Values):
    """A card in software computes nothing: its memory is kept, and no loss, no text and no speed."""

    UNKNOWN: Mapping[str, Any] = {
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

    def load(self, job: Job) -> PreTrainedModel:
        with no_init_weights():  # nobody reads the numbers
            model = super().load(job)
        model.tie_weights()  # which would have been done with the drawing
        return model

    def assembled(self, trainer: SeamTrainer) -> None:
        announce_padding(trainer)

    def known(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.UNKNOWN.get(name, value) for name, value in facts.items()}


class Place:
    """Here: one process, alone with its device.

    Attributes:
        record: what is known so far.
        error: what ended the run before its end, if anything did.
        trainer, meter: while the run goes on.
    """

    trainer_kind: Callable[..., SeamTrainer] = SeamTrainer
    meter_kind: type[Meter] = Meter

    def __init__(self, job: Job) -> None:
        self.job = job
        self.record = job.record
        self.values = Values()
        if job.device.in_software:
            self.values = NoValues()
        self.error: BaseException | None = None
        self.trainer: SeamTrainer | None = None
        self.meter: Meter | None = None

    # ---- the record ----

    def begin(self) -> None:
        """On disk as `running`, from now on. Raises ConfigurationError: it cannot be written, or not be resumed."""
        self.record = store.begin(self.record, self.job.folder, self.job.resume)

    def note(self, **facts: Any) -> None:
        self.record = replace(self.record, **self.values.known(facts))

    def look(self) -> Record:
        """Note what the Trainer and the meter have seen until now."""
        if self.trainer is None or self.meter is None:
            return self.record
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
        return self.record

    def write(self) -> None:
        """What is known until now: a kill leaves that."""
        with suppress(OSError):  # a full disk ends no run
            self.look().save(self.job.folder)

    def end(self) -> Record:
        """On disk as it ended."""
        self.record = store.end(self.record, self.job.folder)
        return self.record

    # ---- the model ----

    def load(self) -> PreTrainedModel:
        """The model, where it is trained, with the work of every technique done on it."""
        return self.placed(load_for(self.job, self.values))

    def placed(self, model: PreTrainedModel) -> PreTrainedModel:
        model.to(self.job.device.torch)  # type: ignore[arg-type]  # the stub takes no device
        return model

    def sample(self, model: PreTrainedModel) -> str:
        """The continued prompt; empty if none was asked for."""
        if not self.job.sample_tokens:
            return ""
        material = self.job.material
        return generate.generate(model, material.tokenizer, material.prompt, self.job.sample_tokens)

    def trained_facts(self, model: PreTrainedModel, trainer: SeamTrainer) -> dict[str, Any]:
        """Fields of a record: what was really trained, and in which precision."""
        parameters, trainable_parameters = count_parameters(model)
        dtype = storage_type(model)
        autocast = trainer.accelerator.mixed_precision
        if autocast != "no":
            dtype = f"autocast {autocast}"
        return {
            "dtype": dtype,
            "parameters": parameters,
            "trainable_parameters": trainable_parameters,
        }

    def save(self, model: PreTrainedModel) -> None:
        """Keep the fine-tuned model. If the disk refuses, the measurements are kept all the same."""
        if self.job.save is None:
            return
        folder = self.run_folder / "model"
        material = self.job.material
        try:
            save_model(model, material.tokenizer, material.source, self.job.save, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            warning = f"the model was not saved: {unwritten(folder.parent, error)}"
            self.note(warnings=[*self.record.warnings, warning])
        else:
            self.note(model_path=str(folder))

    # ---- what lies beside the record ----

    @property
    def run_folder(self) -> Path:
        """Named after the record, which is an older one where a run is resumed."""
        return self.job.folder / self.record.id

    def checkpoint(self) -> Path | None:
        """Where to go on, noted in the record; None at the beginning of a run that is new."""
        newest = checkpoints.newest_checkpoint(self.run_folder / checkpoints.FOLDER)
        if newest is not None:
            step = int(newest.name.rpartition("-")[2])
            self.note(resumed_at_steps=[*self.record.resumed_at_steps, step])
        return newest

    def refusal(self, message: str) -> dict[str, Any]:
        """Fields of a record: what was refused, from the cap's keeper or, where the device refused, from its words."""
        refused = Refusal()
        failed_operation = ""
        if self.meter:
            refused = self.meter.tracker.refusal
            failed_operation = self.meter.tracker.failed_operation
        if refused.requested_bytes is None:
            with suppress(ConfigurationError):  # it has no numbers that are known
                refused = Refusal(**numbers_in(message))
        return {
            "failed_operation": failed_operation,
            "requested_bytes": refused.requested_bytes,
            "allocated_at_failure_bytes": refused.allocated_bytes,
            "reserved_at_failure_bytes": refused.reserved_bytes,
        }


def load_for(job: Job, values: Values) -> PreTrainedModel:
    """The job's model after every technique's model seam, on the host."""
    model = values.load(job)
    set_seed(job.recipe.seed)  # what techniques add is drawn
    prepared: PreTrainedModel = job.recipe.prepare_model(model)
    return prepared


def memory_facts(meter: Meter, earlier_peak_bytes: int) -> dict[str, Any]:
    """The meter's report as fields of a record; none if the run ended before the first phase did, or if the part of
    the run before an interruption peaked higher."""
    with suppress(ValueError):
        report = meter.report()
        if report.peak_allocated_bytes >= earlier_peak_bytes:
            return vars(report)
    return {}


def finite_values(history: list[dict[str, float]], name: str) -> list[float]:
    """What was logged under a name, without NaN and infinity, which JSON does not have."""
    values = []
    for entry in history:
        if math.isfinite(entry.get(name, math.nan)):
            values.append(entry[name])
    return values
