"""`diagnose(record)`: why a run ran out of memory, and the smallest single changes that are predicted to fit.

The cause is read off the record. The changes are found by the planner's search, limited to one change; and of each
technique that the recipe has already, other settings are tried in its place. No technique is known here by name.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from workbench.advise.candidate import Candidate, Predictor, entry, rank
from workbench.advise.plan import SETS, THIS_CPU, Search, attacked_bytes, families
from workbench.errors import ConfigurationError, UnavailableError
from workbench.export.written import as_command
from workbench.gpus.catalogue import MIB, of_device
from workbench.gpus.emulator.card import DEVICE
from workbench.measure.categories import Phase, format_bytes
from workbench.predict import predict as prediction
from workbench.predict.life import predict_life
from workbench.predict.phases import Life
from workbench.predict.prediction import Prediction
from workbench.recipe import Recipe
from workbench.records.record import Record, Status, read_all
from workbench.techniques import REGISTRY

MARGIN = 0.1  # asked of a change where the prediction says that the recipe fits as it is, but the run has not
EMULATED = "(emulated)"  # ends the name that such a card gives itself (workbench/gpus/emulator/card.py)
BESIDE = 0.25  # part of the need that techniques save beside what they attack; LoRA 0.12, the most of seven recipes
NOTEWORTHY = 0.01  # part of the room: less than this, alive before the run, is not mentioned
RELEASE = (
    "workbench.release() drops the last exception's frames and the results of cells (Out, _); `del` your own "
    "variables: models, optimizers, trainers, losses that still have their graph."
)


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found. Bytes are those of the record, at the moment of the failure; None: not known.

    `changes` are single changes, the best first. Where no single one fits they are empty, `closest` is the one that
    comes nearest, and `plan_command` looks for several. `note` says why there are no predictions, or what they miss.
    """

    record_id: str
    cause: str
    phase: str
    operation: str
    largest_category: str
    largest_bytes: int | None
    room_bytes: int | None
    requested_bytes: int | None
    before_bytes: int | None
    fragmented: bool
    predicted_for: str
    predicted_bytes: int | None
    changes: tuple[Candidate, ...]
    closest: Candidate | None
    plan_command: str
    note: str
    checklist: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **vars(self),
            "changes": [_plain(change) for change in self.changes],
            "closest": self.closest and _plain(self.closest),
            "checklist": list(self.checklist),
        }

    def __str__(self) -> str:
        lines = [f"record {self.record_id}", "", "Cause", *_indented(self.cause.splitlines()), "", "What to change"]
        lines += _indented([self.note] if self.note else [])
        if self.predicted_bytes is not None and not self.note:
            lines += _indented([f"As it is, the recipe is predicted to need {format_bytes(self.predicted_bytes)}."])
        if self.changes:
            lines += _indented([f"Each of these alone is enough, as predicted for {self.predicted_for}:"])
        for number, change in enumerate(self.changes, start=1):
            lines += ["", *_lines(change, f"{number}. ")]
        if self.closest:
            lines += ["", "  No single change is enough. The closest:", "", *_lines(self.closest)]
        if self.closest or not self.changes:
            lines += ["", "  For several changes together:", f"     {self.plan_command}"]
        return "\n".join([*lines, "", "If it should have fitted", *_indented(f"- {line}" for line in self.checklist)])


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _lines(candidate: Candidate, number: str = "") -> list[str]:
    less = f"{format_bytes(candidate.saved_bytes)} less"
    return _indented(entry(candidate, number + candidate.words, less, [_costs(candidate)]))


def _plain(candidate: Candidate) -> dict[str, Any]:
    return {**candidate.to_dict(), "gives_up": _costs(candidate)}  # of a single change, without its name


def _costs(candidate: Candidate) -> str:
    if not candidate.changes:  # a smaller evaluation
        return "an evaluation takes longer; training stays as it is"
    return candidate.changes[0].costs


class SmallerEvaluation(Candidate):
    """The recipe with fewer sequences evaluated at once: no technique, and the loss stays the same."""

    @property
    def label(self) -> str:
        return f"evaluation_batch_size={self.recipe.evaluation_batch_size}"

    @property
    def words(self) -> str:
        return f"Set evaluation_batch_size to {self.recipe.evaluation_batch_size}"


def newest_out_of_memory(record_id: str | None = None) -> Record:
    """The record of that id, or the newest that ran out of memory.

    Raises:
        ConfigurationError: there is none.
    """
    if record_id:
        records = [record for record in read_all() if record.id == record_id]
        missing = f"no record {record_id!r}"
    else:
        records = [record for record in read_all() if record.status is Status.OOM]
        missing = "no run that ran out of memory on record"
    if not records:
        raise ConfigurationError(f"doctor: there is {missing}. See `python -m workbench records`.")
    return records[-1]


