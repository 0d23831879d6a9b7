"""Starting the ranks of a run on this machine, and saying what became of them."""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes
from torch.distributed.elastic.utils.distributed import get_free_port

from workbench.errors import ConfigurationError, OutOfMemoryError, UnavailableError, WorkbenchError
from workbench.gpus.emulator.card import emulated_card
from workbench.gpus.emulator.launch import environment
from workbench.measure.device import check_device
from workbench.paths import PIN, runs_folder
from workbench.ranks import launched
from workbench.ranks.run import is_lost, run_as_rank
from workbench.ranks.shards import Ranks
from workbench.recipe import Recipe
from workbench.records import store
from workbench.records.record import Record, Status, read_all
from workbench.run.world import refuse_several_ranks

ERRORS = {kind.exit_code: kind for kind in (WorkbenchError, ConfigurationError, UnavailableError, OutOfMemoryError)}
START = f"{PIN}; from workbench.ranks.launch import answer; answer()"
HANDLED = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


def on_ranks(recipe: Recipe, *, ranks: int | None, shard: str, reuse: bool = False, **options: Any) -> Record:
    """As one of the ranks that a launcher has started, or by starting them. Raises as `run_on_ranks`."""
    if reuse:
        raise ConfigurationError("ranks: a run on several is not taken from what is on record. Leave out --reuse.")
    if launched():
        if ranks not in (None, size := int(os.environ["WORLD_SIZE"])):
            raise ConfigurationError(f"ranks: the launcher started {size}, not {ranks}. Leave out --ranks.")
        return run_as_rank(recipe, shard=shard, **options)
    if ranks is None:
        raise ConfigurationError("shard: among how many ranks? Add --ranks 2, or start it under torchrun.")
    return run_on_ranks(recipe, ranks=ranks, shard=shard, **options)


def run_on_ranks(
    recipe: Recipe, *, ranks: int = 2, shard: str = "none", device: str | None = None, folder: Path | None = None,
    **options: Any,
) -> Record:  # fmt: skip
    """Fine-tune a recipe on several ranks of this machine: a process each, with a GPU each where there are GPUs.

    Args:
        ranks: so many.
        shard: what each rank keeps: `"none"` (DDP), `"gradients"`, `"full"` or `"full_offload"` (FSDP2), `"zero2"`,
            `"zero3"`, `"zero2_offload"`, `"zero3_offload"` or `"zero3_nvme"` (DeepSpeed).
        device: as `run` has it; `"emulated:h100"` emulates so many cards.
        options: `save`, `sample_tokens`, `checkpoint_every`, `resume`, `memory_cap` and `longest_first`, as `run` has
            them.

    Returns:
        The one record. Its memory is that of the rank with the highest peak; `record.ranks` has the peak of each.

    Raises:
        ConfigurationError: the ranks cannot share the batch, a technique cannot be sharded, or as `run`.
        UnavailableError: there are fewer GPUs than ranks, or DeepSpeed is not installed; and as `run`.
        WorkbenchError: a rank ended without a word; the run is on record as `killed`.
    """
    refuse_several_ranks()
    Ranks(ranks, shard).check(recipe)
    Ranks(ranks, shard).require()
    told: dict[str, str] = {}
    if card := emulated_card(device or ""):
        told, device = environment(card, ranks), "cuda"
    elif (seen := torch.cuda.device_count()) and device in (None, "cuda") and seen < ranks:
        raise UnavailableError(f"ranks: {ranks} were asked for, and this machine has {seen} GPUs. Use --device cpu.")
    check_device(device)
    folder = folder or runs_folder()
    request = {"recipe": recipe.to_dict(), "folder": str(folder), "shard": shard, "device": device, **options}
    with tempfile.TemporaryDirectory() as scratch:
        (place := Path(scratch)).joinpath("request.json").write_text(json.dumps(request))
        first, failures = _ended(ranks, place, told)
        store.mark_killed(folder)
        record = next((r for r in reversed(read_all(folder)) if r.owner.get("pid") == first), None)
        if failures is None:
            _interrupt(record, folder)
        if record is None or failures:
            raise _error(record, place, failures or {})
    return record


