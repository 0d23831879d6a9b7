"""Grids of runs on Ray: its own several nodes on this machine, of which one is killed in the middle.

Those that start Ray are `dear`; the others, which look at grids, nodes and outcomes, do without it.
"""

import _thread
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import psutil
import pytest
import yaml
from transformers import TrainerCallback

from workbench.__main__ import _parser, main
from workbench.advise import sweep as module
from workbench.advise.sweep import Outcome, has_room, read_grid, sweep, sweep_text
from workbench.base.errors import UnavailableError
from workbench.base.paths import ROOT
from workbench.journal.record import Record, Status, read_all
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing

pytestmark = pytest.mark.xdist_group("ray")
GIB = 2**30
HOLD = "SWEEP_TEST_HOLD"
GRID = """
seeds = 2
[recipe]
model = "gpt2-tiny"
technique.fused_gelu = {}
[grid]
steps = [5, 6]
technique = [{}, {lora = {rank = 4}}]
"""


class Held(TrainerCallback):
    """A run that goes no further while a file is there."""

    def on_step_begin(self, *_, **__):
        while Path(os.environ[HOLD]).exists():
            time.sleep(0.05)


def until(true):
    for _ in range(2400):
        if found := true():
            return found
        time.sleep(0.05)
    raise TimeoutError("waited two minutes")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What the nodes inherit: no word to Ray's makers, this checkout, and what Slurm says to each node."""
    with pytest.MonkeyPatch.context() as patch:
        hold = tmp_path_factory.mktemp("hold") / "hold"
        own = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), HOLD: str(hold)}
        for name, text in {**own, "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}.items():
            patch.setenv(name, text)
        yield hold


@pytest.fixture(scope="module")
def cluster(environment):
    from ray.cluster_utils import Cluster

    config = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
    head = {"num_cpus": 1, "memory": 4 * GIB, "include_dashboard": False, "_system_config": config}
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


@pytest.fixture
def small(model_name, text_file):
    shape = {"effective_batch_size": 2, "sequence_length": 16, "steps": 2, "dropout": 0.0}
    return Recipe(model=model_name, corpus=str(text_file), callbacks=("tests.advise.test_sweep:Held",), **shape)


@pytest.mark.dear
def test_a_node_is_killed_in_the_middle_and_nothing_is_lost_or_made_twice(cluster, environment, small, runs_folder):
    def power_off():
        processes = [raylet, *until(lambda: runs_on(raylet))]
        for process in (raylet, *raylet.children(recursive=True)):
            process.kill()
        killed.extend(process.pid for process in processes)
        environment.unlink()

    def runs_on(raylet):
        running = {each.owner["pid"] for each in read_all() if each.status is Status.RUNNING}
        return [process for process in raylet.children(recursive=True) if process.pid in running]

    killed = []
    doomed = cluster.add_node(num_cpus=1, memory=4 * GIB)
    raylet = psutil.Process(doomed.all_processes["raylet"][0].process.pid)
    environment.touch()
    (thread := Thread(target=power_off)).start()
    recipes = [small, replace(small, seed=1), small | GradientCheckpointing()]
    outcomes = sweep(recipes, on=cluster.address)
    thread.join()
    cluster.remove_node(doomed)
    assert [each.status for each in outcomes] == ["ok"] * 3
    assert {each.recipe for each in outcomes} == {*recipes}
    found = read_all()
    assert sorted(each.status for each in found) == ["killed", "ok", "ok", "ok"]
    assert {each.id for each in found if each.status is Status.OK} == {each.record_id for each in outcomes}
    (lost,) = (each for each in found if each.status is Status.KILLED)
    assert lost.owner["pid"] in killed
    assert {each.threads for each in found} == {1}
    assert not list(runs_folder.glob(".sweep-*"))
    text = sweep_text(outcomes)
    assert "gradient_checkpointing has the smallest peak" in text
    assert "2 seeds" in text

    again = sweep([small], on=cluster.address)
    assert len(read_all()) == 4, "what is on record is not made again"
    assert {each.record_id for each in again} < {each.record_id for each in outcomes}


@pytest.mark.dear
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_on_a_node_where_the_folder_is_another_one_nothing_runs_and_it_is_said(cluster, small, tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        mine = Path(f"/proc/self/fd/{descriptor}")  # in another process it is something else
        (outcome,) = sweep([small], on=cluster.address, folder=mine)
    finally:
        os.close(descriptor)
    assert outcome.status == "failed"
    assert re.search(r"is not shared: on .*WORKBENCH_RUNS", outcome.reason)
    assert not list(tmp_path.iterdir())


@pytest.mark.dear
def test_ctrl_c_ends_the_tasks_and_the_ray_that_was_started_and_leaves_records(environment, small):
    def interrupt():
        until(lambda: [each for each in read_all() if each.status is Status.RUNNING])
        _thread.interrupt_main()

    environment.touch()
    recipes = [replace(small, seed=seed) for seed in range(4)]
    (thread := Thread(target=interrupt)).start()
    before = {*psutil.Process().children(recursive=True)}
    before_handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep(recipes)
    finally:
        signal.signal(signal.SIGINT, before_handler)
    thread.join()
    assert {each.status for each in read_all()} == {"interrupted"}
    assert len(read_all()) <= 2, "what waited has not begun"
    until(lambda: {*psutil.Process().children(recursive=True)} <= before)


@pytest.mark.dear
@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "127.0.0.1:1", "nonsense"])
def test_a_cluster_that_does_not_answer_is_an_error_at_once(address, tmp_path, capsys, monkeypatch):
    (tmp_path / "grid.toml").write_text(GRID)
    began = time.monotonic()
    assert main(["sweep", str(tmp_path / "grid.toml"), "--on", address]) == 3
    assert time.monotonic() - began < 20
    assert f"Ray cannot be used at {address}" in capsys.readouterr().err
    assert not read_all()


