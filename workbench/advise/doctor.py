"""`diagnose(record)`: why a run ran out of memory, and the smallest single changes that are predicted to fit.

The cause is read off the record: each rule makes a sentence of it, or none. The planner's search finds the changes,
limited to one, which may be another setting of a technique that the recipe has already. No technique is known here by
name.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

from workbench.advise.candidate import Candidate, Predictor, entry, rank
from workbench.advise.plan import THIS_CPU, Families, Search, families
from workbench.base.categories import Phase, format_bytes
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.base.operations import operation_in_words
from workbench.base.result import Result
from workbench.gpus.catalogue import MIB, Gpu, recognize_gpu
from workbench.gpus.emulator.card import DEVICE
from workbench.journal.record import Record, Status, read_all
from workbench.prediction import predict as prediction
from workbench.prediction.prediction import Prediction
from workbench.recipe import Recipe, as_command
from workbench.techniques import REGISTRY

MARGIN = 0.1  # part of its need that a change must save where the recipe is predicted to fit, and the run did not
EMULATED = "(emulated)"  # the end of an emulated GPU's own name (workbench/gpus/emulator/card.py)
NOTEWORTHY = 0.01  # part of the room: tensors of less than this, alive before the run, are not mentioned
RELEASE = (
    "workbench.release() drops the last exception's frames and the results of cells (Out, _); `del` your own "
    "variables: models, optimizers, trainers, losses that still have their graph."
)


def diagnose(record: Record, *, among: Iterable[str] | None = None, predict: Predictor | None = None) -> "Diagnosis":
    """Say why a run ran out of memory, and which single changes are predicted to fit.

    Args:
        record: the record of a run, with the status `oom`.
        among: names of the techniques to choose from; by default all there are. Each costs a prediction or a few.
        predict: a predictor in the place of `workbench.predict`.

    Raises:
        ConfigurationError: the record has another status, or a name in `among` is unknown.
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
    """Return the record with an id, or by default the newest of a run that ran out of memory.

    Raises:
        ConfigurationError: there is no such record.
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


class Diagnosis(Result):
    """The reasons why a run ran out of memory, and the changes that help.

    It begins with the record alone, from which `cause` is read; `look_for_changes` adds the predictions. Bytes are
    those at the moment of the failure; None means that they are not known.

    Attributes:
        phase: the phase in which it failed. The peak's may be another: after the last step only evaluation is left.
        largest_category, largest_bytes: the largest part of the peak.
        gpu: the card of the run; None if it is a CPU or unknown.
        predicted_for: the device of the predictions, for people.
        gpu_name: the device of the predictions, as `predict` calls it.
        requested_bytes: the request that was refused.
        held_bytes: the tensors that were alive when the request came.
        room_bytes: the memory cap; else the memory of the device; else what was in use when the request was refused.
        before_bytes: the tensors that were alive before the run.
        counted_bytes: the part of them that counts against the room.
        unused_bytes: the memory that PyTorch's allocator had reserved and that was not in use.
        fragmented: whether the request would have fitted into the unused memory, had that been in one piece.
        predicted_bytes: the memory that the recipe is predicted to need.
        changes: single changes that fit, the best first.
        closest: the change that needs least, where no single one fits. `plan_command` looks for several.
        note: the reason why there are no predictions; or, if the recipe is predicted to fit as it is, that something
            else takes memory.
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
        self.gpu_name = prediction.CPU
        if self.kind == "cuda":
            self.gpu = recognize_gpu(record.device_name, record.device_bytes)
        if self.gpu:
            self.predicted_for = self.gpu.title
            self.gpu_name = self.gpu.name
        # An early failure has no memory source, but every record has the name of the device.
        self.emulated = record.device_name.endswith(EMULATED)

        self.requested_bytes = record.requested_bytes
        self.held_bytes = record.allocated_at_failure_bytes
        self.unused_bytes = 0
        if self.held_bytes is None:
            self.held_bytes = record.peak_allocated_bytes
        elif record.reserved_at_failure_bytes is not None:
            self.unused_bytes = record.reserved_at_failure_bytes - self.held_bytes
        self.fragmented = self.kind == "cuda" and 0 < (record.requested_bytes or 0) <= self.unused_bytes
        self.room_bytes = record.memory_cap_bytes or record.device_bytes
        if not self.room_bytes and self.gpu:
            self.room_bytes = self.gpu.memory_bytes
        self.room_bytes = self.room_bytes or self.held_bytes
        self.before_bytes = record.before_bytes
        self.counted_bytes = record.before_bytes or 0
        if self.kind != "cuda" and record.memory_cap_bytes is not None:  # such a cap counts the run's own tensors alone
            self.counted_bytes = 0

        self.predicted_bytes: int | None = None
        self.changes: tuple[Candidate, ...] = ()
        self.closest: Candidate | None = None
        self.note = ""

    @property
    def budget_bytes(self) -> int | None:
        """The memory that a recipe may need, CUDA's context included; None if the room is not known.

        A memory cap is one for the allocator, and leaves the context out.
        """
        if self.room_bytes is None or (self.kind == "cuda" and self.gpu is None):
            return None
        room_bytes = self.room_bytes
        if self.gpu and self.record.memory_cap_bytes:
            room_bytes += self.gpu.context_bytes_estimate
            room_bytes = min(room_bytes, self.record.device_bytes or room_bytes)
        return max(room_bytes - self.counted_bytes, 1)

    def look_for_changes(self, predictor: Predictor, offered: Families) -> None:
        """Predict the recipe and single changes to it, and keep those that fit, or the one that comes closest."""
        if self.budget_bytes is None:
            self.note = "Nobody knows how much memory there was, so nothing can be predicted."
            return

        def predict(changed: Recipe) -> Prediction:
            return predictor(changed, self.gpu_name)

        try:
            baseline = Candidate(self.recipe, (), predict(self.recipe), self.budget_bytes)
            self.predicted_bytes = baseline.needed_bytes
            if baseline.fits:
                self.note = (
                    f"Predicted to fit as it is, with {format_bytes(baseline.headroom_bytes)} to spare: something else "
                    f"takes memory, see below. The changes need at least {MARGIN:.0%} less than the recipe as it is."
                )
            candidates = single_changes(self, baseline, predict, offered)
        except (ConfigurationError, UnavailableError) as error:
            self.note = f"No prediction helps: {error}"
            return
        candidates = [replace(candidate, options=self.options) for candidate in sorted(candidates, key=rank)]
        self.changes = tuple(candidate for candidate in candidates if candidate.fits)
        if not self.changes:
            self.closest = min(candidates, key=lambda candidate: candidate.needed_bytes, default=None)

    @property
    def cause(self) -> str:
        """The sentences that the rules make of the record, one a line."""
        return "\n".join(filter(None, [rule(self) for rule in RULES]))

    @property
    def options(self) -> str:
        """The options of the command line with which a change runs on the same kind of device, under the same cap."""
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
        """The command that looks for sets of changes within the same room; empty where the room is not known."""
        if self.budget_bytes is None:
            return ""
        command = shlex.split(as_command(self.recipe))
        command[command.index("run")] = "plan"
        return shlex.join([*command, "--gpu", self.gpu_name, "--budget", f"{self.budget_bytes}B"])

    @property
    def checklist(self) -> tuple[str, ...]:
        """The names that hold tensors in this process, and how to free them."""
        if self.emulated:
            return ("An emulated GPU is the run's own: nothing else takes its memory.",)
        lines = []
        if "torch" in sys.modules:  # importing it takes seconds, and without it there are no tensors
            from workbench.advise.leaks import holders

            lines = [f"{name} holds {format_bytes(size)} now" for name, size in holders(self.kind)]
        if not lines:
            lines = ["Nothing holds tensors in this process. In a notebook, look there: workbench.holders()."]
        if self.kind == "cuda":
            return (*lines, RELEASE, "Other processes share the device: nvidia-smi lists them.")
        return (*lines, RELEASE, "Restarting the kernel frees all of it.")

    def __str__(self) -> str:
        lines = [f"record {self.record_id}", "", "Cause", *_indent(self.cause.splitlines()), "", "What to change"]
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
        return "\n".join([*lines, "", "If it should have fitted", *_indent(f"- {line}" for line in self.checklist)])


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _lines(candidate: Candidate, number: str = "") -> list[str]:
    less = f"{format_bytes(candidate.saved_bytes)} less"
    return _indent(entry(candidate, number + candidate.words, less))


