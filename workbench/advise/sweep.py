"""Many runs on many machines: a grid of recipes and seeds as tasks on Ray, one run in one fresh process, the records of
all of them in one folder that every node shares.

Ray decides where and when a run goes: a task asks for a GPU, or for as many cores as it has threads. A task whose node
is lost is begun again by Ray; the run itself takes a record that is there (`reuse`), so that nothing is made twice, in
one sweep or in the next. A run that fails is not tried again: its record is an answer.
"""

import logging
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from workbench.advise.compare import Comparison
from workbench.advise.frame import to_frame
from workbench.base.errors import ConfigurationError, OutOfMemoryError, UnavailableError, brief, in_a_line
from workbench.base.paths import check_writable, read_toml, runs_folder
from workbench.base.settings import named
from workbench.journal import store
from workbench.journal.record import Record, Status
from workbench.recipe import FILES, Recipe
from workbench.texts.corpus import load_corpus

EXAMPLE = 'Write for example seeds = 3, below it [recipe] with model = "gpt2-tiny", and [grid] with steps = [50, 100].'
CORES = 2  # of a Ray that is started here
STARTED_HERE = {"include_dashboard": False, "object_store_memory": 100 * 2**20}  # through which go a few words
RETRIES = 3  # of a task whose node or process is lost; Ray's own default
KNOCK_S = 5.0  # to find out whether anything listens at an address
END_S = 60.0  # for runs to write their records when the sweep ends
LEFT_S = 300.0  # without a run that ends, before the nodes are looked at
CURE = "Name one that every node has at the same path, in the environment variable WORKBENCH_RUNS."


@dataclass(frozen=True)
class Outcome:
    """How a recipe of the grid ended: the status of its record, or `lost`; and why, if it is not `ok`."""

    recipe: Recipe
    status: str
    reason: str = ""
    record_id: str = ""


def read_grid(path: Path) -> list[Recipe]:
    """The recipes of a grid file: every value of `[grid]` with every other in the place of the recipe's own, by seed.

    Raises:
        ConfigurationError: no TOML, an unknown name, what is no list, or a recipe that is refused, with its values.
    """
    tables = named(read_toml(path, "sweep", EXAMPLE), ("seeds", "recipe", "grid"), f"sweep: {path}", "table")
    names = [*(field.name for field in fields(Recipe)), FILES]
    base = named(tables.get("recipe", {}), names, f"sweep: {path}, recipe", "field")
    axes = named(tables.get("grid", {}), names, f"sweep: {path}, grid", "field")
    seeds = tables.get("seeds", 1)
    if type(seeds) is not int or seeds < 1:
        raise ConfigurationError(f"sweep: {path}: seeds must be an integer of at least 1, got {brief(seeds)}.")
    if "seeds" in tables:
        axes = {"seed": list(range(seeds)), **axes}
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigurationError(f"sweep: {path}: {name} must be a list in [grid], got {brief(values)}. {EXAMPLE}")
    recipes = []
    for values in product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        try:
            recipes.append(Recipe.from_dict(base | row))
        except ConfigurationError as error:
            raise ConfigurationError(f"sweep: {path}, with {row}: {error}") from None
    return list(dict.fromkeys(recipes))  # the same one once


def sweep(
    recipes: list[Recipe],
    *,
    on: str | None = None,
    device: str | None = None,
    threads: int = 1,
    folder: Path | None = None,
) -> list[Outcome]:
    """Run every recipe as a task on Ray, and say how each has ended. Ctrl-C ends the tasks and leaves their records.

    Args:
        on: a cluster's address, `"ray://host:10001"`, `"host:6379"` or `"auto"`; by default that in the environment
            variable RAY_ADDRESS, else a Ray of two cores is started here, and ended in the end.
        device: `"cpu"` or `"cuda"`, one GPU a run; by default CUDA where a node has a GPU.
        threads: of PyTorch on a CPU, and the cores that a run has to itself.
        folder: where records go, at the same path on every node; by default `data/runs`.

    Raises:
        ConfigurationError: the folder cannot be written to, or a text cannot be read.
        UnavailableError: no cluster answers, or it has no node, or none any more, that could run this.
    """
    folder = folder or runs_folder()
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for corpus in {recipe.corpus for recipe in recipes}:
        load_corpus(corpus)
    tasks: dict[Any, Recipe] = {}
    with _connected(on, threads) as ray, tempfile.NamedTemporaryFile(dir=folder, prefix=".sweep-") as marker:
        if device is None:
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        need = {"CPU": threads, "GPU": int(device == "cuda")}
        if not has_room(need, ray.nodes()):
            raise UnavailableError(
                f"sweep: no node of the cluster has {need['CPU']} CPUs and {need['GPU']} GPUs. Add one, or name "
                "another --device or --threads."
            )
        resources = {"num_cpus": need["CPU"], "num_gpus": need["GPU"]}
        fine_tune = ray.remote(max_calls=1, max_retries=RETRIES, **resources)(_fine_tune)
        try:
            for recipe in recipes:
                tasks[fine_tune.remote(recipe, folder, device, threads, marker.name)] = recipe
            return _collected(ray, tasks, need)
        finally:
            _end(ray, list(tasks))
            store.mark_killed(folder)


