"""What can go wrong with several ranks: each says why, in time, and leaves neither processes nor a record that lies."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from workbench.base.errors import ConfigurationError, OutOfMemoryError, UnavailableError, WorkbenchError
from workbench.base.paths import ROOT
from workbench.journal.record import read_all
from workbench.recipe import Recipe, as_toml
from workbench.techniques import GradientAccumulation, StepInBackward, technique
from workbench.training.ranks.launch import run_on_ranks
from workbench.training.ranks.shards import Ranks, split_batch

COMMAND = [sys.executable, "-m", "workbench", "run"]
ANY = Recipe(model="gpt2-tiny")
SECONDS = 120


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def rank_process(parent, rank):
    """The process of a rank that a command has started, once it is there."""
    for child in psutil.Process(parent.pid).children(recursive=True):
        with suppress(psutil.Error):  # a helper that has just ended
            if child.environ().get("RANK") == str(rank):
                return child
    return None


def wait_until(condition, process):
    """Until the condition holds, while the process lives."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come")


@pytest.mark.dear
def test_a_rank_that_is_killed_ends_the_run(recipe, tmp_path, runs_folder):
    (tmp_path / "recipe.toml").write_text(as_toml(replace(recipe, steps=100_000)))
    words = ["--ranks", "2", "--shard", "full", "--device", "cpu", "--sample-tokens", "0"]
    process = subprocess.Popen(
        [*COMMAND, str(tmp_path / "recipe.toml"), *words], env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: any(record.steps_done for record in read_all(runs_folder)), process)
    children = psutil.Process(process.pid).children(recursive=True)
    rank_process(process, 1).kill()
    _, errors = process.communicate(timeout=SECONDS)
    (record,) = read_all(runs_folder)
    assert (process.returncode, record.status, record.world_size) == (1, "killed", 2)
    assert "error: ranks: rank 1: it was killed in the middle (signal 9)" in errors
    assert f"on record as killed: {record.id}" in errors
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.dear
def test_out_of_memory_is_an_answer_of_all(recipe, runs_folder):
    with pytest.raises(OutOfMemoryError, match="memory cap of 4.0 MiB"):
        run_on_ranks(recipe, ranks=2, shard="gradients", device="cpu", memory_cap="4MiB")
    (record,) = read_all(runs_folder)
    assert (record.status, record.world_size, record.shard) == ("oom", 2, "gradients")
    assert record.failed_operation


@pytest.mark.dear
def test_the_reason_of_another_rank_than_the_first_is_on_record(recipe, runs_folder):
    with pytest.raises(WorkbenchError, match="LookupError: the data of this rank"):
        run_on_ranks(replace(recipe, callbacks=("failing:SecondRankFails",)), ranks=2, device="cpu")
    (record,) = read_all(runs_folder)
    assert (record.status, record.error) == ("failed", "rank 1: LookupError: the data of this rank")


SHARED = (  # micro-batch and accumulation of one process, number of ranks, those of a rank
    ((8, 1), 2, (4, 1)),
    ((4, 2), 2, (4, 1)),
    ((2, 4), 2, (2, 2)),
    ((6, 1), 3, (2, 1)),
    ((3, 4), 6, (2, 1)),
    ((4, 9), 6, (3, 2)),
)


def test_how_ranks_share_a_batch(subtests):
    for (size, steps), count, expected in SHARED:
        with subtests.test(size=size, steps=steps, ranks=count):
            arguments = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
            assert split_batch(arguments, count) == expected


REFUSED = (
    (lambda: run_on_ranks(ANY, ranks=3), "ranks: 3 cannot share .* of 8 sequences .* Take 6 or 9 sequences"),
    (lambda: run_on_ranks(ANY, ranks=0), "ranks: 0 is not a number from 1"),
    (lambda: run_on_ranks(ANY, ranks=2, shard="ful"), "shard: there is no 'ful'.* Did you mean full"),
    (
        lambda: run_on_ranks(ANY, ranks=2, shard="full", checkpoint_every=2),
        "checkpoint_every: a run on several ranks writes no checkpoints.* Leave out .* or write the script",
    ),
    (lambda: Ranks(2).check(ANY, resume=True), "checkpoint_every: .* nor goes on with one"),
    (
        lambda: run_on_ranks(ANY | StepInBackward(), ranks=2),
        "ranks: step_in_backward cannot be used here: it uses a gradient before",
    ),
    (
        lambda: Ranks(2, "zero2").check(ANY | technique("pure_bf16")),
        "pure_bf16 cannot be used here: DeepSpeed steps a",
    ),
    (
        lambda: Ranks(2, "zero3_offload").check(ANY | technique("selective_checkpointing")),
        "selective_checkpointing cannot be used here: the recomputation would gather.* Take --shard none",
    ),
    (
        lambda: Ranks(2, "zero2").check(ANY | technique("optimizer", kind="muon")),
        "optimizer cannot be used here: it makes matrices orthogonal",
    ),
    (lambda: run_on_ranks(ANY, ranks=None, shard="full"), "shard: among how many ranks"),
    (lambda: run_on_ranks(ANY, ranks=2, shard="full", reuse=True), "ranks: .* Leave out --reuse"),
    (lambda: Ranks(2).check(ANY | GradientAccumulation(steps=8)) or Ranks(16).check(ANY), "16 cannot share"),
)


def test_what_cannot_be_is_refused_before_anything_is_started(subtests, monkeypatch, runs_folder):
    monkeypatch.setattr("workbench.training.ranks.launch.start", lambda *_, **__: pytest.fail("it was started"))
    for ask, message in REFUSED:
        with subtests.test(message=message), pytest.raises(ConfigurationError, match=message):
            ask()
    assert not read_all(runs_folder)


def test_without_deepspeed_it_says_what_to_install(monkeypatch, runs_folder):
    monkeypatch.setattr("workbench.training.ranks.shards.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="shard: zero3 needs deepspeed. Install it with: pip install"):
        run_on_ranks(ANY, ranks=2, shard="zero3", device="cpu")
    assert not read_all(runs_folder)