# ---- the cause: each rule makes a sentence of the record, or none ----


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
    """A recipe that evaluates fewer sequences at once. It has no technique more, and the loss stays the same."""

    @property
    def label(self) -> str:
        return f"evaluation_batch_size={self.recipe.evaluation_batch_size}"

    @property
    def words(self) -> str:
        return f"Set evaluation_batch_size to {self.recipe.evaluation_batch_size}"

    @property
    def gives_up(self) -> tuple[str, ...]:
        return ("an evaluation takes longer; training stays as it is",)


def single_changes(
    diagnosis: Diagnosis,
    baseline: Candidate,
    predict: Callable[[Recipe], Prediction],
    offered: Families,
) -> list[Candidate]:
    """Return the single changes that fit into the budget; if none does, all that were tried.

    Where the recipe as it is fits, a change must save a MARGIN.

    Args:
        baseline: the recipe as it is, against the budget.
        offered: the settings to try, by the name of their technique.
    """
    recipe = diagnosis.recipe
    budget_bytes = baseline.budget_bytes
    if baseline.fits:
        budget_bytes = int(baseline.needed_bytes * (1 - MARGIN))

    planned = Search(recipe, budget_bytes, predict, offered, most_changes=1, replacing=True).plan()
    candidates = list(planned.candidates)
    if diagnosis.fragmented:
        # The search leaves out techniques that attack no category of memory. Some of them mend the allocator's gaps.
        present = {technique.name for technique in recipe.techniques}
        for name in offered:
            technique = REGISTRY[name]()
            if name not in present and technique.allocator_settings():
                changed = recipe | technique
                candidates.append(Candidate(changed, (technique,), predict(changed), baseline.budget_bytes, baseline))
    if diagnosis.phase == Phase.EVALUATION:
        from workbench.training.arguments import complete_arguments  # it imports the Trainer, which takes seconds

        size = complete_arguments(recipe, 0.0)["per_device_eval_batch_size"]
        while size > 1:
            size //= 2
            changed = replace(recipe, evaluation_batch_size=size)
            candidate = SmallerEvaluation(changed, (), predict(changed), budget_bytes, baseline)
            if candidate.fits:  # no larger number of sequences does
                candidates.append(candidate)
                break
    fitting = [candidate for candidate in candidates if candidate.fits]
    return fitting or [*planned.tried[1:]]  # the first is the recipe without changes
