"""`run_on_ranks` starts the ranks of a run on this machine, and says what became of them."""

import os
import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from workbench.base.device import check_device
from workbench.base.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.base.launch import Child, LostChildError, start
from workbench.base.paths import check_writable, runs_folder
from workbench.gpus.emulator import place
from workbench.gpus.emulator.card import find_emulated_gpu
from workbench.gpus.emulator.launch import INSIDE, environment
from workbench.journal import store
from workbench.journal.record import Record, Status, read_all
from workbench.recipe import Recipe
from workbench.training.ranks.run import run_as_rank
from workbench.training.ranks.shards import ranks_for
from workbench.training.world import refuse_several_ranks

TERMINAL = 2  # the first rank writes to standard error, and the others into files
# Seconds for the other ranks to say themselves why they end, once one of them has ended.
GRACE_S = 2.0
# Seconds for ranks that wait for another one in vain to end their record, once they are told to.
ENDING_S = 20.0


def run_on_ranks(
    recipe: Recipe,
    *,
    ranks: int | None = 2,
    shard: str = "none",
    device: str | None = None,
    reuse: bool = False,
    folder: Path | None = None,
    **options: Any,
) -> Record:
    """Fine-tune a recipe on several ranks of this machine: a process each, with a GPU each where there are GPUs.

    Args:
        ranks: so many.
        shard: what each rank keeps: `"none"` (DDP), `"gradients"`, `"full"` or `"full_offload"` (FSDP2), `"zero2"`,
            `"zero3"`, `"zero2_offload"` or `"zero3_offload"` (DeepSpeed).
        device: as `run` has it; `"emulated:h100"` emulates so many cards.
        reuse: is refused.
        options: `save`, `sample_tokens`, `memory_cap` and `longest_first`, as `run` has them.

    Returns:
        The one record. Its memory is that of the rank with the highest peak; `record.ranks` has the peak of each.

    Raises:
        ConfigurationError: the ranks cannot share the batch, a technique cannot be sharded, checkpoints are asked for,
            or as `run`.
        UnavailableError: there are fewer GPUs than ranks, or DeepSpeed is not installed; and as `run`.
        WorkbenchError: a rank ended without a word; the run is on record as `killed`.
    """
    refuse_several_ranks()
    if reuse:
        raise ConfigurationError("ranks: a run on several is not taken from what is on record. Leave out --reuse.")
    count = ranks_for(recipe, ranks, shard, **options).count
    variables: dict[str, str] = dict(os.environ)
    path: list[str] = []
    card = find_emulated_gpu(device or "")
    if card:
        variables = environment(card, count)
        path = [str(INSIDE), *place.python_path()]
        device = "cuda"
    gpus = torch.cuda.device_count()
    if not card and gpus and device in (None, "cuda") and gpus < count:
        raise UnavailableError(f"ranks: {count} were asked for, and this machine has {gpus} GPUs. Use --device cpu.")
    check_device(device)
    folder = folder or runs_folder()
    check_writable(folder)
    children: list[Child] = []
    for rank, rank_variables in enumerate(variables_of_ranks(count)):
        child = start(
            run_as_rank,
            recipe,
            shard=shard,
            device=device,
            folder=folder,
            environment=variables | rank_variables,
            path=path,
            output=None if rank else TERMINAL,
            name=f"rank {rank}",
            **options,
        )
        children.append(child)
    first_pid = children[0].process.pid
    answers = answers_of(children)
    store.mark_killed(folder)
    record = None
    for other in read_all(folder, containing=rf'"pid"\s*:\s*{first_pid}\b'):
        if other.owner.get("pid") == first_pid:
            record = other  # the newest
    if answers is None:
        # It is chance which rank ends first; the others lose it, and may have marked the run as killed.
        if record and record.status is Status.KILLED:
            replace(record, status=Status.INTERRUPTED, error="interrupted by the user").save(folder)
        raise KeyboardInterrupt
    failures = {}
    for rank, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            failures[rank] = answer
    if failures:
        raise choose_failure(failures, children, record)
    first: Record = answers[0]
    return first


def variables_of_ranks(count: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank: which one it is, and where the ranks find each other."""
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count))),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def answers_of(children: Sequence[Child]) -> list[Any] | None:
    """Wait until all ranks have ended, and return what each returned or raised; None if they were interrupted.

    When one fails, the others wait for it in vain: they are told to end, and end their record.
    """
    interrupted = False
    with ThreadPoolExecutor(len(children)) as pool:
        futures = [pool.submit(child.answer) for child in children]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            wait(futures, timeout=GRACE_S)
        except KeyboardInterrupt:
            interrupted = True
        for child, future in zip(children, futures, strict=True):
            if not future.done():
                child.process.terminate()
        wait(futures, timeout=ENDING_S)
        for child in children:
            child.kill()
        wait(futures)
        for child in children:
            child.close()
    if interrupted:
        return None
    return [future.exception() or future.result() for future in futures]


def choose_failure(
    failures: dict[int, BaseException], children: Sequence[Child], record: Record | None
) -> BaseException:
    """Return the error that says most: what a rank has said itself; or the record; or how the first rank ended that did
    so by itself and without a word.

    Args:
        failures: what ranks raised, by their numbers.
    """
    for error in failures.values():
        if isinstance(error, WorkbenchError) and not isinstance(error, LostChildError):
            return error
    if record is not None and record.status not in (Status.KILLED, Status.RUNNING):
        return WorkbenchError(f"ranks: the run {record.id} is on record as {record.status}: {record.error}")
    first = min(failures)
    for rank, error in failures.items():
        was_told_to = children[rank].process.returncode == -signal.SIGTERM
        if isinstance(error, LostChildError) and not was_told_to:  # it ended by itself
            first = rank
            break
    reason = str(failures[first]).strip().splitlines()[-1].removeprefix(f"rank {first}: ")
    message = f"ranks: rank {first}: {reason}"
    if record:
        message += f" The run is on record as killed: {record.id}."
    return WorkbenchError(message)
