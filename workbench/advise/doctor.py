"""`diagnose(record)`: why a run ran out of memory, and the smallest single changes that are predicted to fit.

The cause is read off the record: each rule says what it finds, or nothing. The changes are found by the planner's
search, limited to one change, which may be another setting of a technique that the recipe has already. No technique is
known here by name.
"""

import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import replace

from workbench.advise.candidate import Candidate, Predictor, entry, rank
from workbench.advise.plan import THIS_CPU, Families, Search, families
from workbench.base.categories import Phase, format_bytes
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.base.operations import operation_in_words
from workbench.base.result import Result
from workbench.gpus.catalogue import MIB, Gpu, of_device
from workbench.gpus.emulator.card import DEVICE
from workbench.journal.record import Record, Status, read_all
from workbench.prediction import predict as prediction
from workbench.prediction.prediction import Prediction
from workbench.recipe import Recipe, as_command
from workbench.techniques import REGISTRY

MARGIN = 0.1  # asked of a change where the prediction says that the recipe fits as it is, but the run has not
EMULATED = "(emulated)"  # ends the name that such a card gives itself (workbench/gpus/emulator/card.py)
NOTEWORTHY = 0.01  # part of the room: less than this, alive before the run, is not mentioned
RELEASE = (
    "workbench.release() drops the last exception's frames and the results of cells (Out, _); `del` your own "
    "variables: models, optimizers, trainers, losses that still have their graph."
)


def diagnose(record: Record, *, among: Iterable[str] | None = None, predict: Predictor | None = None) -> "Diagnosis":
    """Why this run ran out of memory, and which single changes are predicted to fit.

    Args:
        record: of the status `oom`.
        among: names of the techniques to choose from; by default all there are. Each costs a prediction or a few.
        predict: another predictor than `workbench.predict`.

    Raises:
        ConfigurationError: the record is of another status; or a name in `among` is not known.
    """
    if record.status is not Status.OOM:
        raise ConfigurationError(
            f"diagnose: the record {record.id} has the status {record.status}; only one that ran out of memory (oom) "
            "can be diagnosed. The newest of those: python -m workbench doctor"
        )
    diagnosis = Diagnosis(record)
    compute_capability = diagnosis.gpu.compute_capability if diagnosis.gpu else None
    diagnosis.look_for_changes(predict or prediction.predict, families(compute_capability, among))
    return diagnosis


def newest_out_of_memory(record_id: str | None = None) -> Record:
    """The record of that id, or the newest that ran out of memory.

    Raises:
        ConfigurationError: there is none.
    """
    pattern = rf'"status"\s*:\s*"{Status.OOM}"'
    missing = "no run that ran out of memory on record"
    if record_id:
        pattern = rf'"id"\s*:\s*"{re.escape(record_id)}"'
        missing = f"no record {record_id!r}"
    records = read_all(newest=1, containing=pattern)
    if not records:
        raise ConfigurationError(f"doctor: there is {missing}. See `python -m workbench records`.")
    return records[-1]


def cause(record: Record) -> str:
    """Why it ran out of memory, as far as the record says it: no prediction is made."""
    return Diagnosis(record).cause


