"""One rank of several, predicted in one process, against ranks that are really there."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest

from workbench import predict
from workbench.__main__ import main
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator.launch import environment
from workbench.prediction.predict import EMULATOR, SHADOW
from workbench.recipe import Recipe
from workbench.techniques import parse_technique
from workbench.texts.corpus import HELD_OUT_TOKENS
from workbench.training.ranks.launch import get_free_port

TINY = Recipe(model="gpt2-tiny", effective_batch_size=12, sequence_length=32, steps=2)
SMALL = Recipe(model="random:gpt2", effective_batch_size=4, sequence_length=256, steps=3)
CHECKPOINTING = ("gradient_checkpointing",)
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed here")
HALF = ("mixed_precision", "lora=rank:4")
SECONDS = 150

# gloo's threads let go of a message a moment after it has come
RANK = """
import json, os, sys, time
from functools import wraps
from pathlib import Path
import torch, torch.distributed as dist
from workbench.training.ranks.run import run_as_rank
from workbench.recipe import Recipe

def waiting(send):
    @wraps(send)
    def sent(*args, **kwargs):
        answer = send(*args, **kwargs)
        time.sleep(0.01)
        return answer
    return sent

device, cases, folder = json.loads(sys.argv[1])
if device == "cpu":
    for name in ("reduce_scatter_tensor", "reduce_scatter_single", "all_gather_into_tensor", "all_gather_single"):
        if hasattr(dist, name):
            setattr(dist, name, waiting(getattr(dist, name)))
elif any(shard.startswith("zero") for _, shard in cases):
    from deepspeed.comm.torch import TorchBackend
    from workbench.base.patches.deepspeed import keep_what_is_sent

    TorchBackend.all_gather_into_tensor = keep_what_is_sent(TorchBackend.all_gather_into_tensor)  # as NCCL has it
dist.destroy_process_group = lambda: None  # one group for all cases
measured = []
for recipe, shard in cases:
    record = run_as_rank(Recipe.from_dict(recipe), shard=shard, device=device, folder=Path(folder), sample_tokens=0)
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "memory_source", "parameters", "trainable_parameters")
    kept = {name: getattr(record, name) for name in names}
    measured.append({**kept, "by_phase": dict(record.by_phase)})
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
if os.environ["RANK"] == "0":
    Path(folder, "measured").write_text(json.dumps(measured))
