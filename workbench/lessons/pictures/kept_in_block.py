"""Lesson 03b: what a GPT-2 block computes, and what of it is kept by no, by selective and by full checkpointing."""

from workbench.base.categories import Category
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

# results of a block in their order, in tensors of (B, T, C); is it kept without checkpointing, is it selectively?
RESULTS = (
    ("the block's input", 1, True, True),
    ("LayerNorm", 1, True, False),
    ("c_attn: queries, keys, values", 3, True, True),
    ("attention", 1, True, True),
    ("c_proj", 1, False, True),
    ("sum with the input", 1, True, False),
    ("LayerNorm", 1, True, False),
    ("c_fc", 4, True, True),
    ("GELU, four results", 16, True, False),
    ("c_proj", 1, False, True),
)
LEFT = 212
TILE = 9
COLUMN = 149
ROW = 22
KEPT = COLOURS[Category.ACTIVATIONS]


def kept_in_block() -> Drawing:
    """A row for each result, and a column for each way: coloured tiles are kept, grey ones are not."""
    sums = {
        "without": sum(tensors for _, tensors, plain, _ in RESULTS if plain),
        "selective": sum(tensors for _, tensors, _, selective in RESULTS if selective),
        "checkpointed": 1,
    }
    ways = ", ".join(f"{way} {tensors}" for way, tensors in sums.items())
    picture = Drawing(
        660,
        30 + ROW * len(RESULTS),
        f"The results of one block, in tensors of B × T × C. Kept are: {ways}. Selectively all of the GELU's 16 go.",
    )
    for column, (way, tensors) in enumerate(sums.items()):
        picture.words(LEFT + column * COLUMN, 16, f"{way}: {tensors}", bold=True)
    for row, (name, tensors, plain, selective) in enumerate(RESULTS):
        y = 26 + row * ROW
        picture.words(0, y + 13, name)
        for column, is_kept in enumerate((plain, selective, row == 0)):
            for tile in range(tensors):
                x = LEFT + column * COLUMN + tile * TILE
                picture.area(x, y, TILE - 2, ROW - 7, *([KEPT] if is_kept else []))
    return picture
