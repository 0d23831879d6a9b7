import dataclasses
import itertools
import os
import subprocess
import sys
import time

import papermill
import pytest
import torch

from workbench import predict, run
from workbench.__main__ import main
from workbench.base import device as devices
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.base.paths import ROOT
from workbench.gpus.catalogue import GPUS
from workbench.journal.record import Record
from workbench.prediction import worker
from workbench.recipe import Recipe
from workbench.training.world import ALONE, World, refuse_several_ranks
from workbench.widgets.runner import Runner


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*ALONE, *(name for name in os.environ if name.startswith("ACCELERATE_"))):
        monkeypatch.delenv(name, raising=False)


def test_the_cpu_is_always_there_and_named_with_its_threads():
    assert devices.pick_device("cpu") == torch.device("cpu")
    assert devices.describe_device(torch.device("cpu")).endswith(f"(cpu, {torch.get_num_threads()} threads)")


def test_without_a_name_a_gpu_is_preferred(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.pick_device().type == "cuda"


def test_without_a_gpu_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert devices.pick_device().type == "cpu"


def test_an_unknown_kind_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="device: 'gpu' is not one of cuda, mps, cpu"):
        devices.pick_device("gpu")


def test_a_device_that_is_not_there_is_no_reason_to_take_another(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match=r"PyTorch sees no cuda device on this machine. Use --device cpu"):
        devices.pick_device("cuda")


def test_the_world_is_found_and_its_device_told_in_words():
    world = World.find("cpu")
    assert (world.rank, world.world_size, world.device.kind) == (0, 1, "cpu")
    assert world.device.threads == torch.get_num_threads()
    assert world.device.torch == torch.device("cpu")
    assert str(world.device) == f"{world.device.name} (cpu, {world.device.threads} threads)"


def test_a_gpu_has_a_name_memory_and_a_capability_and_no_threads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A10")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    device = Device.find("cuda")
    assert device == Device("cuda", "NVIDIA A10", 2000, (8, 6), None)
    assert str(device) == "NVIDIA A10 (cuda)"


def test_a_card_that_is_not_here_is_described_in_the_same_words():
    card = GPUS["t4"].device
    assert (card.kind, card.compute_capability, card.total_bytes) == ("cuda", (7, 5), GPUS["t4"].memory_bytes)
    assert not card.computes_bf16
    assert GPUS["a100-40gb"].device.computes_bf16


def test_a_record_has_every_fact_of_the_world():
    assert World.find("cpu").facts().keys() <= {field.name for field in dataclasses.fields(Record)}


# ---- several ranks ----


LAUNCHED = (  # what a launcher sets, and which of it is named
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE"),
    ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, "LOCAL_RANK"),
    (
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"},
        "WORLD_SIZE",
    ),
    ({"RANK": "1"}, "RANK"),
    ({"PMI_RANK": "1"}, "PMI_RANK"),
    ({"PMIX_RANK": "3"}, "PMIX_RANK"),
    ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE"),
    ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE"),
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "SLURM_NTASKS"),
    ({"SLURM_PROCID": "1"}, "SLURM_PROCID"),
    ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "ACCELERATE_MIXED_PRECISION"),
    ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP"),
    ({"ACCELERATE_USE_DEEPSPEED": "1"}, "ACCELERATE_USE_DEEPSPEED"),
)


def test_several_ranks_are_refused_before_anything_is_loaded_or_recorded(monkeypatch, runs_folder, subtests):
    for variables, named in LAUNCHED:
        message = f"run: {named}={variables[named]} in the environment says .* Start several ranks .* unset {named}\\.$"
        with subtests.test(variables=variables), monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(ConfigurationError, match=message):
                run(Recipe(model="no such model"))
            assert not runs_folder.exists()


NO_NUMBERS = ("two", "", " ", "1.5", "-2", "1" * 5000, "0x1", "１", "1\n2")


def test_a_variable_that_is_no_number_is_named_before_anything_is_read(monkeypatch, subtests):
    for variable, value in itertools.product(ALONE, NO_NUMBERS):
        with subtests.test(variable=variable, value=value[:10]), monkeypatch.context() as patch:
            patch.setenv(variable, value)
            message = rf"(?s)^run: {variable}=.{{,40}} in the environment says that"
            with pytest.raises(ConfigurationError, match=message):
                refuse_several_ranks()


SINGLE = (
    {},
    {"WORLD_SIZE": "1", "RANK": "0"},
    {"LOCAL_RANK": "-1", "PMI_SIZE": "1"},
    {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "MASTER_ADDR": "localhost"},
    {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False", "ACCELERATE_DYNAMO_BACKEND": "no"},
)


def test_a_single_process_is_not_refused(monkeypatch, subtests):
    for variables in SINGLE:
        with subtests.test(variables=variables), monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            refuse_several_ranks()


def test_the_command_line_refuses_at_once(monkeypatch, runs_folder):
    command = [sys.executable, "-X", "importtime", "-m", "workbench", "run", "gpt2-tiny"]
    environment = {**os.environ, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 2
    assert "error: run: WORLD_SIZE=2 in the environment" in done.stderr
    assert not any(line.endswith(" torch") for line in done.stderr.splitlines()), "torch takes seconds to import"
    assert not runs_folder.exists()


@pytest.mark.dear
def test_what_one_process_does_alone_is_refused_under_torchrun_and_nothing_hangs(runs_folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "workbench"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "notebooks", "00"], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "error: run: WORLD_SIZE=2 in the environment says that a launcher, such as torchrun, started" in done.stderr
    assert time.monotonic() - begun < 30
    assert not runs_folder.exists()


@pytest.mark.dear
def test_a_prediction_does_not_care_who_started_it(monkeypatch, model_name):
    """In its worker nothing is left of a launcher: the Trainer would wait there for the other ranks."""
    for name in ALONE:
        monkeypatch.setenv(name, "2")
    worker.SHADOWS.end()  # it was started without them
    recipe = Recipe(model=model_name, effective_batch_size=3, sequence_length=16, seed=1234)
    assert predict(recipe, "cpu").peak_allocated_bytes > 0


def test_what_makes_runs_refuses_before_the_first(monkeypatch, capsys, subtests):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **__: pytest.fail("a kernel was started"))
    commands = (
        ["notebooks", "00"],
        ["notebooks", "lora", "--force"],
    )
    for command in commands:
        with subtests.test(command=command):
            assert main(command) == 2
            assert "error: run: WORLD_SIZE=2 in the environment says" in capsys.readouterr().err


@pytest.mark.dear
def test_the_playground_shows_why_it_does_not_train(monkeypatch, runs_folder, onlooker):
    monkeypatch.setenv("WORLD_SIZE", "2")
    runner = Runner()
    runner.attach(onlooker)
    runner.start(Recipe(model="gpt2-tiny"))
    runner.wait(20)
    ((record, error_message),) = onlooker.ended_as
    assert record is None
    assert error_message.startswith("run: WORLD_SIZE=2 in the environment says")
    assert not runs_folder.exists()
