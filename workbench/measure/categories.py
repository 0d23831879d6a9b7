"""What memory is used for, when, and how many bytes that is. Measuring and predicting share these names."""

import re
from decimal import Decimal
from enum import StrEnum

from workbench.errors import ConfigurationError, brief


class Category(StrEnum):
    """What a byte of device memory holds. At any instant the categories sum to the bytes in use."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits_and_loss"
    TEMPORARIES = "temporaries"
    UNATTRIBUTED = "unattributed"


class Phase(StrEnum):
    """The parts of training between which the meter distinguishes. Gradient clipping belongs to the optimizer step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    EVALUATION = "evaluation"


def format_bytes(number: float) -> str:
    """Bytes as people read them, in binary units: `1536` is `'1.5 KiB'`."""
    units = ("B", "KiB", "MiB", "GiB")
    power = 0
    while abs(number) >= 1024 and power < len(units) - 1:
        number, power = number / 1024, power + 1
    digits = 0 if power == 0 or abs(number) >= 100 else 1
    return f"{number:.{digits}f} {units[power]}"


UNITS = {name: 2 ** (10 * power) for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)}
UNITS |= {name: 10 ** (3 * power) for power, name in enumerate(("KB", "MB", "GB", "TB"), start=1)}
UNITS |= {name.lower(): size for name, size in UNITS.items()} | {"B": 1, "bytes": 1}


def parse_bytes(text: str | int, owner: str) -> int:
    """Bytes from what people write: `"8GiB"` is 8 · 2³⁰, `"8 GB"` is 8 · 10⁹; an integer is bytes already.

    Raises:
        ConfigurationError: no unit, a unit that may mean either, or not more than zero; `owner` is named.
    """
    found = isinstance(text, str) and re.fullmatch(r"\s*(\d{1,99}(?:\.\d{1,99})?)\s*([A-Za-z]+)\s*", text)
    nbytes = Decimal(found[1]) * UNITS.get(found[2], 0) if found else text if type(text) is int else 0
    if not 1 <= nbytes < 2**63:
        raise ConfigurationError(
            f"{owner}: {brief(text)} is not an amount of memory. Write a number above zero and its unit, less than "
            "2^63 bytes in all: 8GiB (2^30 bytes each), 512MiB, or 8GB (10^9 bytes each)."
        )
    return int(nbytes)
