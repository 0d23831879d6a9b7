"""The categories of memory, the phases of training, and amounts of bytes.

Measuring and predicting share these names.
"""

import re
from decimal import Decimal
from enum import StrEnum

from workbench.base.errors import ConfigurationError, brief


class Category(StrEnum):
    """A use of device memory. At any instant the categories sum to the bytes in use."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"
    TEMPORARIES = "temporaries"
    UNATTRIBUTED = "unattributed"


class Phase(StrEnum):
    """One of the parts of training that the meter tells apart. Gradient clipping belongs to the optimizer step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    EVALUATION = "evaluation"


def format_bytes(number: float) -> str:
    """Write bytes as people read them, in binary units: `1536` is `'1.5 KiB'`."""
    units = ["B", "KiB", "MiB", "GiB"]
    while abs(number) >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or abs(number) >= 100 else 1
    return f"{number:.{digits}f} {units[0]}"


UNITS = {
    "B": 1,
    "bytes": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
# Units may be written in lower case too, but not `b`, which may mean bits.
UNITS |= {name.lower(): size for name, size in UNITS.items() if name != "B"}
AMOUNT = re.compile(r"\s*(\d{1,99}|\d{1,3}(?:,\d{3}){1,20})(\.\d{1,99})?\s*([A-Za-z]+)\s*")
GROUPED = re.compile(r"-?\d{1,3}(,\d{3})+")


def parse_bytes(text: str | int, owner: str) -> int:
    """Read the bytes that people write: `"8GiB"` is 8 · 2³⁰, `"8 GB"` is 8 · 10⁹; an integer is bytes already.

    Raises:
        ConfigurationError: no unit, a unit that may mean either, or not more than zero; `owner` is named.
    """
    nbytes: int | Decimal = 0  # 0, which is refused below, stands for a text that is no amount
    if isinstance(text, str):
        match = AMOUNT.fullmatch(text)
        if match:
            nbytes = Decimal(drop_thousands_commas(match[1]) + (match[2] or "")) * UNITS.get(match[3], 0)
    elif isinstance(text, int) and not isinstance(text, bool):
        nbytes = text
    if not 1 <= nbytes < 2**63:
        raise ConfigurationError(
            f"{owner}: {brief(text)} is not an amount of memory. Write a number above zero and its "
            "unit, less than 2^63 bytes in all: 8GiB (2^30 bytes each), 512MiB, or 8GB (10^9 bytes "
            "each)."
        )
    return int(nbytes)


def drop_thousands_commas(number: str) -> str:
    """Return `1,024` without its comma; `1,5` may mean one and a half, and stays as it is."""
    return number.replace(",", "") if GROUPED.fullmatch(number.strip()) else number