def test_without_ray_it_is_said_what_to_install(tmp_path, capsys, monkeypatch):
    (tmp_path / "grid.toml").write_text(GRID)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ['ray[client]>=2.50; extra == "cluster"'])
    assert main(["sweep", str(tmp_path / "grid.toml")]) == 3
    assert 'pip install "gpt2-memory-workbench[cluster]"' in capsys.readouterr().err


def test_a_grid_is_every_value_with_every_other(tmp_path):
    (tmp_path / "grid.toml").write_text(GRID)
    found = read_grid(tmp_path / "grid.toml")
    assert len(found) == len(set(found)) == 8
    assert {(each.seed, each.steps, each.label) for each in found} == {
        (seed, steps, label) for seed in (0, 1) for steps in (5, 6) for label in ("baseline", "lora(rank=4)")
    }
    (tmp_path / "grid.toml").write_text("[recipe]\nseed = 7\n[grid]\nsteps = [5, 5]")
    assert [each.seed for each in read_grid(tmp_path / "grid.toml")] == [7], "each once"
    assert len(read_grid(ROOT / "docs" / "sweep" / "grid.toml")) == 24


WRONG_GRIDS = [
    ("[grid", "grid.toml cannot be read"),
    ("[girds]", "has no table 'girds'. Known: seeds, recipe, grid. Did you mean grid?"),
    ("seeds = 0", "seeds must be an integer of at least 1, got 0"),
    ("seeds = true", "seeds must be an integer of at least 1, got True"),
    ("grid = 3", "grid takes each field by its name, as in {name: value}, got 3"),
    ("[grid]\nstep = [1]", "grid has no field 'step'."),
    ("[grid]\nsteps = 5", "steps must be a list in [grid], got 5. Write for example"),
    ("[grid]\nsteps = []", "steps must be a list in [grid], got []"),
    ("[grid]\nsteps = [1, 0]", "with {'steps': 0}: recipe: steps must be an integer of at least 1, got 0."),
    ("[recipe]\nmodle = 'gpt2'", "recipe has no field 'modle'."),
    ("[grid]\ntechnique = [{}, {lora = {rank = 0}}]", "'rank': 0}}}: lora: rank must be an integer of at least 1"),
]