class Diagnosis(Result):
    """Why a run ran out of memory, and what to change. Bytes are those at the moment of the failure; None: not known.

    Attributes:
        phase: where it failed, which is not always where the peak was: after the last step, only evaluation is left.
        largest_category, largest_bytes: the largest part of the peak.
        held_bytes: what was alive when the request came.
        room_bytes: the cap; else the memory of the GPU; else what was in use when the request was refused.
        before_bytes: what was alive before the run; `counted_bytes` of it took their part of the room.
        unused_bytes: reserved by PyTorch's allocator and not in use.
        fragmented: the request would have fitted into what was unused, had that been in one piece.
        predicted_bytes: what the recipe is predicted to need on `predicted_for`; `predict` calls that `predicted_on`.
        changes: single changes that fit, the best first. Where no single one does, `closest` comes nearest, and
            `plan_command` looks for several.
        note: why there are no predictions, or what they miss.
    """

    json_fields = (
        "record_id",
        "cause",
        "phase",
        "operation",
        "largest_category",
        "largest_bytes",
        "room_bytes",
        "requested_bytes",
        "before_bytes",
        "fragmented",
        "predicted_for",
        "predicted_bytes",
        "plan_command",
        "note",
        "checklist",
        "changes",
        "closest",
    )

    def __init__(self, record: Record) -> None:
        self.record = record
        self.recipe = record.recipe
        self.record_id = record.id
        self.operation = record.failed_operation
        self.phase = record.peak_phase
        if record.steps_done >= self.recipe.training_arguments()["max_steps"]:
            self.phase = Phase.EVALUATION
        self.largest_category = max(record.by_category, key=record.by_category.__getitem__, default="")
        self.largest_bytes = record.by_category.get(self.largest_category)

        self.kind = record.device_kind or "cpu"
        self.gpu: Gpu | None = None
        self.predicted_for = THIS_CPU
        self.predicted_on = prediction.CPU
        if self.kind == "cuda":
            self.gpu = of_device(record.device_name, record.device_bytes)
        if self.gpu:
            self.predicted_for = self.gpu.title
            self.predicted_on = self.gpu.name
        # an early failure has no memory source, but every record has the name of the device
        self.emulated = record.device_name.endswith(EMULATED)

        self.requested_bytes = record.requested_bytes
        self.held_bytes = record.allocated_at_failure_bytes
        self.unused_bytes = 0
        if self.held_bytes is None:
            self.held_bytes = record.peak_allocated_bytes
        elif record.reserved_at_failure_bytes is not None:
            self.unused_bytes = record.reserved_at_failure_bytes - self.held_bytes
        self.fragmented = self.kind == "cuda" and 0 < (record.requested_bytes or 0) <= self.unused_bytes
        self.room_bytes = self._room()
        self.before_bytes = record.before_bytes
        self.counted_bytes = record.before_bytes or 0
        if self.kind != "cuda" and record.memory_cap_bytes is not None:  # such a cap counts the run's own alone
            self.counted_bytes = 0

        self.predicted_bytes: int | None = None
        self.changes: tuple[Candidate, ...] = ()
        self.closest: Candidate | None = None
        self.note = ""

    def _room(self) -> int | None:
        room_bytes = self.record.memory_cap_bytes or self.record.device_bytes
        if not room_bytes and self.gpu:
            return self.gpu.memory_bytes
        return room_bytes or self.held_bytes

    @property
    def budget_bytes(self) -> int | None:
        """What a recipe may need, its context included: a cap is one for the allocator and leaves the context out."""
        if self.room_bytes is None or (self.kind == "cuda" and self.gpu is None):
            return None
        room_bytes = self.room_bytes
        if self.gpu and self.record.memory_cap_bytes:
            room_bytes += self.gpu.context_bytes_estimate
            room_bytes = min(room_bytes, self.record.device_bytes or room_bytes)
        return max(room_bytes - self.counted_bytes, 1)

    def look_for_changes(self, predictor: Predictor, offered: Families) -> None:
        if self.budget_bytes is None:
            self.note = "Nobody knows how much memory there was, so nothing can be predicted."
            return
        try:
            candidates = single_changes(self, self.budget_bytes, predictor, offered)
        except (ConfigurationError, UnavailableError) as error:
            self.note = f"No prediction helps: {error}"
            return
        candidates = [replace(candidate, options=self.options) for candidate in sorted(candidates, key=rank)]
        self.changes = tuple(candidate for candidate in candidates if candidate.fits)
        if not self.changes:
            self.closest = min(candidates, key=lambda candidate: candidate.needed_bytes, default=None)

    @property
    def cause(self) -> str:
        """A sentence a line: what each rule finds in the record."""
        return "\n".join(filter(None, [rule(self) for rule in RULES]))

    @property
    def options(self) -> str:
        """With which a change runs on the same kind of device, under the same cap."""
        options = f"--device {self.kind}"
        if self.gpu and self.emulated:
            options = f"--device {DEVICE}{self.gpu.name}"
        cap = self.record.memory_cap_bytes or 0
        if cap > MIB:
            options += f" --memory-cap {cap / MIB:.6g}MiB"
        elif cap:
            options += f" --memory-cap {cap}B"
        return options

    @property
    def plan_command(self) -> str:
        """Looks for sets of changes within the same room. Empty where the room is not known."""
        if self.budget_bytes is None:
            return ""
        command = shlex.split(as_command(self.recipe))
        command[command.index("run")] = "plan"
        return shlex.join([*command, "--gpu", self.predicted_on, "--budget", f"{self.budget_bytes}B"])

    @property
    def checklist(self) -> tuple[str, ...]:
        """What holds tensors in this process, and how to let go of them."""
        if self.emulated:
            return ("An emulated GPU is the run's own: nothing else takes its memory.",)
        lines = []
        if "torch" in sys.modules:  # to import it takes seconds, and without it there are no tensors
            from workbench.advise.leaks import holders

            lines = [f"{name} holds {format_bytes(size)} now" for name, size in holders(self.kind)]
        if not lines:
            lines = ["Nothing holds tensors in this process. In a notebook, look there: workbench.holders()."]
        if self.kind == "cuda":
            return (*lines, RELEASE, "Other processes share the device: nvidia-smi lists them.")
        return (*lines, RELEASE, "Restarting the kernel frees all of it.")

    def __str__(self) -> str:
        lines = [f"record {self.record_id}", "", "Cause", *_indented(self.cause.splitlines()), "", "What to change"]
        if self.note:
            lines.append(f"  {self.note}")
        elif self.predicted_bytes is not None:
            lines.append(f"  As it is, the recipe is predicted to need {format_bytes(self.predicted_bytes)}.")
        if self.changes:
            lines.append(f"  Each of these alone is enough, as predicted for {self.predicted_for}:")
        for number, change in enumerate(self.changes, start=1):
            lines += ["", *_lines(change, f"{number}. ")]
        if self.closest:
            lines += ["", "  No single change is enough. The closest:", "", *_lines(self.closest)]
        if not self.changes:
            lines += ["", "  For several changes together:", f"     {self.plan_command}"]
        return "\n".join([*lines, "", "If it should have fitted", *_indented(f"- {line}" for line in self.checklist)])


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _lines(candidate: Candidate, number: str = "") -> list[str]:
    less = f"{format_bytes(candidate.saved_bytes)} less"
    return _indented(entry(candidate, number + candidate.words, less))


