"""The model of the allocator against PyTorch's own, under the emulated GPU: random requests, the same four numbers.

Both get the same requests; what is refused, and the bytes after every event, must be equal. The real one runs in a
process of its own for each card: an allocator's settings are those of its process.
"""

import random
from dataclasses import replace

import pytest
import torch

from workbench.gpus.caching_allocator import CachingAllocator, OutOfCapacity
from workbench.gpus.catalogue import KIB, MIB, gpu
from workbench.gpus.emulator.call import PROCESSES, call_on

EVENTS = 4000
KEPT = 120  # blocks at once
SIZES = (4 * KIB, 512 * KIB, MIB, 4 * MIB, 10 * MIB, 40 * MIB, 300 * MIB)  # up to each, as often as up to any other
LARGE = gpu("h100")
SMALL = replace(LARGE, memory_bytes=3 * 1024 * MIB)  # on which some requests are refused


def requests(seed):
    """(kind, name, bytes), of random sizes and in random order."""
    draw, living, events = random.Random(seed), [], []
    for name in range(EVENTS):
        if living and (len(living) >= KEPT or draw.random() < 0.45):
            events.append(("give", living.pop(draw.randrange(len(living))), 0))
        else:
            living.append(name)
            events.append(("take", name, draw.randint(1, draw.choice(SIZES))))
    return events


def real(events, expandable):
    """Of each event: whether it was refused, and the bytes that are allocated and reserved after it; and the peaks."""
    torch.cuda.init()
    if expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    blocks, numbers = {}, []
    for kind, name, nbytes in events:
        refused = False
        if kind == "take":
            try:
                blocks[name] = torch._C._cuda_cudaCachingAllocator_raw_alloc(nbytes, 0)
            except torch.OutOfMemoryError:
                refused = True
        elif name in blocks:
            torch._C._cuda_cudaCachingAllocator_raw_delete(blocks.pop(name))
        numbers.append((refused, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    return numbers, (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def modelled(events, card, expandable):
    """The same of the model."""
    capacity = card.memory_bytes - card.context_bytes_estimate
    allocator = CachingAllocator(capacity, expandable, card.memory_bytes)
    blocks, numbers = {}, []
    for kind, name, nbytes in events:
        refused = False
        if kind == "take":
            try:
                blocks[name] = allocator.malloc(nbytes)
            except OutOfCapacity:
                refused = True
        elif name in blocks:
            allocator.free(blocks.pop(name))
        numbers.append((refused, allocator.allocated_bytes, allocator.reserved_bytes))
    return numbers, (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)


@pytest.mark.usefixtures("emulator")
@pytest.mark.xdist_group("emulated")
def test_the_same_requests_give_the_same_numbers(subtests):
    for expandable in (False, True):
        for card in (LARGE, SMALL):
            with subtests.test(expandable=expandable, memory_bytes=card.memory_bytes):
                events = requests(seed=repr((expandable, None if card is LARGE else card.memory_bytes)))
                PROCESSES.end(card.name)
                truth, true_peaks = call_on(card, real, events, expandable, modules=("torch",))
                numbers, peaks = modelled(events, card, expandable)
                assert any(refused for refused, *_ in truth) is (card is SMALL)
                different = [
                    (event, right, wrong)
                    for event, right, wrong in zip(events, truth, numbers, strict=True)
                    if right != wrong
                ]
                assert not different, different[0]
                assert peaks == true_peaks
    PROCESSES.end(LARGE.name)
