"""The model of the allocator against PyTorch's own, under the emulated GPU: random requests, the same four numbers.

Both get the same requests; what is refused, and the bytes after every event, must be equal. The real one runs in a
child process, because the emulated GPU is there from the start of a process or not at all.
"""

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from workbench.gpus.caching_allocator import KIB, MIB, CachingAllocator, OutOfCapacity
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import place
from workbench.gpus.emulator.launch import environment

EVENTS = 4000
KEPT = 120  # blocks at once
SIZES = (4 * KIB, 512 * KIB, MIB, 4 * MIB, 10 * MIB, 40 * MIB, 300 * MIB)  # up to each, as often as up to any other
LARGE_CARD, SMALL_CARD = None, 3 * 1024 * MIB

REAL = """
import json, sys
import torch
torch.cuda.init()
if json.loads(sys.argv[1]):
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
make, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
blocks, found = {}, []
for kind, name, nbytes in json.load(sys.stdin):
    refused = False
    if kind == "take":
        try:
            blocks[name] = make(nbytes, 0)
        except torch.OutOfMemoryError:
            refused = True
    elif name in blocks:
        free(blocks.pop(name))
    found.append([refused, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
json.dump({"found": found, "peaks": peaks}, sys.stdout)
"""


def requests(seed):
    """(kind, name, bytes), of random sizes and in random order."""
    draw, living, made = random.Random(seed), [], []
    for name in range(EVENTS):
        if living and (len(living) >= KEPT or draw.random() < 0.45):
            made.append(("give", living.pop(draw.randrange(len(living))), 0))
        else:
            living.append(name)
            made.append(("take", name, draw.randint(1, draw.choice(SIZES))))
    return made


def real(made, card, expandable):
    command = [sys.executable, "-c", REAL, json.dumps(expandable)]
    done = subprocess.run(command, input=json.dumps(made), env=environment(card), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def model(made, card, expandable):
    capacity = card.memory_bytes - card.context_bytes_estimate
    allocator, blocks, found = CachingAllocator(capacity, expandable, card.memory_bytes), {}, []
    for kind, name, nbytes in made:
        refused = False
        if kind == "take":
            try:
                blocks[name] = allocator.malloc(nbytes)
            except OutOfCapacity:
                refused = True
        elif name in blocks:
            allocator.free(blocks.pop(name))
        found.append([refused, allocator.allocated_bytes, allocator.reserved_bytes])
    return {"found": found, "peaks": [allocator.peak_allocated_bytes, allocator.peak_reserved_bytes]}


@pytest.mark.skipif(not place.is_set_up(), reason="the emulated GPU is not set up (make emulator)")
@pytest.mark.parametrize(
    ("expandable", "memory"),
    [
        pytest.param(False, LARGE_CARD, id="segments"),
        pytest.param(False, SMALL_CARD, id="segments-refusals"),
        pytest.param(True, LARGE_CARD, id="expandable"),
        pytest.param(True, SMALL_CARD, id="expandable-refusals"),
    ],
)
def test_the_same_requests_give_the_same_numbers(expandable, memory):
    card = gpu("h100") if memory is None else replace(gpu("h100"), memory_bytes=memory)
    made = requests(seed=repr((expandable, memory)))
    truth = real(made, card, expandable)
    said = model(made, card, expandable)
    assert any(refused for refused, *_ in truth["found"]) is (memory is not None)
    different = [n for n, pair in enumerate(zip(truth["found"], said["found"], strict=True)) if pair[0] != pair[1]]
    assert not different, (made[different[0]], truth["found"][different[0]], said["found"][different[0]])
    assert said["peaks"] == truth["peaks"]
