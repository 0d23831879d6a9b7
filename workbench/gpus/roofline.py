"""The least time of a step on a GPU, by the roofline model: the peak rate of arithmetic or memory bounds an operation.

    seconds(predict(recipe, "t4").work, RATES["t4"])

The model is that of Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model" (CACM 52(4),
2009). Arithmetic in their precision bounds matrix products and attention; memory bounds all other operations. Every
operation reads and writes its tensors once, and nothing overlaps: neither two kernels, nor a copy over the bus and a
kernel. The model leaves out the time to launch kernels, which is most of the time of small micro-batches on a large
card; that memory bounds small products; and the disk behind the bus.

The rates (`rates.json`) are peaks from the vendor's data sheets: dense, without sparsity; fp32 outside of the tensor
cores, since PyTorch leaves TF32 off; fp16 and bf16 with sums in fp32; the bus (PCIe) in one direction, 128 of 130 bits.
No card reaches them: an H100 computed at 0.75 of its peaks, copied at 0.89 in memory and at 0.87 over the bus
(`data/reference/h100/card.json`). The rates of a CPU were measured on two cores, and its bus is a disk. Compare two
recipes by this, and believe no seconds.
"""

from collections.abc import Mapping
from typing import Any

from workbench.base.paths import read_beside

RATES: dict[str, dict[str, Any]] = read_beside(__file__, "rates.json")


def seconds(work: Mapping[str, int], rates: Mapping[str, Any]) -> float:
    """Return the seconds of one optimizer step: the sum of `work` over `rates`, kind by kind.

    Args:
        work: the floating-point operations and bytes of a step, by kind (`Prediction.work`).
        rates: how many of them the card does in a second, by kind.
    """
    return float(sum(amount / rates[name] for name, amount in work.items()))


def flops(work: Mapping[str, int]) -> int:
    """Return the floating-point operations of a step, in all precisions together."""
    return sum(amount for name, amount in work.items() if name.endswith("_flops"))