def diagnose(record: Record, *, among: Iterable[str] | None = None, predict: Predictor | None = None) -> Diagnosis:
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
    failure = _Failure(record)
    search = _ChangeSearch(failure, predict or prediction.predict, among)
    changes = search.changes()
    fitting = tuple(change for change in changes if change.fits)
    closest = None
    if changes and not fitting:
        closest = min(changes, key=lambda change: change.needed_bytes)
    largest, size = _largest(record.by_category)
    return Diagnosis(
        record_id=record.id,
        cause=failure.cause(),
        phase=failure.phase,
        operation=record.failed_operation,
        largest_category=largest,
        largest_bytes=size,
        room_bytes=failure.room_bytes,
        requested_bytes=record.requested_bytes,
        before_bytes=record.before_bytes,
        fragmented=failure.fragmented,
        predicted_for=search.predicted_for,
        predicted_bytes=search.needed_bytes,
        changes=fitting,
        closest=closest,
        plan_command=search.plan_command(),
        note=search.note,
        checklist=failure.checklist(),
    )


def evaluation_cures(gpu: str, life: Life) -> dict[str, Life]:
    """Of a life whose evaluation does not fit: each change with which it does, and the life with that change."""
    if "evaluate" not in life.refused:
        return {}
    recipe = life.recipe
    habits = life.habits
    if habits.prediction_loss_only:
        changed = {"per_device_eval_batch_size=1": (replace(recipe, evaluation_batch_size=1), habits)}
    else:
        changed = {
            "prediction_loss_only=True": (recipe, replace(habits, prediction_loss_only=True)),
            "eval_accumulation_steps=1": (recipe, replace(habits, eval_accumulation_steps=1)),
        }
    cured = {}
    for change, (changed_recipe, changed_habits) in changed.items():
        changed_life = predict_life(changed_recipe, gpu, changed_habits)
        if "evaluate" not in changed_life.refused:
            cured[change] = changed_life
    return cured


def cures_text(cures: Mapping[str, Life]) -> str:
    """What to change in the evaluation, with what it then needs."""
    lines = ["\n\nWhat to change in the evaluation, as predicted again:"] if cures else []
    for change, life in cures.items():
        (peak,) = (peak for peak in life.peaks if peak.phase == "evaluate")
        lines.append(f"  {change}: {format_bytes(peak.device_bytes)}, and {format_bytes(peak.host_bytes)} on the host")
    return "\n".join(lines)


def promising(record: Record, predict: Predictor) -> list[str]:
    """Names for `diagnose` to choose among: first those that attack most for few predictions; of those that attack far
    less than is missing no more than make SETS names. Empty where nothing can be predicted.
    """
    with suppress(ConfigurationError, UnavailableError):
        return _ChangeSearch(_Failure(record), predict, None).promising()
    return []


def cause(record: Record) -> str:
    """Why it ran out of memory, as far as the record says it: no prediction is made."""
    return _Failure(record).cause()


def _largest(by_category: Mapping[str, int]) -> tuple[str, int | None]:
    return max(by_category.items(), key=lambda entry: entry[1], default=("", None))


