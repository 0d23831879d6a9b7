"""The pictures of the lessons: the idea of a technique, drawn to the scale of the reader's own recipe."""

from workbench.lessons.pictures.blocks import checkpointed_blocks, kept_in_block, pack_and_unpack, written_out_and_fused
from workbench.lessons.pictures.cards import message_bar, planned_sets, rungs, three_shortages, when_it_died
from workbench.lessons.pictures.steps import hill_of_a_step, offloaded_step, step_in_parts
from workbench.lessons.pictures.tokens import (
    batch_rectangle,
    blocks_of_a_text,
    kept_logits,
    key_value_cache,
    logits_in_chunks,
    padded_rows,
    prefix_in_front,
)
from workbench.lessons.pictures.weights import (
    block_adapters,
    bytes_per_parameter,
    low_rank_update,
    number_line,
    optimizer_bytes,
    shards,
)

__all__ = [
    "batch_rectangle",
    "block_adapters",
    "blocks_of_a_text",
    "bytes_per_parameter",
    "checkpointed_blocks",
    "hill_of_a_step",
    "kept_in_block",
    "kept_logits",
    "key_value_cache",
    "logits_in_chunks",
    "low_rank_update",
    "message_bar",
    "number_line",
    "offloaded_step",
    "optimizer_bytes",
    "pack_and_unpack",
    "padded_rows",
    "planned_sets",
    "prefix_in_front",
    "rungs",
    "shards",
    "step_in_parts",
    "three_shortages",
    "when_it_died",
    "written_out_and_fused",
]
