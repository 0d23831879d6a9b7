"""`diagnose(record)`: why a run ran out of memory, and the smallest single changes that are predicted to fit.

The cause is read off the record. The changes are found by the planner's search, limited to one change; and of each
technique that the recipe has already, other settings are tried in its place. No technique is known here by name.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from workbench.advise.plan import Candidate, PredictedMemory, choose_families, families, rank, search, whole_run
from workbench.errors import ConfigurationError, UnavailableError
from workbench.gpus.catalogue import of_device
from workbench.measure.categories import format_bytes
from workbench.measure.leaks import holders
from workbench.predict import predict as prediction
from workbench.recipe import Recipe
from workbench.records.record import Record, Status, read_all
from workbench.techniques import REGISTRY, Technique

MARGIN = 0.1  # asked of a change where the prediction says that the recipe fits as it is, but the run has not
NOTEWORTHY = 0.01  # part of the room: less than this, alive before the run, is not worth a word

Predictor = Callable[[Recipe, str], PredictedMemory]


@dataclass(frozen=True)
class Change:
    """One change to the recipe that failed, and what the changed recipe is predicted to need.

    `saved_bytes` is against the prediction for the recipe as it was; `words` begin with "Turn on" or "Set".
    """

    words: str
    recipe: Recipe
    command: str
    predicted_bytes: int
    saved_bytes: int
    fits: bool
    numerics: str
    extra_compute: float
    gives_up: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**vars(self), "recipe": self.recipe.to_dict()}


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
    changes: tuple[Change, ...]
    closest: Change | None
    plan_command: str
    note: str
    checklist: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        nested = {"changes": [change.to_dict() for change in self.changes], "checklist": list(self.checklist)}
        return {**vars(self), **nested, "closest": self.closest.to_dict() if self.closest else None}

    def as_text(self) -> str:
        """The diagnosis as people read it."""
        lines = [f"record {self.record_id}", "", "Cause", *_indented(self.cause.splitlines()), "", "What to change"]
        lines += _indented([self.note] if self.note else [])
        if self.predicted_bytes is not None and not self.note:
            lines += _indented([f"As it is, the recipe is predicted to need {format_bytes(self.predicted_bytes)}."])
        if self.changes:
            lines += _indented([f"Each of these alone is enough, as predicted for {self.predicted_for}:"])
        for number, change in enumerate(self.changes, start=1):
            lines += ["", *_entry(f"{number}. ", change)]
        if self.closest:
            lines += ["", "  No single change is enough. The closest:", "", *_entry("", self.closest)]
        if self.closest or not self.changes:
            lines += ["", "  For several changes together:", f"     {self.plan_command}"]
        return "\n".join([*lines, "", "If it should have fitted", *_indented(f"- {line}" for line in self.checklist)])


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _entry(number: str, change: Change) -> list[str]:
    return [
        f"  {number}{change.words}",
        f"     needs {format_bytes(change.predicted_bytes)}, {format_bytes(change.saved_bytes)} less; "
        f"loss {change.numerics}; {change.extra_compute:+.0%} compute",
        f"     gives up  {change.gives_up}",
        f"     {change.command}",
    ]


def newest_out_of_memory(record_id: str | None = None, folder: Path | None = None) -> Record:
    """The record of that id, or the newest that ran out of memory.

    Raises:
        ConfigurationError: there is none.
    """
    found = read_all(folder)
    if record_id is None:
        found = [record for record in found if record.status is Status.OOM]
    else:
        found = [record for record in found if record.id == record_id]
    if not found:
        which = f"no record {record_id!r}" if record_id else "no run that ran out of memory on record"
        raise ConfigurationError(f"doctor: there is {which}. See `python -m workbench records`.")
    return found[-1]


def diagnose(
    record: Record,
    *,
    among: Iterable[str] | None = None,
    predict: Predictor | None = None,
) -> Diagnosis:
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
    patient = _Patient(record)
    advice = _Advice(patient, predict or prediction.predict, among)
    changes = advice.changes()
    fitting = tuple(change for change in changes if change.fits)
    largest, size = _largest(record.by_category)
    return Diagnosis(
        record_id=record.id,
        cause=patient.cause(),
        phase=record.peak_phase,
        operation=record.failed_operation,
        largest_category=largest,
        largest_bytes=size,
        room_bytes=patient.room_bytes,
        requested_bytes=record.requested_bytes,
        before_bytes=record.before_bytes,
        fragmented=patient.fragmented,
        predicted_for=advice.predicted_for,
        predicted_bytes=advice.needed_bytes,
        changes=fitting,
        closest=None if fitting or not changes else min(changes, key=lambda change: change.predicted_bytes),
        plan_command=advice.plan_command(),
        note=advice.note,
        checklist=patient.checklist(),
    )


def _largest(by_category: Mapping[str, int]) -> tuple[str, int | None]:
    return max(by_category.items(), key=lambda entry: entry[1], default=("", None))


class _Patient:
    """What the record says."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.recipe = Recipe.from_dict(record.recipe)
        self.kind = record.device_kind or "cpu"
        self.on_gpu = self.kind == "cuda"
        self.gpu = of_device(record.device_name, record.device_bytes) if self.on_gpu else None

    @property
    def held_bytes(self) -> int | None:
        """What was alive when the request came."""
        if self.record.allocated_at_failure_bytes is not None:
            return self.record.allocated_at_failure_bytes
        return self.record.peak_allocated_bytes

    @property
    def room_bytes(self) -> int | None:
        """The cap; or what the GPU has; or, where nobody says, what the run had before it was refused more."""
        known = self.record.memory_cap_bytes or self.record.device_bytes
        return known or (self.gpu.memory_bytes if self.gpu else self.held_bytes)

    @property
    def alive_before_bytes(self) -> int:
        """What was alive before the run and counted against the room: a cap on the CPU counts the run's own only."""
        counted = self.on_gpu or self.record.memory_cap_bytes is None
        return (self.record.before_bytes or 0) if counted else 0

    @property
    def unused_bytes(self) -> int | None:
        """Reserved by PyTorch's allocator and not in use."""
        reserved, allocated = self.record.reserved_at_failure_bytes, self.record.allocated_at_failure_bytes
        return None if reserved is None or allocated is None else reserved - allocated

    @property
    def fragmented(self) -> bool:
        """The request would have fitted into what was reserved and unused, had that been in one piece."""
        unused, requested = self.unused_bytes, self.record.requested_bytes
        return self.on_gpu and unused is not None and requested is not None and 0 < requested <= unused

    def cause(self) -> str:
        record = self.record
        phase = f"the {record.peak_phase.replace('_', ' ')} phase" if record.peak_phase else "loading, before training"
        done = f"after {record.steps_done} whole steps" if record.steps_done else "before a step was done"
        lines = [f"{record.label} on {record.model} ran out of memory in {phase}, {done}."]
        lines += [self._request()] if record.requested_bytes is not None else [record.error]
        largest, size = _largest(record.by_category)
        if size and record.peak_allocated_bytes:
            lines.append(
                f"The largest part of the peak was {largest.replace('_', ' ')}: {format_bytes(size)}, "
                f"{size / record.peak_allocated_bytes:.0%} of {format_bytes(record.peak_allocated_bytes)}."
            )
        return "\n".join([*lines, *self._fragmentation(), *self._alive_before()])

    def _request(self) -> str:
        record = self.record
        room = "memory cap" if record.memory_cap_bytes else "memory of the device"
        operation = f"{record.failed_operation} asked for" if record.failed_operation else "It asked for"
        limit = f"; the {room} is {format_bytes(self.room_bytes)}" if self.room_bytes else ""
        held = f" while {format_bytes(self.held_bytes)} were in use" if self.held_bytes is not None else ""
        return f"{operation} {format_bytes(record.requested_bytes or 0)} more{held}{limit}."

    def _fragmentation(self) -> list[str]:
        if not self.fragmented or self.unused_bytes is None:
            return []
        return [
            f"Fragmentation: {format_bytes(self.unused_bytes)} more were reserved and unused, enough for the request, "
            "but not in one piece."
        ]

    def _alive_before(self) -> list[str]:
        before, room = self.record.before_bytes or 0, self.room_bytes or 0
        if before <= NOTEWORTHY * room or not before:
            return []
        counted = "they took their part of the room" if self.alive_before_bytes else "the cap does not count them"
        return [f"{format_bytes(before)} of tensors were alive before the run began; {counted}."]

    def checklist(self) -> tuple[str, ...]:
        """What holds tensors in this process, and how to let go of them."""
        lines = [f"{name} holds {format_bytes(size)} now" for name, size in holders(self.kind)]
        lines = lines or ["Nothing holds tensors in this process. In a notebook, look there: workbench.holders()."]
        return (
            *lines,
            "workbench.release() drops the last exception's frames and the results of cells (Out, _); `del` your own "
            "variables: models, optimizers, trainers, losses that still have their graph.",
            "Other processes share the device: nvidia-smi lists them."
            if self.on_gpu
            else "Restarting the kernel frees all of it.",
        )


