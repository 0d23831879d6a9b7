"""Many runs on many machines: a grid of recipes and seeds as tasks on Ray, one run in one fresh process, the records of
all of them in one folder that every node shares.

Ray decides where and when a run goes, by what it is predicted to need. A task whose node is lost is begun again by Ray;
the run itself takes a record that is there (`reuse`), so that nothing is made twice, in one sweep or in the next. A run
that fails is not tried again: its record is an answer.
"""

import logging
import math
import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock
from tqdm import tqdm

from workbench.errors import ConfigurationError, OutOfMemoryError, UnavailableError, brief, in_a_line
from workbench.gpus.catalogue import of_device
from workbench.paths import check_writable, git_commit, read_toml, runs_folder, versions
from workbench.predict.predict import CPU, predict
from workbench.recipe import FILES, Recipe
from workbench.records import store
from workbench.records.record import Record, Status, read_all
from workbench.settings import named
from workbench.texts.corpus import load_corpus

EXAMPLE = 'Write for example seeds = 3, below it [recipe] with model = "gpt2-tiny", and [grid] with steps = [50, 100].'
CORES = 2  # of a Ray that is started here
STARTED_HERE = {"include_dashboard": False, "object_store_memory": 100 * 2**20}  # through which go a few words
PROCESS_BYTES = 1536 * 2**20  # Python, PyTorch and the libraries, beside the tensors of a run
RETRIES = 3  # of a task whose node or process is lost; Ray's own default
KNOCK_S = 5.0  # to find out whether anything listens at an address
LOOK_S = 300.0  # for a node to tell of itself
END_S = 60.0  # for runs to write their records when the sweep ends
LEFT_S = 300.0  # without a run that ends, before the nodes are looked at
CURE = "Name one that every node has at the same path, in the environment variable WORKBENCH_RUNS."
RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}  # of a task, and what a node calls them
Need = dict[str, float]  # resources of a task
Node = dict[str, Any]  # as Ray describes it, with a name and the facts that it tells of itself


@dataclass(frozen=True)
class Outcome:
    """How a recipe of the grid ended: the status of its record, `lost` or `not started`, and why if it is not `ok`."""

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
    grid = named(tables.get("grid", {}), names, f"sweep: {path}, grid", "field")
    seeds = tables.get("seeds", 1)
    if type(seeds) is not int or seeds < 1:
        raise ConfigurationError(f"sweep: {path}: seeds must be an integer of at least 1, got {brief(seeds)}.")
    axes = {"seed": list(range(seeds)), **grid} if "seeds" in tables else grid
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigurationError(f"sweep: {path}: {name} must be a list in [grid], got {brief(values)}. {EXAMPLE}")
    rows = [dict(zip(axes, row, strict=True)) for row in product(*axes.values())]
    return list(dict.fromkeys(_recipe(base | row, f"sweep: {path}, with {row}") for row in rows))


def _recipe(data: dict[str, Any], place: str) -> Recipe:
    try:
        return Recipe.from_dict(data)
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {error}") from None


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
        device: `"cpu"` or `"cuda"`; by default CUDA where a node has a GPU.
        threads: of PyTorch on a CPU, and the cores that a run has to itself.
        folder: where records go, at the same path on every node; by default `data/runs`.

    Raises:
        ConfigurationError: the folder cannot be written to or is not shared, or a recipe cannot be used.
        UnavailableError: no cluster answers, it has no such device, a node has no workbench or other versions, or no
            node is left that could run the rest.
    """
    folder = folder or runs_folder()
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in {recipe.corpus for recipe in recipes}:
        load_corpus(name)
    with _connected(on, threads) as ray, tempfile.NamedTemporaryFile(dir=folder, prefix=".sweep-") as marker:
        device = device or ("cuda" if ray.cluster_resources().get("GPU") else CPU)
        nodes = _visited(ray, marker.name, device)
        check_nodes({node["name"]: node["facts"] for node in nodes}, folder)
        unseeded = tqdm({replace(recipe, seed=0) for recipe in recipes}, desc="predicted", unit="recipe")
        needs = {recipe: needed(recipe, device, threads, nodes[0]["facts"]) for recipe in unseeded}
        fine_tune = ray.remote(max_calls=1, max_retries=RETRIES)(_fine_tune)
        tasks: dict[Any, tuple[Recipe, Need]] = {}
        outcomes: list[Outcome] = []
        try:
            for recipe in recipes:
                need = needs[replace(recipe, seed=0)]
                if has_room(need, nodes):
                    task = fine_tune.options(**need).remote(recipe, folder, device, threads, marker.name)
                    tasks[task] = (recipe, need)
                else:
                    amounts = ", ".join(f"{name} {number:,.12g}" for name, number in need.items())
                    reason = f"No node has what it needs by prediction: {amounts}."
                    outcomes.append(Outcome(recipe, "not started", reason))
            return outcomes + _collected(ray, tasks)
        finally:
            _end(ray, list(tasks))
            mark_lost(ray.nodes(), folder)


@contextmanager
def _connected(on: str | None, threads: int) -> Iterator[ModuleType]:
    """Ray, connected to a cluster or started here. Raises UnavailableError: none answers at that address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read on import: a Ray that starts here tells nobody
    address = on or os.environ.get("RAY_ADDRESS", "local")
    handler = signal.getsignal(signal.SIGTERM)
    if address != "local":  # twenty times 40 s, where something answers that is not Ray
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "3")
    import ray

    options: dict[str, Any] = {}
    if address == "local":
        options = {**STARTED_HERE, "num_cpus": max(CORES, threads)}
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
        with suppress(ValueError):  # in another thread than the main one
            signal.signal(signal.SIGTERM, handler)  # which Ray has taken
        yield ray
    finally:
        ray.shutdown()