class _Failure:
    """What the record says about the failure. Bytes are those at the moment of it; None: not known.

    Attributes:
        device: as `run` is told of it.
        held_bytes: what was alive when the request came.
        room_bytes: the cap; else the memory of the GPU; else what was in use when the request was refused.
        alive_before_bytes: what was alive before the run and counted against the room.
        unused_bytes: reserved by PyTorch's allocator and not in use.
        fragmented: the request would have fitted into what was unused, had that been in one piece.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.recipe = record.recipe
        self.kind = record.device_kind or "cpu"
        self.on_gpu = self.kind == "cuda"
        self.gpu = of_device(record.device_name, record.device_bytes) if self.on_gpu else None
        # an early failure has no memory source, but every record has the name of the device
        self.emulated = record.device_name.endswith(EMULATED)
        self.device = f"{DEVICE}{self.gpu.name}" if self.gpu and self.emulated else self.kind
        allocated = record.allocated_at_failure_bytes
        reserved = record.reserved_at_failure_bytes
        self.held_bytes = record.peak_allocated_bytes if allocated is None else allocated
        self.room_bytes = record.memory_cap_bytes or record.device_bytes
        if not self.room_bytes:
            self.room_bytes = self.gpu.memory_bytes if self.gpu else self.held_bytes
        counted = self.on_gpu or record.memory_cap_bytes is None  # a cap on the CPU counts the run's own only
        self.alive_before_bytes = (record.before_bytes or 0) if counted else 0
        self.unused_bytes = None if reserved is None or allocated is None else reserved - allocated
        self.fragmented = self.on_gpu and 0 < (record.requested_bytes or 0) <= (self.unused_bytes or 0)

    @property
    def phase(self) -> str:
        """Where it failed, which is not always where the peak was: after the last step, only evaluation is left."""
        whole = self.record.steps_done >= self.recipe.training_arguments()["max_steps"]
        return Phase.EVALUATION if whole else self.record.peak_phase

    def cause(self) -> str:
        record = self.record
        phase = f"the {self.phase.replace('_', ' ')} phase" if self.phase else "loading, before training"
        done = f"after {record.steps_done} whole steps" if record.steps_done else "before a step was done"
        lines = [f"{record.label} on {record.model} ran out of memory in {phase}, {done}."]
        lines += [self._request()] if record.requested_bytes is not None else [record.error]
        largest, size = _largest(record.by_category)
        if size and record.peak_allocated_bytes:
            category = largest.replace("_", " ")
            share = size / record.peak_allocated_bytes
            peak = format_bytes(record.peak_allocated_bytes)
            lines.append(f"The largest part of the peak was {category}: {format_bytes(size)}, {share:.0%} of {peak}.")
        if self.fragmented:
            lines.append(
                f"Fragmentation: {format_bytes(self.unused_bytes or 0)} more were reserved and unused, enough for the "
                "request, but not in one piece."
            )
        return "\n".join([*lines, *self._alive_before()])

    def _request(self) -> str:
        record = self.record
        room = "memory cap" if record.memory_cap_bytes else "memory of the device"
        operation = f"{record.failed_operation} asked for" if record.failed_operation else "It asked for"
        limit = f"; the {room} is {format_bytes(self.room_bytes)}" if self.room_bytes else ""
        held = f" while {format_bytes(self.held_bytes)} were in use" if self.held_bytes is not None else ""
        return f"{operation} {format_bytes(record.requested_bytes or 0)} more{held}{limit}."

    def _alive_before(self) -> list[str]:
        before = self.record.before_bytes or 0
        room = self.room_bytes or 0
        if before <= NOTEWORTHY * room or not before:
            return []
        counted = "they took their part of the room" if self.alive_before_bytes else "the cap does not count them"
        return [f"{format_bytes(before)} of tensors were alive before the run began; {counted}."]

    def checklist(self) -> tuple[str, ...]:
        """What holds tensors in this process, and how to let go of them."""
        from workbench.advise.leaks import holders  # which imports torch

        if self.emulated:
            return ("An emulated GPU is the run's own: nothing else takes its memory.",)
        lines = [f"{name} holds {format_bytes(size)} now" for name, size in holders(self.kind)]
        if not lines:
            lines = ["Nothing holds tensors in this process. In a notebook, look there: workbench.holders()."]
        if self.on_gpu:
            others = "Other processes share the device: nvidia-smi lists them."
        else:
            others = "Restarting the kernel frees all of it."
        return (*lines, RELEASE, others)


class _ChangeSearch:
    """Predictions for the recipe and its single changes, against the room that the record had."""

    def __init__(self, failure: _Failure, predict: Predictor, among: Iterable[str] | None) -> None:
        self.failure = failure
        self.recipe = failure.recipe
        self.gpu = failure.gpu
        self.name = self.gpu.name if self.gpu else prediction.CPU
        self.predicted_for = self.gpu.title if self.gpu else THIS_CPU
        self.families = families(self.gpu.compute_capability if self.gpu else None, among)
        self.predict: Callable[[Recipe], Prediction] = lambda recipe: predict(recipe, self.name)
        self.needed_bytes: int | None = None
        self.note = ""

    @property
    def budget_bytes(self) -> int | None:
        """What a recipe may need, its context included: a cap is one for the allocator and leaves the context out."""
        room = self.failure.room_bytes
        if room is None or (self.failure.on_gpu and self.gpu is None):
            return None
        context = self.gpu.context_bytes_estimate if self.gpu and self.failure.record.memory_cap_bytes else 0
        return max(room + context - self.failure.alive_before_bytes, 1)

    def changes(self) -> list[Candidate]:
        """All single changes that fit, the best first; if none does, those that were tried."""
        if self.budget_bytes is None:
            self.note = "Nobody knows how much memory there was, so nothing can be predicted."
            return []
        try:
            changes = self._search(self.budget_bytes)
        except (ConfigurationError, UnavailableError) as error:
            self.note = f"No prediction helps: {error}"
            return []
        # what runs must run on the same kind of device, under the same cap
        options = f"--device {self.failure.device}"
        cap = self.failure.record.memory_cap_bytes
        if cap:
            options += f" --memory-cap {cap / MIB:.6g}MiB" if cap > MIB else f" --memory-cap {cap}B"
        return [replace(candidate, options=options) for candidate in sorted(changes, key=rank)]

    def promising(self) -> list[str]:
        """As the function of this name; what attacks no memory stands at the end."""
        if self.budget_bytes is None:
            return []
        baseline, budget = self._begin(self.budget_bytes)
        attacked = {name: attacked_bytes(f[-1], baseline.predicted) for name, f in self.families.items() if f}
        missing = baseline.needed_bytes - budget
        least = min([missing - BESIDE * baseline.needed_bytes, *sorted(attacked.values())[-SETS:]])
        many = missing < max(attacked.values(), default=0) / 2  # are enough: first those that are soon bisected
        bisections = {name: len(self.families[name]).bit_length() if many else 1 for name in attacked}
        worth = {name: size / bisections[name] for name, size in attacked.items() if size >= least}
        return [*sorted(worth, key=lambda n: -worth[n]), *(n for n in self.families if n not in attacked)]

    def _search(self, room: int) -> list[Candidate]:
        baseline, budget = self._begin(room)
        others = self._allocators(baseline)
        new = Search(self.recipe, budget, self.predict, self.families, most_changes=1).plan()
        candidates = [*new.candidates, *self._other_settings(baseline, budget), *others]
        candidates += self._smaller_evaluation(baseline, budget)
        fitting = [candidate for candidate in candidates if candidate.fits]
        return fitting or [*new.tried[1:]]  # the first has no change

    def _begin(self, room: int) -> tuple[Candidate, int]:
        """The recipe as it is, and what it may need after a change."""
        baseline = Candidate(self.recipe, (), self.predict(self.recipe), room)
        self.needed_bytes = baseline.needed_bytes
        if not baseline.fits:
            return baseline, room
        self.note = (
            f"Predicted to fit as it is, with {format_bytes(baseline.headroom_bytes)} to spare: something else takes "
            f"memory, see below. The changes need at least {MARGIN:.0%} less than the recipe as it is."
        )
        return baseline, int(baseline.needed_bytes * (1 - MARGIN))

    def _smaller_evaluation(self, baseline: Candidate, budget: int) -> list[Candidate]:
        """Where the evaluation failed, the most sequences that it may have at once; or none."""
        from workbench.run.arguments import argument_values

        if self.failure.phase != Phase.EVALUATION:
            return []
        size = argument_values(self.recipe, 0.0)["per_device_eval_batch_size"]
        while size > 1:
            size //= 2
            recipe = replace(self.recipe, evaluation_batch_size=size)
            tried = SmallerEvaluation(recipe, (), self.predict(recipe), budget, baseline)
            if tried.fits:
                return [tried]
        return []

    def _other_settings(self, baseline: Candidate, budget: int) -> list[Candidate]:
        """Of each technique that the recipe has, the gentlest other settings that fit."""
        candidates: list[Candidate] = []
        for now in self.recipe.techniques:
            others = tuple(variant for variant in self.families.get(now.name, ()) if variant != now)
            if others:
                without = replace(self.recipe, techniques=tuple(t for t in self.recipe.techniques if t is not now))
                search = Search(
                    without,
                    budget,
                    self.predict,
                    {now.name: others},
                    most_changes=1,
                    compared_with=baseline,
                )
                candidates += [candidate for candidate in search.plan().candidates if candidate.changes]
        return candidates

    def _allocators(self, baseline: Candidate) -> list[Candidate]:
        """Against fragmentation: techniques that change the allocator, and no category of memory."""
        present = {technique.name for technique in self.recipe.techniques}
        missing = [REGISTRY[name]() for name in self.families if self.failure.fragmented and name not in present]
        changed = [(technique, self.recipe | technique) for technique in missing if technique.allocator_settings()]
        budget = baseline.budget_bytes
        return [Candidate(other, (change,), self.predict(other), budget, baseline) for change, other in changed]

    def plan_command(self) -> str:
        """Looks for sets of changes within the same room. Empty where the room is not known."""
        if self.budget_bytes is None:
            return ""
        command = shlex.split(as_command(self.recipe))
        command[command.index("run")] = "plan"
        return shlex.join([*command, "--gpu", self.name, "--budget", f"{self.budget_bytes}B"])
