"""`run(recipe)`: fine-tune, measure, and leave a record, whatever happens."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from workbench.errors import OutOfMemoryError, UnavailableError
from workbench.measure.allocators import allocator_for, total_bytes
from workbench.measure.categories import format_bytes
from workbench.models.source import resolve_auto
from workbench.paths import runs_folder
from workbench.recipe import Recipe
from workbench.records.record import Record, Status, find_equal
from workbench.records.store import mark_killed, resumable
from workbench.run.checks import check_machine, check_outputs, check_resuming, memory_cap_bytes, prepare
from workbench.run.job import Observer, Options, execute
from workbench.run.world import World, refuse_several_ranks
from workbench.techniques import REGISTRY, Numerics
from workbench.texts import corpus


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
    folder: Path | None = None,
) -> Record:
    """Fine-tune a recipe and measure memory, loss and speed.

    Args:
        device: `"cpu"`, `"cuda"` or `"mps"`; by default the fastest that is there.
        reuse: return the newest `ok` record of the same recipe, text, device and versions, if there is one.
        save: `"merged"` or `"adapter"`, to keep the fine-tuned model in the folder `record.model_path`.
        sample_tokens: continue the beginning of the held-out text by so many tokens, before and after.
        checkpoint_every: write a checkpoint every so many steps; they are removed when the run has ended well.
        resume: go on with the newest unfinished run of this recipe from its last whole checkpoint. On a CPU the
            losses are those of a run that was never interrupted. With nothing to resume it begins at the beginning.
        memory_cap: pretend that the device has no more than this, `"8GiB"` or a number of bytes. On CUDA the allocator
            keeps to it, at no cost. Elsewhere the tracker watches the bytes of tensors in every step, which takes
            time: such a run records no speed.
        longest_first: put the longest examples into the first batch, so that a run that cannot fit fails at once. The
            order of the others is as random as before, but not the same: compare such a run's memory, not its loss.
            Where all examples are equally long, or a stream, it changes nothing, and the record warns of that.
        observe: called after every step with a function that returns the record so far; a KeyboardInterrupt raised
            in it ends the run, as Ctrl-C does.
        folder: where records go; by default `data/runs`.

    Returns:
        The record, status `ok` or `diverged` (the loss stopped being a finite number; the record says at which step).

    Raises:
        ConfigurationError: something in the recipe cannot be used, the run to resume is of another recipe or text, or
            torchrun started this process; nothing was loaded and nothing recorded.
        UnavailableError: this machine cannot run it; recorded as `unavailable`.
        OutOfMemoryError: recorded as `oom`; it says where, and `diagnose(record)` what to change.
            Other failures are recorded as `failed` or `interrupted` and raised.
    """
    refuse_several_ranks()
    folder = folder or runs_folder()
    mark_killed(folder)
    world = World.find(device)
    chosen = world.device
    recipe = replace(recipe, model=resolve_auto(recipe.model, chosen.type))
    facts: dict[str, Any] = {**asdict(world), "data_sha256": corpus.load_corpus(recipe.corpus).sha256}
    cap: dict[str, Any] = {"memory_cap_bytes": memory_cap_bytes(memory_cap, chosen), "longest_first": longest_first}
    if (
        reuse
        and save is None
        and (known := find_equal(recipe, sampled=bool(sample_tokens), folder=folder, **facts, **cap))
    ):
        return known
    check_resuming(recipe, checkpoint_every, resume, longest_first)
    plan = prepare(recipe, chosen)
    check_outputs(plan, save, sample_tokens)
    record = resumable(recipe, folder, **facts) if resume else None
    record = record or Record.start(recipe, model=recipe.model, learning_rate=plan.learning_rate, **facts)
    record = replace(record, **cap, device_bytes=total_bytes(chosen))
    try:
        check_machine(plan)
    except UnavailableError as error:
        replace(record, status=Status.UNAVAILABLE, error=str(error)).save(folder)
        raise
    record = execute(plan, record, Options(folder, save, sample_tokens, checkpoint_every, observe))
    if record.status is Status.OOM:
        # raised here, where no handler is active: a chained traceback would keep the run's tensors alive
        allocator_for(chosen).prepare()  # collects what the run's reference cycles still hold
        raise _out_of_memory(record)
    return record


def _out_of_memory(record: Record) -> OutOfMemoryError:
    """The error with the cure in its words, and beside them where it happened."""
    exact = ", ".join(name for name, t in REGISTRY.items() if t.numerics is Numerics.EXACT and t.attacks)
    cure = f"Use a smaller effective_batch_size or sequence_length, or a technique with the same loss: {exact}."
    room = f"memory cap of {format_bytes(record.memory_cap_bytes)}" if record.memory_cap_bytes else "memory"
    return OutOfMemoryError(
        f"{record.label} did not fit into the {room} of {record.device}: {record.error} {cure} "
        "For a diagnosis: python -m workbench doctor",
        record_id=record.id,
        phase=record.peak_phase,
        operation=record.failed_operation,
        by_category=record.by_category,
        requested_bytes=record.requested_bytes,
        allocated_bytes=record.allocated_at_failure_bytes,
        reserved_bytes=record.reserved_at_failure_bytes,
    )
