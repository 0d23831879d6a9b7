"""One run on several ranks: every one executes the recipe on its part of the batch, the first keeps the record."""

import json
import signal
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from workbench.base.categories import Category
from workbench.base.patches import changed_environment
from workbench.journal import store
from workbench.journal.record import Record, Status
from workbench.measure.meter import MemoryReport, Meter
from workbench.recipe import Recipe
from workbench.training.job import Job, prepare
from workbench.training.place import Place, load_for
from workbench.training.ranks import zero
from workbench.training.ranks.shard import ResizableTracker, fully_sharded, gathered, mesh_of, whole
from workbench.training.ranks.shards import Ranks
from workbench.training.ranks.world import from_all, from_first, join
from workbench.training.run import executed
from workbench.training.trainer import SeamTrainer

MEMORY = [field.name for field in fields(MemoryReport)]
# in the record of them all
OF_EACH = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_phase", "by_category")
SUMMED = ("tokens_seen", "padding_tokens", "tokens_per_s")  # over the ranks
LOST = "another rank ended without a word"


class RankMeter(Meter):
    """Weights that are gathered count as weights, as long as they are whole.

    Attributes:
        others: asked for what an engine keeps beside the model.
        buckets: of DDP, by their numbers; they live as long as the Trainer's model.
    """

    tracker_kind = ResizableTracker

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.others: Callable[[], Mapping[Category, list[torch.Tensor]]] = dict
        self.buckets: dict[int, weakref.ref[torch.Tensor]] = {}
        parameter: Any = next(model.parameters(), None)
        if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
            # What this rank keeps of the model waits on the host.
            options["device"] = torch.device(parameter.device_mesh.device_type)
        super().__init__(model, **options)

    def _owned(self) -> dict[Category, list[torch.Tensor]]:
        owned = super()._owned()
        owned[Category.WEIGHTS] += gathered(self._model)
        for reference in self.buckets.values():
            bucket = reference()
            if bucket is not None:
                owned[Category.GRADIENTS].append(bucket)
        for category, tensors in self.others().items():
            owned[category] += tensors
        return owned

    def label_now(self) -> None:
        """Within a phase: what will be gone when it ends."""
        if self._attributing:
            self._label_owned()


class RankPlace(Place):
    """One rank. What is asked of all is asked of each in the same order, or they would wait for each other."""

    meter_kind = RankMeter

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.ranks = Ranks(job.world.world_size, job.world.shard)
        self.trainer_kind = zero.trainer_of(job.world.shard)

    # ---- the record, which the first rank keeps ----

    def begin(self) -> None:
        begun = from_first(partial(store.begin, self.record, self.job.folder))
        self.record = replace(begun, rank=self.record.rank)

    def write(self) -> None:
        if self.record.rank == 0:
            super().write()

    def end(self) -> Record:
        """That of the rank with the highest peak, with those of all; or why it failed."""
        with suppress(OSError):
            if self.record.status in (Status.OK, Status.DIVERGED):
                self.record = joined(self.record)
            elif self.record.status is not Status.UNAVAILABLE:
                self.record = with_reason(self.record, self.run_folder, self.error)
        if self.record.rank == 0:
            super().end()
        return self.record

    # ---- the model, of which a rank may keep a part ----

    def placed(self, model: PreTrainedModel) -> PreTrainedModel:
        return part_of(model, self.ranks, self.job.device.kind)

    def trained_facts(self, model: PreTrainedModel, trainer: SeamTrainer) -> dict[str, Any]:
        facts = super().trained_facts(model, trainer)
        facts["dtype"] = getattr(trainer, "dtype", facts["dtype"])
        return facts

    def save(self, model: PreTrainedModel) -> None:
        """Written by the first rank, from a model of its own in host memory where this one is sharded."""
        if self.job.save is None:
            return
        values = zero.whole_weights(model) if self.ranks.engine == "deepspeed" else whole(model.state_dict())
        if self.record.rank != 0:
            return
        if self.ranks.engine != "ddp":
            model = load_for(self.job, self.values)
            model.load_state_dict(values)
        super().save(model)


def part_of(model: PreTrainedModel, ranks: Ranks, device_kind: str) -> PreTrainedModel:
    """What one of the ranks keeps of a model, where it keeps it."""
    if ranks.engine == "fsdp":
        return fully_sharded(model, ranks.shard, mesh_of(device_kind, ranks.count))
    if ranks.engine == "deepspeed":
        model = zero.partitioned(model, ranks.shard)
    return model.to(device_kind)  # type: ignore[arg-type, no-any-return]  # the stub takes no device


def run_as_rank(
    recipe: Recipe,
    *,
    shard: str,
    device: str | None,
    folder: Path,
    **options: Any,
) -> Record:
    """`workbench.run` in a process that `run_on_ranks` has started as one of several ranks.

    The effective batch is shared among them, and losses are those of one process, up to rounding. The first rank
    returns, and keeps, the one record: its memory is that of the rank with the highest peak, `ranks` has them all.

    Args:
        shard: what each rank keeps, a name of `shards.toml`.
        options: those of the gate.

    Raises as `run` does.
    """
    signal.signal(signal.SIGTERM, end_this_rank)
    was_joined = dist.is_initialized()  # by a program that runs several recipes
    try:
        with changed_environment():  # joining adds variables
            world = join(device, shard)
            if Ranks(world.world_size, shard).engine == "deepspeed":
                zero.set_accelerator(world.device.kind)
            record = executed(RankPlace(prepare(recipe, world, folder=folder, **options)))
        # gloo's threads let go of what they have sent, which they cannot while the group is destroyed
        dist.barrier()
        return record
    finally:
        zero.forget()
        if not was_joined and dist.is_initialized():
            dist.destroy_process_group()


def end_this_rank(*_: Any) -> None:
    """The launcher ends the ranks that are left when one has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # told twice, it still ends its record
    raise SystemExit(LOST)


def is_lost(error: BaseException | None) -> bool:
    """Whether this rank ended because another one had ended."""
    return isinstance(error, SystemExit) or any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


def joined(record: Record) -> Record:
    """With what all ranks have measured."""
    ranks = from_all({name: getattr(record, name) for name in (*MEMORY, *SUMMED)})
    highest = max(ranks, key=lambda facts: facts["peak_allocated_bytes"])
    of_all: dict[str, Any] = {name: highest[name] for name in MEMORY}
    for name in SUMMED:
        values = [facts[name] for facts in ranks]
        if None not in values:
            of_all[name] = sum(values)
    of_each = []
    for rank, facts in enumerate(ranks):
        of_each.append({"rank": rank, **{name: facts[name] for name in OF_EACH}})
    return replace(record, **of_all, ranks=of_each)


def with_reason(record: Record, run_folder: Path, error: BaseException | None) -> Record:
    """What went wrong: with this rank, or, where this one only lost another, with that one. Ranks tell each other in
    files of the run's folder."""
    ending = {"status": record.status, "error": f"rank {record.rank}: {record.error}"}
    if is_lost(error):
        ending = {"status": Status.KILLED, "error": LOST}
        for path in sorted(run_folder.glob("rank-*.json"))[:1]:
            ending = json.loads(path.read_text())
    elif record.rank != 0:
        run_folder.mkdir(parents=True, exist_ok=True)
        (run_folder / f"rank-{record.rank}.json").write_text(json.dumps(ending))
    return replace(record, status=Status(ending["status"]), error=ending["error"])
