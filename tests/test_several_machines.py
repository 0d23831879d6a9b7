"""The examples of docs/several_machines.md, each on this machine: Ray with two workers, launchers with two nodes."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest

from workbench.base.paths import ROOT
from workbench.export.several import save_script
from workbench.journal.record import Status, read_all
from workbench.training.run import run

PAGE = (ROOT / "docs" / "several_machines.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
(RAY,) = [text for language, text in BLOCKS if language == "python"]
LAUNCHERS = [text for _, text in BLOCKS if text.startswith(("torchrun", "accelerate launch"))]
PROGRAMS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}

pytestmark = pytest.mark.dear


@pytest.mark.values
def test_many_recipes_run_with_ray_and_their_records_meet_in_one_folder(recipe, tmp_path):
    pytest.importorskip("ray", reason="needs the extra `ray`: pip install ray")
    source = RAY.replace('Recipe(model="gpt2", steps=100)', f"{replace(recipe, steps=1)!r}")
    # This machine has no GPU, and one of the three recipes fails: no matrix has that name.
    source = source.replace("num_gpus=1", "num_cpus=1").replace("for seed in range(3)", "for seed in range(1)")
    source = source.replace("Lora(rank=8)", 'Lora(rank=8, targets="nowhere")')
    assert source.count("num_cpus=1") == source.count("range(1)") == source.count("nowhere") == 1
    assert 15 <= len(RAY.strip().splitlines()) <= 30
    (tmp_path / "many.py").write_text(source)
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "many.py"]
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as sockets:  # the name of a socket has to be short
        environment = {**os.environ, **settings, "RAY_TMPDIR": sockets}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = dict(line.split(", seed 0 ", 1) for line in done.stdout.splitlines() if ", seed 0 " in line)
    assert answers.keys() == {"baseline", "lora(targets=nowhere)", "gradient_checkpointing"}
    assert "nowhere" in answers["lora(targets=nowhere)"]
    records = read_all(tmp_path / "shared-runs")
    finished = {record.label: record for record in records if record.status is Status.OK}
    assert finished.keys() == {"baseline", "gradient_checkpointing"}
    assert finished["baseline"].losses == finished["gradient_checkpointing"].losses
    assert len({record.owner["pid"] for record in finished.values()}) == 2


def start_nodes(commands, folder):
    """Start each node's command of the page, on a free port of this machine; return their ends and outputs."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    nodes = []
    for rank, line in enumerate(commands.strip().splitlines()):
        program, *arguments = shlex.split(line.replace("10.0.0.1", "127.0.0.1").replace("29500", str(port)))
        command = [sys.executable, "-m", PROGRAMS[program], *arguments]
        place = folder / f"node-{rank}"
        place.mkdir()
        (place / "home").symlink_to(folder / "home")
        output = (folder / f"node-{rank}.log").open("w")
        nodes.append(subprocess.Popen(command, cwd=place, env=environment, stdout=output, stderr=output))
    return [node.wait(timeout=300) for node in nodes]


@pytest.mark.values
@pytest.mark.parametrize("commands", LAUNCHERS, ids=["torchrun", "accelerate"])
def test_one_run_on_two_nodes_finds_the_losses_of_one_process(commands, recipe, tmp_path):
    record = run(recipe, device="cpu")
    save_script(recipe, tmp_path / "home", count=2)
    ends = start_nodes(commands, tmp_path)
    logs = [(tmp_path / f"node-{rank}.log").read_text()[-2000:] for rank in range(2)]
    assert ends == [0, 0], logs
    state = json.loads((tmp_path / "node-0" / "fine-tuned" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert losses == pytest.approx(record.losses, abs=1e-5)
    saved = [path.name for path in sorted(tmp_path.glob("node-*/fine-tuned/model.safetensors"))]
    assert saved == ["model.safetensors"]
    assert not (tmp_path / "node-1" / "fine-tuned" / "model.safetensors").exists()


def test_the_commands_of_the_page_are_those_of_the_launchers():
    assert [text.split()[0] for text in LAUNCHERS] == ["torchrun", "accelerate"]
    for text in LAUNCHERS:
        first, second = text.strip().splitlines()
        assert re.sub(r"(rank) 0", r"\1 1", first) == second
