"""What memory is used for, when, and how many bytes that is. Measuring and predicting share these names."""

from enum import StrEnum


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
