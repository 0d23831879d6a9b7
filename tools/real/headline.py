"""The ladders of `tools/headline.py`, measured on a CUDA device: peaks, speeds, losses at searched rates.

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
RUNGS_124M = [
    (), CHECKPOINTED[:1], CHECKPOINTED, FUSED, BF16, FLASH, (*FLASH, "step_in_backward"),
    *((*BF16, f"optimizer=kind:adamw_{kind}") for kind in ("stochastic", "8bit_stochastic", "kahan")),
]  # fmt: skip
FOUR_BITS = (*BF16, "optimizer=kind:adamw_4bit_stochastic", "step_in_backward")
SMALLEST = ("chunked_cross_entropy=chunk:64", *(words for words in FOUR_BITS if words != "chunked_cross_entropy"))
CONTEXT_MIB = 512  # of CUDA, which a card holds beside what the allocator may take
RUNGS_XL = [
    (16, BF16), (12, FLASH), (12, (*FLASH, "step_in_backward")), (8, (*FLASH, "step_in_backward")), (8, FOUR_BITS),
    (6, (*SMALLEST, "allocator")), (6, (*SMALLEST, "allocator", "activation_offloading")),
]  # fmt: skip
RATES = (1e-4, 3e-4, 1e-3)
TRAINED = [(), FLASH, BF16, (*FLASH, "step_in_backward")]


def recipe(model: str, techniques: tuple[str, ...], **settings) -> Recipe:
    shape = {"effective_batch_size": 8, "sequence_length": 1024, "steps": 13}
    return Recipe(model=f"random:{model}", techniques=tuple(map(parse_technique, techniques)), **shape | settings)


def measured(one: Recipe, folder: Path, **options) -> Record:
    began = time.monotonic()
    try:
        record = run(one, device="cuda", folder=folder, **options)
    except OutOfMemoryError:
        record = read_all(folder)[-1]
    gib = (record.peak_allocated_bytes or 0) / 2**30
    print(f"{one.model} {one.label} {options}: {record.status}, {gib:.2f} GiB, {record.tokens_per_s or 0:,.0f} "
          f"tokens/s, {record.held_out_loss}, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    return record


def memory(folder: Path) -> None:
    for techniques in RUNGS_124M:
        measured(recipe("gpt2", techniques), folder)
    for card_gib, techniques in RUNGS_XL:
        measured(recipe("gpt2-xl", techniques, steps=6), folder, memory_cap=f"{card_gib * 1024 - CONTEXT_MIB}MiB")


def losses(folder: Path) -> None:
    for techniques in TRAINED:
        first = recipe("gpt2", techniques, steps=120, dropout=0.0)
        tried = {rate: measured(replace(first, learning_rate=rate), folder).held_out_loss for rate in RATES}
        best = min(tried, key=lambda rate: tried[rate] or 1e9)
        for seed in (1, 2):
            measured(replace(first, learning_rate=best, seed=seed), folder)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    {"memory": memory, "losses": losses}[sys.argv[2]](folder)