class _Advice:
    """Predictions for the recipe and its changes, against the room that the record had."""

    def __init__(self, patient: _Patient, predict: Predictor, among: Iterable[str] | None) -> None:
        self.patient, self.note = patient, ""
        self.gpu = patient.gpu
        self.name = self.gpu.name if self.gpu else prediction.CPU
        self.predicted_for = self.gpu.title if self.gpu else "this machine's CPU"
        self.families = choose_families(families(self.gpu.compute_capability if self.gpu else None), among)
        self.needed_bytes: int | None = None
        self._ask, self._compute = predict, 0.0

    def predict(self, recipe: Recipe) -> PredictedMemory:
        return self._ask(recipe, self.name)

    @property
    def budget_bytes(self) -> int | None:
        """What a recipe may need, its context included: a cap is one for the allocator and leaves the context out."""
        room = self.patient.room_bytes
        if room is None or (self.patient.on_gpu and self.gpu is None):
            return None
        context = self.gpu.context_bytes_estimate if self.gpu and self.patient.record.memory_cap_bytes else 0
        return max(room + context - self.patient.alive_before_bytes, 1)

    def changes(self) -> list[Change]:
        """All single changes that fit, the best first; if none does, those that were tried."""
        budget = self.budget_bytes
        if budget is None:
            self.note = "Nobody knows how much memory there was, so nothing can be predicted."
            return []
        try:
            found = self._search(budget)
        except (ConfigurationError, UnavailableError) as error:
            self.note = f"No prediction helps: {error}"
            return []
        return [self._change(candidate) for candidate in sorted(found, key=rank)]

    def _search(self, budget: int) -> list[Candidate]:
        recipe = self.patient.recipe
        forecast = self.predict(recipe)
        baseline = Candidate(recipe, (), forecast, budget, 0.0)
        self.needed_bytes, self._compute = baseline.needed_bytes, whole_run(recipe, forecast)
        others = self._allocators(recipe, budget)
        if baseline.fits:
            self.note = (
                f"Predicted to fit as it is, with {format_bytes(baseline.headroom_bytes)} to spare: something else "
                f"takes memory, see below. The changes need at least {MARGIN:.0%} less than the recipe as it is."
            )
            budget = int(baseline.needed_bytes * (1 - MARGIN))
        new = search(recipe, budget, self.predict, families=self.families, most_changes=1)
        tried = [*new.tried[1:]]  # the first is the recipe as it is
        fitting = [*new.candidates, *self._other_settings(recipe, budget), *others]
        return [candidate for candidate in fitting if candidate.fits] or tried

    def _other_settings(self, recipe: Recipe, budget: int) -> list[Candidate]:
        """Of each technique that the recipe has, the gentlest other settings that fit."""
        found = []
        for now in recipe.techniques:
            if now.name not in self.families:
                continue
            without = replace(recipe, techniques=tuple(t for t in recipe.techniques if t is not now))
            others = tuple(variant for variant in self.families[now.name] if variant != now)
            tried = search(without, budget, self.predict, families={now.name: others}, most_changes=1)
            found += [self._relative(candidate) for candidate in tried.candidates if candidate.changes]
        return found

    def _relative(self, candidate: Candidate) -> Candidate:
        """Its compute against that of the recipe as it was."""
        compute = whole_run(candidate.recipe, candidate.forecast)
        return replace(candidate, extra_compute=compute / self._compute - 1 if self._compute else 0.0)

    def _allocators(self, recipe: Recipe, budget: int) -> list[Candidate]:
        """Against fragmentation: techniques that change the allocator, and no category of memory."""
        if not self.patient.fragmented:
            return []
        missing = [REGISTRY[name]() for name in self.families if name not in {t.name for t in recipe.techniques}]
        changed = [(technique, recipe | technique) for technique in missing if technique.allocator_settings()]
        return [Candidate(other, (technique,), self.predict(other), budget, 0.0) for technique, other in changed]

    def _change(self, candidate: Candidate) -> Change:
        (change,) = candidate.changes
        return Change(
            words=_words(change, self.patient.recipe),
            recipe=candidate.recipe,
            command=self._command(candidate.recipe),
            predicted_bytes=candidate.needed_bytes,
            saved_bytes=(self.needed_bytes or 0) - candidate.needed_bytes,
            fits=candidate.fits,
            numerics=str(candidate.numerics),
            extra_compute=candidate.extra_compute,
            gives_up=change.costs,
        )

    def _command(self, recipe: Recipe) -> str:
        """On the same kind of device, under the same cap."""
        record = self.patient.record
        cap = f" --memory-cap {record.memory_cap_bytes}B" if record.memory_cap_bytes else ""
        return f"{recipe.command()} --device {self.patient.kind}{cap}"

    def plan_command(self) -> str:
        """Looks for sets of changes within the same room. Empty if nobody knows the room."""
        if self.budget_bytes is None:
            return ""
        words = shlex.split(self.patient.recipe.command())
        words[words.index("run")] = "plan"
        return shlex.join([*words, "--gpu", self.name, "--budget", f"{self.budget_bytes}B"])


def _words(change: Technique, recipe: Recipe) -> str:
    """What to do, in one short line."""
    settings = ", ".join(f"{name}={value}" for name, value in _telling(change).items())
    before = next((t for t in recipe.techniques if t.name == change.name), None)
    if before is None:
        return f"Turn on {change.name}" + (f" with {settings}" if settings else "")
    changed = [(n, v, before.settings()[n]) for n, v in change.settings().items() if v != before.settings()[n]]
    return f"Set {change.name} " + ", ".join(f"{name} to {value} (now {old})" for name, value, old in changed)


def _telling(change: Technique) -> dict[str, Any]:
    """The setting of a technique with one; of others those that differ from their defaults."""
    settings = change.settings()
    defaults = {field.name: field.default for field in fields(change)}  # type: ignore[arg-type]
    return settings if len(settings) == 1 else {n: v for n, v in settings.items() if v != defaults[n]}