@contextmanager
def _connected(on: str | None, threads: int) -> Iterator[ModuleType]:
    """Ray, connected to a cluster or started here. Raises UnavailableError: none answers at that address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read on import: a Ray that starts here tells nobody
    address = on or os.environ.get("RAY_ADDRESS", "local")
    options: dict[str, Any] = {}
    if address == "local":
        options = {**STARTED_HERE, "num_cpus": max(CORES, threads)}
    else:  # twenty times 40 s, where something answers that is not Ray
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    import ray

    try:
        match = re.fullmatch(r"(?:ray://)?\[?([^]]+?)\]?:(\d+)", address)
        if match:  # where none answers Ray waits long
            socket.create_connection((match[1], int(match[2])), KNOCK_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # of many kinds, by address and version
        raise UnavailableError(
            f"sweep: Ray cannot be used at {address} ({in_a_line(error)}). Check the address, that `ray status` works "
            "there, and that Ray and Python have the same versions; or leave --on out to start Ray here."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def has_room(need: dict[str, int], nodes: list[dict[str, Any]]) -> bool:
    """Whether some living node could run it, if nothing else ran there."""
    for node in nodes:
        if node["Alive"] and all(node["Resources"].get(name, 0) >= number for name, number in need.items()):
            return True
    return False


def _fine_tune(recipe: Recipe, folder: Path, device: str, threads: int, marker: str) -> Outcome:
    """One run, in a process of its own on some node. Ctrl-C of the sweep comes as a KeyboardInterrupt."""
    import torch

    from workbench.training.run import run
    from workbench.training.world import ALONE

    for name in ALONE:  # Slurm's, say, of the job that started Ray
        os.environ.pop(name, None)
    # Ray cancels by an interrupt, which is ignored where a shell has started Ray with `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(threads)
    try:
        if not Path(marker).exists():
            raise UnavailableError(
                f"sweep: {folder} is not shared: on {socket.gethostname()} it is another one. {CURE}"
            )
        record = run(recipe, device=device, reuse=True, folder=folder)
        return Outcome(recipe, record.status, record.error, record.id)
    except Exception as error:  # whatever it was, the others go on
        status = Status.OOM if isinstance(error, OutOfMemoryError) else Status.FAILED
        return Outcome(recipe, status, in_a_line(error))


def _collected(ray: ModuleType, tasks: dict[Any, Recipe], need: dict[str, int]) -> list[Outcome]:
    """How each task ended; those that have are taken out. Raises UnavailableError: no node is left for the others."""
    outcomes: list[Outcome] = []
    with tqdm(total=len(tasks), desc="ended", unit="run") as bar:
        while tasks:
            ready, _ = ray.wait(list(tasks), timeout=LEFT_S)
            for task in ready:
                recipe = tasks.pop(task)
                try:
                    outcomes.append(ray.get(task))
                except ray.exceptions.RayError as error:  # its node or process was lost each time
                    outcomes.append(Outcome(recipe, "lost", in_a_line(error)))
                bar.update()
            if not ready and not has_room(need, ray.nodes()):
                raise UnavailableError(
                    f"sweep: no node is left for {len(tasks)} runs. Bring nodes back and give the same command again: "
                    "what is on record is not made again."
                )
    return outcomes


def _end(ray: ModuleType, tasks: list[Any]) -> None:
    """End what has not ended: first what waits, or it would begin. Runs get the time to write their records."""
    for task in reversed(tasks):
        ray.cancel(task)
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=END_S)


def sweep_text(outcomes: list[Outcome], folder: Path | None = None) -> str:
    """A comparison for each set of recipes that differ in techniques and seed alone, and what is in none."""
    lines: list[str] = []
    sets: dict[Recipe, list[Record]] = {}
    for outcome in outcomes:
        recipe = outcome.recipe
        records = sets.setdefault(replace(recipe.baseline, seed=0), [])
        if outcome.status == Status.OK:
            records.append(Record.read((folder or runs_folder()) / f"{outcome.record_id}.json"))
        else:
            lines.append(f"not ranked: {recipe.label}, seed {recipe.seed}: {outcome.status}. {outcome.reason}")
    for records in sets.values():
        made_with = {f"{record.versions}, commit {record.git_commit or 'unknown'}" for record in records}
        if len(made_with) > 1:
            lines += ["", "Not to be compared, for their nodes had other versions:", *sorted(made_with)]
        try:
            lines += ["", str(Comparison(to_frame(records)))]
        except ConfigurationError as error:  # without a baseline
            lines += ["", str(error)]
    return "\n".join(lines).lstrip()
