"""The rates are those of the cards, and what is estimated from them is near to what was measured on one."""

import csv
import json
import re
from itertools import combinations
from math import exp, log

import pytest

from workbench.base.paths import DATA
from workbench.gpus.catalogue import GPUS
from workbench.gpus.roofline import RATES, flops, seconds

H100 = DATA / "reference" / "h100"
KINDS = ("fp32_flops", "half_flops", "memory_bytes", "bus_bytes")
# operations of one multiprocessor in a cycle, from the architectures' white papers: fp32, and the tensor cores with
# sums in fp32, of which GeForce cards have half
IN_A_CYCLE = {
    (6, 0): (128, 256), (7, 0): (128, 1024), (7, 5): (128, 1024), (8, 0): (128, 2048), (8, 6): (256, 1024),
    (8, 9): (256, 1024), (9, 0): (256, 4096), (10, 0): (256, 8192), (12, 0): (256, 1024), (12, 1): (256, 1024),
}  # fmt: skip


def test_every_gpu_has_rates_and_their_source_and_so_has_a_cpu():
    assert set(RATES) == {*GPUS, "cpu"}
    for rates in RATES.values():
        assert set(rates) == {*KINDS, "source"}
    for rates in map(RATES.__getitem__, GPUS):
        assert re.search(r"https://www.nvidia.com|white paper|https://www.techpowerup.com/gpu-specs/", rates["source"])
    assert "tools/against_speeds.py" in RATES["cpu"]["source"]


def test_the_rates_are_those_of_the_multiprocessors_at_a_clock_that_there_is(subtests):
    """A rate with sparsity, or with sums in fp16, would ask for twice the clock; the bus is of three generations."""
    for name, gpu in GPUS.items():
        with subtests.test(gpu=name):
            rates = RATES[name]
            single, half = IN_A_CYCLE[gpu.compute_capability]
            half //= 2 if gpu.title.startswith("GeForce") else 1
            single_clock = rates["fp32_flops"] / single / gpu.multiprocessors
            half_clock = rates["half_flops"] / half / gpu.multiprocessors
            slowest = 1.1e9 if name == "p100" or "laptop" in name else 1.4e9
            assert slowest < single_clock < 2.65e9
            assert slowest < half_clock < 2.65e9
            assert single_clock == pytest.approx(half_clock, rel=0.1)
            assert rates["bus_bytes"] in {15.75e9, 31.5e9, 31.5e9 / 2, 63e9}


def test_an_h100_came_near_its_peaks_and_not_beyond():
    measured = json.loads((H100 / "card.json").read_text(encoding="utf-8"))["rates"]
    found = {
        "fp32_flops": measured["matmul fp32 TFLOP/s"] * 1e12,
        "half_flops": measured["matmul bf16 TFLOP/s"] * 1e12,
        "memory_bytes": measured["copy on the device, read and written, GB/s"] * 1e9,
        "bus_bytes": measured["device to pinned GB/s"] * 1e9,
    }
    assert [found[kind] / RATES["h100"][kind] for kind in KINDS] == pytest.approx([0.76, 0.75, 0.89, 0.87], abs=0.01)


def test_each_kind_of_work_at_its_own_rate():
    rates = {"fp32_flops": 10, "half_flops": 100, "memory_bytes": 4, "bus_bytes": 2, "source": "made up"}
    work = {"fp32_flops": 30, "half_flops": 50, "memory_bytes": 2, "bus_bytes": 3}
    assert seconds(work, rates) == 3 + 0.5 + 0.5 + 1.5
    assert flops(work) == 80
    assert seconds({"fp32_flops": 30}, rates) == 3


# ---- against the speeds of an H100 ----


def rows(folder, device, measured=("measured_speed",)):
    """Label, estimated and measured speed, relative to the baseline; the estimate from the work that is kept there."""
    with (folder / "time.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    times = {
        row["label"]: int(row["steps"]) * seconds({kind: int(row[kind]) for kind in KINDS}, RATES[device])
        for row in found
    }
    return {
        row["label"]: (times["baseline"] / times[row["label"]], *(float(row[m]) for m in measured)) for row in found
    }


ROWS = rows(H100 / "gpt2-124m", "h100")
SMALL = ("steps=8", "gradient_accumulation", "size=2", "tokens=256")  # micro-batches that do not fill the card
HALF = ("mixed_precision", "pure_bf16")


def factors(half, small):
    """Of the rows with and without half precision, and small micro-batches: by how much each is off."""
    chosen = [
        label
        for label in ROWS
        if any(word in label for word in HALF) is half and any(word in label for word in SMALL) is small
    ]
    return [max(ROWS[label][0] / ROWS[label][1], ROWS[label][1] / ROWS[label][0]) for label in chosen]


def test_in_fp32_the_estimate_is_close():
    found = factors(half=False, small=False)
    assert len(found) == 19
    assert exp(sum(map(log, found)) / len(found)) < 1.04
    assert max(found) < 1.16


def test_in_half_precision_and_in_small_micro_batches_it_promises_too_much():
    """Kernels have to be launched, which a card that computes so fast waits for."""
    assert max(factors(half=True, small=False)) < 1.91
    assert max(factors(half=False, small=True)) < 1.41
    assert max(factors(half=True, small=True)) == pytest.approx(5.8, abs=0.05)


def test_the_order_of_two_recipes_is_mostly_that_of_their_speeds():
    apart = [(one, other) for one, other in combinations(ROWS.values(), 2) if abs(log(one[1] / other[1])) > 0.1]
    right = [(one[0] > other[0]) is (one[1] > other[1]) for one, other in apart]
    assert sum(right) / len(right) > 0.93


def test_moving_activations_is_slower_than_computing_them_again():
    estimated = {label: speed for label, (speed, _) in ROWS.items()}
    assert min(estimated, key=estimated.__getitem__) == "activation_offloading"
    assert estimated["gradient_checkpointing"] > 2 * estimated["activation_offloading"]
    assert estimated["gradient_checkpointing + mixed_precision"] > 1 > estimated["optimizer_offloading"]


# ---- against the speeds of two cores of a CPU ----


@pytest.mark.parametrize(("model", "pairs", "right"), [("gpt2-tiny", 200, 0.94), ("gpt2-124m", 13, 1.0)])
def test_on_a_cpu_too_the_order_is_mostly_that_of_the_speeds(model, pairs, right):
    """Of two recipes whose speeds differ by a tenth, and whose three runs do not overlap."""
    found = rows(DATA / "reference" / "cpu" / model, "cpu", ("measured_speed", "slowest", "fastest"))
    apart = [
        (one, other)
        for one, other in combinations(found.values(), 2)
        if abs(log(one[1] / other[1])) > 0.1 and (one[2] > other[3] or other[2] > one[3])
    ]
    assert len(apart) >= pairs
    assert sum((one[0] > other[0]) is (one[1] > other[1]) for one, other in apart) / len(apart) >= right