def _visited(ray: ModuleType, marker: str, device: str) -> list[Node]:
    """The living nodes that have such a device, with what they tell of themselves.

    Raises UnavailableError: there is none, or one does not answer or has no workbench.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    kind = "CPU" if device == CPU else "GPU"
    share = 0.0 if device == CPU else 0.001  # a task without a share sees no GPU
    nodes: list[Node] = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(kind)]
    if not nodes:
        raise UnavailableError(f"sweep: no node of the cluster has a {kind}. Add one, or name another --device.")
    look = ray.remote(num_cpus=0, num_gpus=share, max_calls=1)(_facts)
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        node["facts"] = look.options(scheduling_strategy=there).remote(marker, device)
    for node in nodes:
        node["name"] = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
        try:
            node["facts"] = ray.get(node["facts"], timeout=LOOK_S)
        except ray.exceptions.RayError as error:
            raise UnavailableError(
                f"sweep: the node {node['name']} cannot be used ({in_a_line(error)[-200:]}). Install the workbench "
                "there as it is here, or end what keeps the node busy."
            ) from None
    return nodes


def _facts(marker: str, device: str) -> dict[str, Any]:
    """Of the node where this is called: whether it has the marker, its versions, its card."""
    store.mark_killed(Path(marker).parent)  # of this node
    facts: dict[str, Any] = {"shared": Path(marker).exists(), **versions(), "commit": git_commit()}
    if device != CPU:
        from workbench.measure.device import Device

        card = Device.find(device)
        facts |= {"card": card.name, "card_bytes": card.total_bytes}
    return facts


def check_nodes(facts: dict[str, dict[str, Any]], folder: Path) -> None:
    """Raises ConfigurationError: a node does not see the folder. UnavailableError: their runs would not compare."""
    blind = [name for name, of_node in facts.items() if not of_node["shared"]]
    if blind:
        raise ConfigurationError(f"sweep: {folder} is not shared: on {', '.join(blind)} it is another one. {CURE}")
    here = {"workbench": versions()["workbench"], "commit": git_commit()}  # this machine's PyTorch may be another
    machines = {**facts, "this machine": here}
    for what in (*versions(), "commit", "card"):
        values = {name: of_node[what] or "none" for name, of_node in machines.items() if what in of_node}
        if len(set(values.values())) > 1:
            differing = ", ".join(f"{value} on {name}" for name, value in values.items())
            raise UnavailableError(
                f"sweep: {what} is {differing}, and runs would not compare. Use nodes with the same one."
            )


def needed(recipe: Recipe, device: str, threads: int, facts: dict[str, Any]) -> Need:
    """What a run asks of a node with such facts: on a CPU memory, and of a card its share by the predicted peak, so
    that small runs share one.

    Raises as `predict` does: what cannot be predicted is not started.
    """
    if device == CPU:
        return {"num_cpus": threads, "memory": PROCESS_BYTES + predict(recipe, CPU).peak_allocated_bytes}
    card = of_device(facts["card"], facts["card_bytes"])
    predicted = predict(recipe, card.name if card else "h100")
    peak = (predicted.peak_reserved_bytes or predicted.peak_allocated_bytes) + predicted.context_bytes
    return {"num_cpus": 1, "memory": PROCESS_BYTES, "num_gpus": math.ceil(1000 * peak / facts["card_bytes"]) / 1000}


def has_room(need: Need, nodes: list[Node]) -> bool:
    """Whether some living node could run it, if nothing else ran there."""
    for node in nodes:
        if node["Alive"]:
            resources = dict(node["Resources"])
            resources["GPU"] = min(resources.get("GPU", 0), 1)  # a run takes one card or a share of it
            if all(resources.get(RESOURCES[name], 0) >= number for name, number in need.items()):
                return True
    return False


def _fine_tune(recipe: Recipe, folder: Path, device: str, threads: int, marker: str) -> Outcome:
    """One run, in a process of its own on some node. Ctrl-C of the sweep comes as a KeyboardInterrupt."""
    import torch

    from workbench.run.run import run
    from workbench.run.world import ALONE

    for name in ALONE:  # Slurm's, say, of the job that started Ray
        os.environ.pop(name, None)
    # Ray cancels by an interrupt, which is ignored where a shell has started Ray with `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(threads)
    try:
        if not Path(marker).exists():  # a node that came later
            raise UnavailableError(f"sweep: {socket.gethostname()} does not share {folder}. {CURE}")
        record = run(recipe, device=device, reuse=True, folder=folder)
        return Outcome(recipe, record.status, record.error, record.id)
    except Exception as error:  # whatever it was, the others go on
        status = Status.OOM if isinstance(error, OutOfMemoryError) else Status.FAILED
        return Outcome(recipe, status, in_a_line(error))


def _collected(ray: ModuleType, tasks: dict[Any, tuple[Recipe, Need]]) -> list[Outcome]:
    """How each task ended; those that have are taken out. Raises UnavailableError: no node is left for the others."""
    outcomes: list[Outcome] = []
    with tqdm(total=len(tasks), desc="ended", unit="run") as bar:
        while tasks:
            ready, _ = ray.wait(list(tasks), timeout=LEFT_S)
            for task in ready:
                outcomes.append(_outcome(ray, task, tasks.pop(task)[0]))
                bar.update()
            if not ready and not any(has_room(need, ray.nodes()) for _, need in tasks.values()):
                raise UnavailableError(
                    f"sweep: no node is left for {len(tasks)} runs. Bring nodes back and give the same command again: "
                    "what is on record is not made again."
                )
    return outcomes


def _outcome(ray: ModuleType, task: Any, recipe: Recipe) -> Outcome:
    try:
        return ray.get(task)  # type: ignore[no-any-return]
    except ray.exceptions.RayError as error:  # its node or process was lost each time
        return Outcome(recipe, "lost", in_a_line(error))


def _end(ray: ModuleType, tasks: list[Any]) -> None:
    """End what has not ended: first what waits, or it would begin. Runs get the time to write their records."""
    for task in reversed(tasks):
        ray.cancel(task)
    if tasks:
        ray.wait(tasks, num_returns=len(tasks), timeout=END_S)


def mark_lost(nodes: list[Node], folder: Path) -> None:
    """Give the status `killed` to runs that say `running`, of dead processes of this machine and of nodes that Ray has
    lost: nobody else can tell of another machine."""
    store.mark_killed(folder)
    alive = {node["NodeManagerHostname"] for node in nodes if node["Alive"]}
    lost = {node["NodeManagerHostname"] for node in nodes} - alive
    with FileLock(folder / store.LOCK):
        for record in read_all(folder):
            if record.status is Status.RUNNING and record.owner.get("host") in lost:
                replace(record, status=Status.KILLED, error="Ray has lost its node").save(folder)


def sweep_text(outcomes: list[Outcome], folder: Path | None = None) -> str:
    """A comparison for each set of recipes that differ in techniques and seed alone, and what is in none."""
    from workbench.advise.compare import compare, comparison_text, conclusions
    from workbench.advise.frame import to_frame

    lines: list[str] = []
    groups: dict[Recipe, list[Record]] = {}
    for outcome in outcomes:
        recipe = outcome.recipe
        runs = groups.setdefault(replace(recipe.baseline, seed=0), [])
        if outcome.status == Status.OK:
            runs.append(Record.read((folder or runs_folder()) / f"{outcome.record_id}.json"))
        else:
            lines.append(f"not ranked: {recipe.label}, seed {recipe.seed}: {outcome.status}. {outcome.reason}")
    for runs in groups.values():
        try:
            table = compare(to_frame(runs))
            lines += ["", comparison_text(table), "", *(f"- {sentence}" for sentence in conclusions(table))]
        except ConfigurationError as error:  # without a baseline
            lines += ["", str(error)]
    return "\n".join(lines).lstrip()