def test_a_grid_with_errors_fails_before_anything_starts(tmp_path, capsys, subtests):
    for text, message in WRONG_GRIDS:
        with subtests.test(text=text):
            (tmp_path / "grid.toml").write_text(text)
            assert main(["sweep", str(tmp_path / "grid.toml"), "--on", "127.0.0.1:1"]) == 2
            error = capsys.readouterr().err
            assert message in error
            assert "grid.toml" in error


def test_a_run_needs_its_cores_and_a_card_on_one_living_node():
    nodes = [{"Alive": True, "Resources": {"CPU": 4, "GPU": 1}}, {"Alive": True, "Resources": {"CPU": 8}}]
    assert has_room({"CPU": 4, "GPU": 1}, nodes)
    assert has_room({"CPU": 8, "GPU": 0}, nodes)
    assert not has_room({"CPU": 8, "GPU": 1}, nodes)
    assert not has_room({"CPU": 4, "GPU": 0}, [{**node, "Alive": False} for node in nodes])


def test_where_no_node_is_left_it_says_so(monkeypatch):
    ray = SimpleNamespace(wait=lambda tasks, timeout: ([], tasks), nodes=lambda: [])
    with pytest.raises(UnavailableError, match="no node is left for 1 runs. Bring nodes back"):
        module._collected(ray, {"task": Recipe()}, {"CPU": 1, "GPU": 0})


def test_runs_without_a_baseline_and_failures_are_told():
    outcomes = [Outcome(Recipe() | GradientCheckpointing(), "oom", "no room"), Outcome(Recipe(steps=5), "lost", "gone")]
    text = sweep_text(outcomes)
    assert "not ranked: gradient_checkpointing, seed 0: oom. no room" in text
    assert text.count("none of them a baseline") == 2


def test_nodes_of_other_versions_are_told(runs_folder):
    outcomes = []
    for seed, torch in enumerate(("2.12", "2.13")):
        recipe = Recipe(seed=seed)
        made = replace(Record.start(recipe), status=Status.OK, versions={"torch": torch}, git_commit="abc")
        made.save()
        outcomes.append(Outcome(recipe, "ok", record_id=made.id))
    warning = (
        "Not to be compared, for their nodes had other versions:\n{'torch': '2.12'}, commit abc\n{'torch': '2.13'}"
    )
    assert warning in sweep_text(outcomes)
    assert "Not to be compared" not in sweep_text(outcomes[:1])


def test_the_files_for_clusters_give_commands_that_there_are():
    from ray.runtime_env import RuntimeEnv

    folder = ROOT / "docs" / "sweep"
    job, ray_job = (yaml.safe_load((folder / name).read_text()) for name in ("job.yaml", "kubernetes.yaml"))
    assert RuntimeEnv(**job)["env_vars"]["WORKBENCH_RUNS"] == "/shared/runs"
    assert RuntimeEnv(**yaml.safe_load(ray_job["spec"]["runtimeEnvYAML"]))["env_vars"]
    cluster = ray_job["spec"]["rayClusterSpec"]
    head, worker = (each["template"]["spec"] for each in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]))
    assert head["volumes"] == worker["volumes"]
    page, script = (ROOT / "docs" / "sweep.md").read_text(), (folder / "slurm.sh").read_text()
    for text in (page, script, ray_job["spec"]["entrypoint"]):
        commands = re.findall(r"-m workbench (sweep .*)", text)
        assert commands
        for command in commands:
            assert _parser().parse_args(shlex.split(command)).on