"""


def measured(cases, ranks, folder, device="cpu", variables=os.environ):
    """What real processes need, one case after another.

    One that dies is reported with its last words, and the others, which would wait for it, are ended.
    """
    shared = {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port()), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    asked = json.dumps([device, [(recipe.to_dict(), shard) for recipe, shard in cases], str(folder)])
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            command = [sys.executable, "-c", RANK, asked]
            processes.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + SECONDS
    try:
        while not any(statuses := [process.poll() for process in processes]) and None in statuses:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert statuses == [0] * ranks, "\n".join(
        f"rank {rank} ended with status {status}:\n{log.read_text()[-3000:]}"
        for rank, (status, log) in enumerate(zip(statuses, logs, strict=True))
    )
    return json.loads((folder / "measured").read_text())


def of(recipe, *techniques):
    return replace(recipe, techniques=tuple(map(parse_technique, techniques)))


# ---- on this machine's processors, with gloo ----

TWO = [
    (of(TINY), "none"), (of(TINY, *CHECKPOINTING), "gradients"), (of(TINY), "full"), (of(TINY, *HALF), "full"),
]  # fmt: skip
THREE = [(of(TINY, *HALF), "none"), (of(TINY, *CHECKPOINTING), "full")]


@pytest.mark.dear
@pytest.mark.parametrize(
    ("ranks", "cases"), [pytest.param(2, TWO, id="two"), pytest.param(3, THREE, id="three", marks=pytest.mark.long)]
)
def test_a_rank_needs_what_a_real_one_needs(ranks, cases, tmp_path, subtests):
    for (recipe, shard), real in zip(cases, measured(cases, ranks, tmp_path), strict=True):
        with subtests.test(recipe=recipe.label, shard=shard):
            predicted = predict(recipe, "cpu", ranks=ranks, shard=shard)
            assert predicted.peak_allocated_bytes == real["peak_allocated_bytes"]
            missed = {phase: real["by_phase"][phase] - needed for phase, needed in predicted.by_phase.items()}
            assert missed["forward"] == missed["backward"] == 0
            # the norms of the gradients are there twice: a fake message that nobody waits for is its answer
            norms = 4 * (2 * 4 if "lora" in recipe.label else 52)
            assert missed["optimizer_step"] == (0 if shard == "none" else norms)
            # the losses of all rows are kept, and in the shadow there are fewer
            assert 0 <= missed["evaluation"] <= 4 * HELD_OUT_TOKENS / recipe.sequence_length


# ---- on emulated GPUs ----


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("shard", "techniques"), [("none", ()), ("full", CHECKPOINTING)])
def test_a_rank_on_a_card_needs_what_a_real_process_needs(shard, techniques, tmp_path):
    """Each in processes of its own: one after another in the same ones, the second did not always need as much."""
    recipe = of(SMALL, *techniques)
    (real,) = measured([(recipe, shard)], 2, tmp_path, "cuda", environment(gpu("h100"), 2))
    predicted = predict(recipe, "h100", ranks=2, shard=shard, engine=EMULATOR)
    assert real["memory_source"] == "emulated:h100"
    assert predicted.peak_allocated_bytes == real["peak_allocated_bytes"]
    assert predicted.peak_reserved_bytes == real["peak_reserved_bytes"]
    shadow = predict(recipe, "h100", ranks=2, shard=shard, engine=SHADOW)
    assert shadow.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=0.01)
    assert predicted.maximum_by_category[Category.GRADIENTS] > 0  # DDP's buckets, too


ZERO, ZERO_OF_THREE = [("zero2", ()), ("zero3", CHECKPOINTING)], [("zero2", ()), ("zero3", ())]
# in processes of its own: an engine before it would leave something behind
ON_THE_HOST, ON_THE_HOST_OF_THREE = [("zero3_offload", HALF)], [("zero3_offload", ())]


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@needs_deepspeed
@pytest.mark.parametrize(
    ("ranks", "shards"),
    [
        pytest.param(2, ZERO, id="two"),
        pytest.param(2, ON_THE_HOST, id="two on the host"),
        pytest.param(3, ZERO_OF_THREE, id="three", marks=pytest.mark.long),
        pytest.param(3, ON_THE_HOST_OF_THREE, id="three on the host", marks=pytest.mark.long),
    ],
)
def test_a_rank_of_zero_on_a_card_needs_what_a_real_process_needs(ranks, shards, tmp_path, subtests):
    cases = [(replace(of(TINY, *techniques), steps=3), shard) for shard, techniques in shards]
    found = measured(cases, ranks, tmp_path, "cuda", environment(gpu("h100"), ranks))
    for (recipe, shard), real in zip(cases, found, strict=True):
        with subtests.test(recipe=recipe.label, shard=shard):
            predicted = predict(recipe, "h100", ranks=ranks, shard=shard, engine=EMULATOR)
            assert predicted.peak_allocated_bytes == real["peak_allocated_bytes"]
            assert predicted.peak_reserved_bytes == real["peak_reserved_bytes"]
            alone = predict(recipe, "h100", engine=EMULATOR)  # whose weights nobody has parted
            assert predicted.parameters == real["parameters"] == alone.parameters
            assert predicted.trainable_parameters == real["trainable_parameters"] == alone.trainable_parameters
            again = predict(replace(recipe, steps=4), "h100", ranks=ranks, shard=shard, engine=EMULATOR)
            assert again.peak_allocated_bytes == predicted.peak_allocated_bytes  # the first left nothing behind


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@needs_deepspeed
def test_a_card_that_is_too_small_needs_what_a_larger_one_of_its_kind_does():
    recipe = replace(SMALL, effective_batch_size=16, sequence_length=1024)
    asked = {"ranks": 2, "shard": "zero3_offload", "engine": EMULATOR}
    small, large = (predict(recipe, name, **asked) for name in ("rtx3060", "rtx3090"))
    assert (small.fits, large.fits) == (False, True)
    assert small.peak_allocated_bytes == large.peak_allocated_bytes  # the attempt that failed left nothing behind


# ---- any number of them ----


def shared_by(ranks):
    """The prediction for one rank of so many, of which each has two sequences."""
    return predict(replace(TINY, effective_batch_size=2 * ranks), "cpu", ranks=ranks, shard="full")


def test_what_is_sharded_shrinks_with_the_ranks_and_the_rest_stays():
    few, many = shared_by(2), shared_by(4)
    assert (few.micro_batch_size, many.micro_batch_size) == (2, 2)
    states = [predicted.maximum_by_category[Category.OPTIMIZER_STATES] for predicted in (few, many)]
    assert 1.95 < states[0] / states[1] <= 2.0
    kept = few.maximum_by_category[Category.WEIGHTS] + states[0]
    assert 0 < few.by_phase["forward"] - many.by_phase["forward"] < kept


@pytest.mark.dear
def test_there_may_be_a_thousand_ranks():
    most = shared_by(1024)
    assert (most.ranks, most.shard, most.micro_batch_size) == (1024, "full", 2)
    states = [predicted.maximum_by_category[Category.OPTIMIZER_STATES] for predicted in (shared_by(4), shared_by(64))]
    assert states[1] < states[0] / 15


def test_several_ranks_leave_nothing_behind_for_one():
    before = predict(replace(TINY, steps=4), "cpu")
    shared = predict(replace(TINY, steps=4), "cpu", ranks=2)
    after = predict(replace(TINY, steps=5), "cpu")
    assert before.by_category == after.by_category
    assert shared.peak_allocated_bytes != before.peak_allocated_bytes
    assert (before.ranks, before.shard) == (1, "")


def test_micro_batches_that_are_summed_are_shared_first():
    accumulated = predict(of(TINY, "gradient_accumulation=steps:4"), "cpu", ranks=2)
    assert (accumulated.micro_batch_size, accumulated.gradient_accumulation_steps) == (3, 2)


REFUSED = [
    ({"shard": "full"}, "shard: among how many ranks"),
    ({"ranks": 5}, "ranks: 5 cannot share an effective batch of 12"),
    ({"ranks": 2048}, "ranks: 2048 is not a number from 1 to 1,024"),
    ({"ranks": 2, "shard": "half"}, "shard: there is no"),
    ({"ranks": 2, "shard": "full_offload", "gpu": "t4", "engine": SHADOW}, "shard: the shadow cannot predict"),
]
if find_spec("deepspeed"):
    REFUSED.append(({"ranks": 2, "shard": "zero3"}, "shard: the shadow cannot predict zero3"))


def test_what_cannot_be_is_refused(subtests):
    for asked, message in REFUSED:
        with subtests.test(message=message), pytest.raises(ConfigurationError, match=message):
            predict(TINY, **{"gpu": "cpu", **asked})


def test_the_command_says_whose_memory_it_is(capsys):
    command = "predict gpt2-tiny --gpu cpu --batch-size 12 --sequence-length 32 --ranks 3 --shard full"
    assert main(command.split()) == 0
    output = capsys.readouterr().out
    assert "4 × 32 tokens at a time, on each of 3 ranks (shard full)" in output
    assert "beside this, outside of PyTorch's allocator" in output
