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
    sign, size = ("-" if number < 0 else ""), abs(number)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            break
        size /= 1024
    else:
        unit = "GiB"
    return f"{sign}{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{sign}{size:.1f} {unit}"
