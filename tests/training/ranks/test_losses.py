"""Whatever the ranks keep: the losses of one process, to rounding; and memory by category, as it can be counted."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workbench.base.paths import ROOT
from workbench.journal.record import read_all
from workbench.recipe import as_toml
from workbench.techniques import (
    ActivationOffloading,
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Padding,
)
from workbench.training.ranks.launch import run_on_ranks
from workbench.training.run import run

pytestmark = pytest.mark.dear
BYTES = 4  # fp32
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed here")
SHARDS = ("none", "gradients", "full")
SETS = {
    "plain": (),
    "accumulated": (GradientAccumulation(steps=2),),
    "mixed": (MixedPrecision(), GradientCheckpointing()),
    "adapted": (Lora(),),
    "chunked": (ChunkedCrossEntropy(), ActivationOffloading(to="disk")),
    "padded": (Padding(),),
}
CASES = {
    **{f"plain-{shard}": "plain" for shard in SHARDS},
    **{f"{name}-full": name for name in SETS if name != "plain"},
}
CASES |= {"accumulated-none": "accumulated", "padded-none": "padded"}
if find_spec("deepspeed"):
    ZERO = {
        "zero2": ("plain", "mixed"),
        "zero3": ("plain", "accumulated", "adapted"),
        "zero2_offload": ("accumulated",),
    }
    ZERO["zero3_offload"] = ("chunked",)
    CASES |= {f"{name}-{shard}": name for shard, names in ZERO.items() for name in names}


@pytest.fixture(scope="module")
def recipes(recipe):
    short = replace(recipe, steps=3)
    return {name: replace(short, techniques=techniques) for name, techniques in SETS.items()}


@pytest.fixture(scope="module")
def alone(recipes, tmp_path_factory):
    """Of each set of techniques the record of one process."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: run(recipe, device="cpu", folder=folder) for name, recipe in recipes.items()}


@pytest.fixture(scope="module")
def together(recipes, tmp_path_factory):
    """Of each case the one record of two ranks, started by torchrun."""
    place = tmp_path_factory.mktemp("together")
    for case, name in CASES.items():
        (place / f"{case}.toml").write_text(as_toml(recipes[name]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("several.py")
    subprocess.run([*launcher, str(program), str(place)], check=True, env=environment)
    records = {}
    for case in CASES:
        (records[case],) = read_all(place / "records" / case)
    return records


@pytest.mark.values
def test_the_losses_are_those_of_one_process(alone, together, subtests):
    for case, name in CASES.items():
        with subtests.test(case=case):
            record, expected, band = together[case], alone[name], 2e-3 if name == "mixed" else 2e-5
            assert (record.status, record.world_size, record.shard) == ("ok", 2, case.partition("-")[2])
            assert record.losses == pytest.approx(expected.losses, abs=band)
            assert record.held_out_loss == pytest.approx(expected.held_out_loss, abs=band)
            assert record.tokens_seen == expected.tokens_seen
            assert record.padding_tokens <= expected.padding_tokens  # a rank pads to the longest of its own


def test_each_rank_has_its_part_of_the_batch(together):
    for case in ("plain-none", "accumulated-none", "accumulated-full"):
        assert (together[case].micro_batch_size, together[case].gradient_accumulation_steps) == (4, 1)


def test_what_is_shed_is_halved(alone, together):
    parameters = alone["plain"].parameters
    ddp, gradients, full = (together[f"plain-{shard}"] for shard in SHARDS)
    assert ddp.maximum_by_category["weights"] == parameters * BYTES
    # beside the gradients DDP keeps buckets of the same size, in which they are added up
    assert ddp.maximum_by_category["gradients"] == 2 * parameters * BYTES
    for record in (gradients, full):
        assert record.maximum_by_category["gradients"] == parameters * BYTES / 2
        states = record.maximum_by_category["optimizer_states"]
        assert states == pytest.approx(ddp.maximum_by_category["optimizer_states"] / 2, abs=2048)
    # gathered, until the backward pass has ended
    assert gradients.by_category["weights"] == pytest.approx(1.5 * parameters * BYTES, abs=64)
    assert full.by_category["weights"] < gradients.by_category["weights"]


@needs_deepspeed
def test_zero_keeps_what_its_stages_say(alone, together):
    parameters = alone["plain"].parameters * BYTES
    second, third = together["plain-zero2"], together["plain-zero3"]
    for record in (second, third):
        # AdamW's two, and the weights that it steps: a part of them, copied
        assert record.maximum_by_category["optimizer_states"] == pytest.approx(1.5 * parameters, abs=2048)
        assert record.parameters * BYTES == parameters
    assert second.by_category["weights"] == pytest.approx(parameters, abs=64)
    assert third.by_category["weights"] > parameters / 2  # its part, and what is gathered
    assert third.by_phase["optimizer_step"] < second.by_phase["optimizer_step"]


def test_the_record_has_the_peak_of_every_rank(together, subtests):
    for case, record in together.items():
        with subtests.test(case=case):
            assert [rank["rank"] for rank in record.ranks] == [0, 1]
            assert record.peak_allocated_bytes == max(rank["peak_allocated_bytes"] for rank in record.ranks)
            for rank in record.ranks:
                assert sum(rank["by_category"].values()) == rank["peak_allocated_bytes"]


@pytest.mark.values
def test_three_ranks_started_from_python(recipe, runs_folder):
    recipe = replace(recipe, effective_batch_size=6, steps=2)
    expected, record = run(recipe, device="cpu"), run_on_ranks(recipe, ranks=3, shard="full", device="cpu")
    assert record.losses == pytest.approx(expected.losses, abs=2e-5)
    assert record.held_out_loss == pytest.approx(expected.held_out_loss, abs=2e-5)
    assert len(record.ranks) == 3
    assert [kept.id for kept in read_all(runs_folder)] == [expected.id, record.id]


@pytest.mark.values
@needs_deepspeed
def test_three_ranks_of_zero_save_the_model_of_one_process(recipe):
    recipe = replace(recipe, effective_batch_size=6, steps=3)
    record = run_on_ranks(recipe, ranks=3, shard="zero3", device="cpu", save="merged")
    whole = run(recipe, device="cpu", save="merged")
    assert record.losses == pytest.approx(whole.losses, abs=2e-5)
    assert record.held_out_loss == pytest.approx(whole.held_out_loss, abs=2e-5)
    ours, theirs = (load_file(Path(kept.model_path) / "model.safetensors") for kept in (record, whole))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
