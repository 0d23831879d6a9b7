"""Parameters and bytes of GPT-2 in fp32, counted by hand.

A block keeps 28 tensors of (B, T, C) for its backward pass (lesson 03), and the loss three of (B, T, V) (lesson 13).
"""

from typing import Any

from workbench.base.categories import Category

FP32 = 4  # bytes
Stack = dict[str, float]  # bytes by category


def block_parameters(config: Any) -> int:
    return int(12 * config.n_embd**2 + 13 * config.n_embd)


def parameters(config: Any) -> int:
    """Count the parameters of the whole model; the head shares the embedding's."""
    outside = (config.vocab_size + config.n_positions + 2) * config.n_embd
    return int(outside + config.n_layer * block_parameters(config))


def token_bytes(config: Any) -> Stack:
    """Return the bytes that each token of a batch adds, by category."""
    return {
        Category.ACTIVATIONS: FP32 * (28 * config.n_layer + 2) * config.n_embd,
        Category.LOGITS_AND_LOSS: FP32 * 3 * config.vocab_size,
    }


def bytes_over_step(config: Any, tokens: int) -> list[Stack]:
    """Return the bytes that are alive, by category, at the instants of one step.

    They are: after each block of the forward pass, at the loss, after each block of the backward pass, and two instants
    of AdamW's step.
    """
    layers = config.n_layer
    whole = parameters(config)
    embedding = config.vocab_size * config.n_embd

    def stack(tensors: int, logits: int, gradients: int) -> Stack:
        return {
            Category.WEIGHTS: FP32 * whole,
            Category.OPTIMIZER_STATES: 2 * FP32 * whole,
            Category.GRADIENTS: FP32 * gradients,
            Category.ACTIVATIONS: FP32 * tensors * tokens * config.n_embd,
            Category.LOGITS_AND_LOSS: FP32 * logits * tokens * config.vocab_size,
        }

    tensors = [28 * blocks + 2 for blocks in range(layers + 1)]
    forward = [stack(kept, 0, 0) for kept in tensors[1:]]
    loss = stack(tensors[-1], 3, 0)
    # the gradient of the head is there first, then that of one block after the other
    back = []
    for done in range(1, layers):
        back.append(stack(tensors[-1 - done], 0, embedding + done * block_parameters(config)))
    last = stack(0, 0, whole + 2 * embedding)  # the embedding's gradient, and its two parts
    adam = stack(0, 0, whole)
    return [*forward, loss, *back, last, adam, adam]


def peak_bytes(step: list[Stack]) -> float:
    return max(sum(stack.values()) for stack in step)