# ---- the cause: each rule says what it finds, or nothing ----


def where_it_ended(diagnosis: Diagnosis) -> str:
    record = diagnosis.record
    phase = "loading, before training"
    if diagnosis.phase:
        phase = f"the {diagnosis.phase.replace('_', ' ')} phase"
    done = "before a step was done"
    if record.steps_done:
        done = f"after {record.steps_done} whole steps"
    return f"{record.label} on {record.model} ran out of memory in {phase}, {done}."


def what_was_refused(diagnosis: Diagnosis) -> str:
    record = diagnosis.record
    if record.requested_bytes is None:
        return record.error
    operation = record.failed_operation
    text = "It"
    if operation:
        text = f"{operation_in_words(operation)} ({operation})"
    text += f" asked for {format_bytes(record.requested_bytes)} more"
    if diagnosis.held_bytes is not None:
        text += f" while {format_bytes(diagnosis.held_bytes)} were in use"
    if record.memory_cap_bytes:
        text += f"; the memory cap is {format_bytes(record.memory_cap_bytes)}"
    elif diagnosis.room_bytes:
        text += f"; the memory of the device is {format_bytes(diagnosis.room_bytes)}"
    return f"{text}."


def what_held_most(diagnosis: Diagnosis) -> str:
    size = diagnosis.largest_bytes
    peak = diagnosis.record.peak_allocated_bytes
    if not size or not peak:
        return ""
    category = diagnosis.largest_category.replace("_", " ")
    share = f"{size / peak:.0%} of {format_bytes(peak)}"
    return f"The largest part of the peak was {category}: {format_bytes(size)}, {share}."


