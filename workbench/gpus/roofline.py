"""How long a step takes at least on a GPU: every operation at the rate of what it is bound by.

    seconds(predict(recipe, "t4").work, RATES["t4"])

The model is that of Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model" (CACM 52(4),
2009). Matrix products and attention are taken as bound by arithmetic, in the precision that they have, all else by
memory. Every operation reads and writes its tensors once, and nothing overlaps: neither two kernels, nor a copy over
the bus and what computes. Not in it: the time to launch kernels, which small micro-batches on a large card consist of,
small products, which are bound by memory, and the disk behind the bus.

The rates (`rates.json`) are peaks from the vendor's data sheets: dense, without sparsity; fp32 outside of the tensor
cores, since PyTorch leaves TF32 off; fp16 and bf16 with sums in fp32; the bus (PCIe) in one direction, 128 of 130 bits.
No card reaches them: an H100 computed at 0.75 of its peaks, copied at 0.89 in memory and at 0.87 over the bus
(`data/reference/h100/card.json`). Those of a CPU are measured ones, of two cores, and its bus is a disk. Compare two
recipes by this, and believe no seconds.
"""

from collections.abc import Mapping
from typing import Any

from workbench.base.paths import beside

RATES: dict[str, dict[str, Any]] = beside(__file__, "rates.json")


def seconds(work: Mapping[str, int], rates: Mapping[str, Any]) -> float:
    """Of one optimizer step, from what it asks for of each kind (`Prediction.work`), and how much of it a second."""
    return float(sum(amount / rates[name] for name, amount in work.items()))


def flops(work: Mapping[str, int]) -> int:
    """Floating-point operations, of whatever precision."""
    return sum(amount for name, amount in work.items() if name.endswith("_flops"))
