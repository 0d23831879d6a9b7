"""Lesson 09: what each optimizer keeps for a parameter of a GPT-2, counted by hand."""

import math
from collections.abc import Iterator
from typing import Any

from workbench.lessons.drawing import Drawing
from workbench.lessons.pictures.bytes_per_parameter import bytes_per_parameter

KINDS = ("AdamW", "Muon", "AdamW, 8-bit", "SGD, momentum", "Adafactor", "SGD")
SPARED = 4096  # bitsandbytes leaves the states of smaller tensors in 32 bits, and those of embeddings


def optimizer_bytes(config: Any) -> Drawing:
    """Weight, gradient and states in bytes, on average over the parameters of a model with this config."""
    return bytes_per_parameter({kind: (4.0, 4.0, state_bytes(kind, config)) for kind in KINDS})


def state_bytes(kind: str, config: Any) -> float:
    """The bytes of state for one parameter, on average."""
    tensors = [*_tensors(config)]
    whole = sum(_state_bytes(kind, shape, embedding) for shape, embedding in tensors)
    return whole / sum(math.prod(shape) for shape, _ in tensors)


def _state_bytes(kind: str, shape: tuple[int, ...], embedding: bool) -> float:
    count = math.prod(shape)
    matrix = len(shape) == 2
    if kind == "AdamW, 8-bit" and not embedding and count >= SPARED:
        return 2 * count + 2 * 4 * math.ceil(count / 256)
    if kind == "Muon" and matrix and not embedding:
        return 4 * count
    if kind == "Adafactor" and matrix:
        return 4 * sum(shape)
    return count * {"SGD": 0, "SGD, momentum": 4, "Adafactor": 4}.get(kind, 8)


def _tensors(config: Any) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The shape of every tensor of a GPT-2, and whether it is an embedding; the head is the first of these."""
    width = config.hidden_size
    yield (config.vocab_size, width), True
    yield (config.max_position_embeddings, width), True
    for _ in range(config.num_hidden_layers):
        for outputs, inputs in ((3, 1), (1, 1), (4, 1), (1, 4)):
            yield (inputs * width, outputs * width), False
            yield (outputs * width,), False
        for _ in range(4):  # of two LayerNorms
            yield (width,), False
    yield (width,), False
    yield (width,), False