def what_was_in_pieces(diagnosis: Diagnosis) -> str:
    if not diagnosis.fragmented:
        return ""
    return (
        f"Fragmentation: {format_bytes(diagnosis.unused_bytes)} more were reserved and unused, enough for the "
        "request, but not in one piece."
    )


def what_was_there_before(diagnosis: Diagnosis) -> str:
    before = diagnosis.before_bytes or 0
    if before <= NOTEWORTHY * (diagnosis.room_bytes or 0) or not before:
        return ""
    text = f"{format_bytes(before)} of tensors were alive before the run began"
    if diagnosis.counted_bytes:
        return f"{text}; they took their part of the room."
    return f"{text}; the cap does not count them."


RULES = (where_it_ended, what_was_refused, what_held_most, what_was_in_pieces, what_was_there_before)


# ---- the changes ----


class SmallerEvaluation(Candidate):
    """The recipe with fewer sequences evaluated at once: no technique, and the loss stays the same."""

    @property
    def label(self) -> str:
        return f"evaluation_batch_size={self.recipe.evaluation_batch_size}"

    @property
    def words(self) -> str:
        return f"Set evaluation_batch_size to {self.recipe.evaluation_batch_size}"

    @property
    def gives_up(self) -> tuple[str, ...]:
        return ("an evaluation takes longer; training stays as it is",)


def single_changes(diagnosis: Diagnosis, room_bytes: int, predictor: Predictor, offered: Families) -> list[Candidate]:
    """All that fit into the room that the record had; if none does, those that were tried."""
    recipe = diagnosis.recipe

    def predict(changed: Recipe) -> Prediction:
        return predictor(changed, diagnosis.predicted_on)

    baseline = Candidate(recipe, (), predict(recipe), room_bytes)
    diagnosis.predicted_bytes = baseline.needed_bytes
    budget_bytes = room_bytes
    if baseline.fits:
        diagnosis.note = (
            f"Predicted to fit as it is, with {format_bytes(baseline.headroom_bytes)} to spare: something else takes "
            f"memory, see below. The changes need at least {MARGIN:.0%} less than the recipe as it is."
        )
        budget_bytes = int(baseline.needed_bytes * (1 - MARGIN))

    planned = Search(recipe, budget_bytes, predict, offered, most_changes=1, replacing=True).plan()
    candidates = list(planned.candidates)
    if diagnosis.fragmented:  # techniques that change the allocator, and no category of memory
        present = {technique.name for technique in recipe.techniques}
        for name in offered:
            technique = REGISTRY[name]()
            if name not in present and technique.allocator_settings():
                changed = recipe | technique
                candidates.append(Candidate(changed, (technique,), predict(changed), room_bytes, baseline))
    if diagnosis.phase == Phase.EVALUATION:
        from workbench.training.arguments import argument_values  # which imports the Trainer: seconds

        size = argument_values(recipe, 0.0)["per_device_eval_batch_size"]
        while size > 1:
            size //= 2
            changed = replace(recipe, evaluation_batch_size=size)
            candidate = SmallerEvaluation(changed, (), predict(changed), budget_bytes, baseline)
            if candidate.fits:  # the most sequences that it may have at once
                candidates.append(candidate)
                break
    fitting = [candidate for candidate in candidates if candidate.fits]
    return fitting or [*planned.tried[1:]]  # the first has no change
