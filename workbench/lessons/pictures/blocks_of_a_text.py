"""Lesson 01: how a text becomes blocks, a batch of them a step, and what is held out."""

from itertools import pairwise

from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import LINES
from workbench.recipe import Recipe

WIDTH = 660
READ = LINES[0]
HELD_OUT = LINES[4]
SHOWN = 8  # tokens of the first block
TILE = WIDTH / SHOWN
ROW = 9  # height of a block in a step


def blocks_of_a_text(recipe: Recipe) -> Drawing:
    """The text to scale, with what a run reads of it; the blocks of one step; and what a block asks of the model."""
    from workbench import models
    from workbench.texts.corpus import load_corpus, make_blocks

    tokenizer = models.load_tokenizer(models.locate(recipe.model))
    batch = recipe.effective_batch_size
    length = recipe.sequence_length
    blocks = make_blocks(load_corpus(recipe.corpus), tokenizer, length, batch)
    train = len(blocks.train)
    held_out = len(blocks.held_out)
    read = recipe.steps * batch
    tokens = [tokenizer.decode([number]) for number in blocks.train[train // 2]["input_ids"][: SHOWN + 1]]
    picture = Drawing(
        WIDTH,
        178 + ROW * batch,
        f"A text of {train + held_out} blocks of {length} tokens: {recipe.steps} steps of {batch} read {read} of them, "
        f"and {held_out} at its end are held out. In a block every token is to be predicted from those before it.",
    )
    _draw_text(picture, train, held_out, read, length)
    picture.words(0, 92, f"one step: {batch} blocks of {length} tokens, then AdamW changes the weights", bold=True)
    for row in range(batch):
        picture.area(0, 102 + ROW * row, WIDTH, ROW - 2, READ)
    _draw_block(picture, tokens, 128 + ROW * batch)
    return picture


def _draw_text(picture: Drawing, train: int, held_out: int, read: int, length: int) -> None:
    pixels = WIDTH / (train + held_out)
    picture.words(0, 16, f"the text: {train + held_out:,} blocks of {length} tokens", bold=True)
    picture.area(0, 26, train * pixels, 20)
    picture.area(0, 26, min(read, train) * pixels, 20, READ)
    picture.area(train * pixels, 26, held_out * pixels, 20, HELD_OUT)
    picture.words(0, 62, f"read in this run: {read}", size=12)
    picture.words(WIDTH, 62, f"held out, never trained on: {held_out}", anchor="end", size=12)


def _draw_block(picture: Drawing, tokens: list[str], y: float) -> None:
    """Tokens in a row; below each the next one, which the model is to predict."""
    picture.words(0, y, "one block: what the model reads, and below it what it should say", bold=True)
    for place, (token, following) in enumerate(pairwise(tokens)):
        picture.area(place * TILE, y + 10, TILE - 4, 18)
        for line, text in ((y + 24, token), (y + 44, following)):
            shown = text.replace("\n", "⏎").strip(" ")[:9]
            picture.words(place * TILE + TILE / 2 - 2, line, shown, anchor="middle", size=12)
