"""Measure the ladders of `tools/headline.py` on a CUDA device: peaks, speeds, losses at searched rates.

    python tools/real/headline.py FOLDER memory     # 124M rung by rung; XL on cards that are capped
    python tools/real/headline.py FOLDER losses     # held-out loss of new weights, three seeds

Weights are new (`random:gpt2`), which changes neither memory nor speed; the losses compare trainings from scratch.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from workbench.base.errors import OutOfMemoryError
from workbench.journal.record import Record, read_all
from workbench.recipe import Recipe
from workbench.techniques import parse_technique
from workbench.training.run import run

CHECKPOINTED = ("gradient_checkpointing", "chunked_cross_entropy")
FUSED = (*CHECKPOINTED, "fused_gelu")
BF16 = (*FUSED, "pure_bf16")
FLASH = (*BF16, "optimizer=kind:adamw_flash")
FLASH_IN_BACKWARD = (*FLASH, "step_in_backward")
FOUR_BIT_STEP = ("optimizer=kind:adamw_4bit_stochastic", "step_in_backward")
SMALLEST = (
    "chunked_cross_entropy=chunk:64",
    "gradient_checkpointing",
    "fused_gelu",
    "pure_bf16",
    *FOUR_BIT_STEP,
    "allocator",
)
RUNGS_124M = [
    (),
    ("gradient_checkpointing",),
    CHECKPOINTED,
    FUSED,
    BF16,
    FLASH,
    FLASH_IN_BACKWARD,
    (*BF16, "optimizer=kind:adamw_stochastic"),
    (*BF16, "optimizer=kind:adamw_8bit_stochastic"),
    (*BF16, "optimizer=kind:adamw_kahan"),
]
RUNGS_XL = [  # GiB of the card, and what makes GPT-2 XL fit
    (16, BF16),
    (12, FLASH),
    (12, FLASH_IN_BACKWARD),
    (8, FLASH_IN_BACKWARD),
    (8, (*BF16, *FOUR_BIT_STEP)),
    (6, SMALLEST),
    (6, (*SMALLEST, "activation_offloading")),
]
CONTEXT_MIB = 512  # CUDA's context, which a card holds beside what the allocator may take
RATES = (1e-4, 3e-4, 1e-3)
TRAINED = [(), FLASH, BF16, FLASH_IN_BACKWARD]


def main() -> None:
    folder = Path(sys.argv[1])
    ladders = {"memory": memory, "losses": losses}
    ladders[sys.argv[2]](folder)


def memory(folder: Path) -> None:
    for techniques in RUNGS_124M:
        measure(recipe("gpt2", techniques), folder)
    for card_gib, techniques in RUNGS_XL:
        cap = f"{card_gib * 1024 - CONTEXT_MIB}MiB"
        measure(recipe("gpt2-xl", techniques, steps=6), folder, memory_cap=cap)


def losses(folder: Path) -> None:
    """Train at each rate with the first seed, and at the best of them with two more."""
    for techniques in TRAINED:
        first = recipe("gpt2", techniques, steps=120, dropout=0.0)
        loss_at = {}
        for rate in RATES:
            record = measure(replace(first, learning_rate=rate), folder)
            loss_at[rate] = record.held_out_loss or 1e9  # a training that broke off has none
        best = min(RATES, key=loss_at.__getitem__)
        for seed in (1, 2):
            measure(replace(first, learning_rate=best, seed=seed), folder)


def recipe(model: str, techniques: tuple[str, ...], **settings) -> Recipe:
    shape = {"effective_batch_size": 8, "sequence_length": 1024, "steps": 13}
    return Recipe(
        model=f"random:{model}",
        techniques=tuple(map(parse_technique, techniques)),
        **shape | settings,
    )


def measure(recipe: Recipe, folder: Path, **options) -> Record:
    began = time.monotonic()
    try:
        record = run(recipe, device="cuda", folder=folder, **options)
    except OutOfMemoryError:
        record = read_all(folder)[-1]
    gib = (record.peak_allocated_bytes or 0) / 2**30
    speed = record.tokens_per_s or 0
    seconds = time.monotonic() - began
    print(
        f"{recipe.model} {recipe.label} {options}: {record.status}, {gib:.2f} GiB, "
        f"{speed:,.0f} tokens/s, {record.held_out_loss}, {seconds:.0f} s",
        flush=True,
    )
    return record


if __name__ == "__main__":
    main()