def _ended(ranks: int, place: Path, told: dict[str, str]) -> tuple[int, dict[int, Any] | None]:
    """The first rank's process, and the ranks that failed, when all have ended; None if they were interrupted."""
    with _own_signals():
        processes = _started(ranks, place, told)
        try:
            return processes.pids()[0], dict(processes.wait().failures)
        except SignalException:
            return processes.pids()[0], None
        finally:
            processes.close()


def _interrupt(record: Record | None, folder: Path) -> NoReturn:
    """As Ctrl-C does: which rank hears of it first is chance."""
    if record is not None and record.status is Status.KILLED:
        replace(record, status=Status.INTERRUPTED, error="interrupted by the user").save(folder)
    raise KeyboardInterrupt


def _started(ranks: int, place: Path, told: dict[str, str]) -> Any:
    """The ranks' processes. The first writes to the terminal, the others into files."""
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", **told}
    shared |= {"MASTER_PORT": str(get_free_port()), "TOKENIZERS_PARALLELISM": "false"}
    threads = str(max(1, torch.get_num_threads() // ranks))
    shared |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    envs = {rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)}
    logs = DefaultLogsSpecs(str(place), redirects={rank: Std.ALL if rank else Std.NONE for rank in envs})
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # it is said below
    return start_processes("rank", sys.executable, dict.fromkeys(envs, ("-c", START, str(place))), envs, logs)


@contextmanager
def _own_signals() -> Iterator[None]:
    """PyTorch's launcher takes signals over, and does not give them back."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        with suppress(ValueError):  # in another thread than the main one, where it has taken none
            for number, handler in before.items():
                signal.signal(number, handler)


def _error(record: Record | None, place: Path, failures: dict[int, Any]) -> WorkbenchError:
    """What a rank has said of itself; or how those ended that said nothing."""
    for path in sorted(place.glob("answer-*.json")):
        answer = json.loads(path.read_text())
        return ERRORS[answer["exit_code"]](answer["error"])
    if record is not None and record.status not in (Status.KILLED, Status.RUNNING):
        return WorkbenchError(f"ranks: the run {record.id} is on record as {record.status}: {record.error}")
    first = {rank: each for rank, each in failures.items() if each.exitcode not in (1, -signal.SIGTERM)} or failures
    told = [f"rank {rank} ended with {_how(each, place)}" for rank, each in sorted(first.items())]
    known = f" The run is on record as killed: {record.id}." if record else ""
    return WorkbenchError(f"ranks: {'; '.join(told) or 'no rank left a record'}.{known}")


def _how(failure: Any, place: Path) -> str:
    lines = [line for path in place.rglob(f"{failure.local_rank}/stderr.log") for line in path.read_text().splitlines()]
    words = f" ({lines[-1].strip()})" if lines else ""
    return (failure.signal_name() if failure.exitcode < 0 else f"exit status {failure.exitcode}") + words


# ---- in the process of a rank ----


def answer() -> None:
    """Run what is asked for; where it is refused, write down why."""
    place = Path(sys.argv[-1])
    request = json.loads((place / "request.json").read_text())
    recipe, folder = Recipe.from_dict(request.pop("recipe")), Path(request.pop("folder"))
    try:
        with redirect_stdout(sys.stderr):
            run_as_rank(recipe, folder=folder, **request)
    except WorkbenchError as error:
        told = {"exit_code": error.exit_code, "error": str(error)}
        (place / f"answer-{os.environ['RANK']}.json").write_text(json.dumps(told))
        sys.exit(error.exit_code)
    except BaseException as error:
        if is_lost(error):
            sys.exit(1)  # the one that ended first tells why
        raise
