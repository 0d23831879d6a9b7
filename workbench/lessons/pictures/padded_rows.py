"""Lesson 11: one batch of whole paragraphs, padded in two ways, and the same tokens packed."""

from itertools import accumulate, islice
from random import Random
from typing import Any

from workbench.base.categories import Category
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS
from workbench.models import load, source
from workbench.recipe import Recipe
from workbench.techniques.padding import make_examples
from workbench.texts.corpus import Conversations, load_corpus

PANEL = 204  # pixels of T tokens
GAP = 24
WIDTH = 3 * PANEL + 2 * GAP
HEIGHT = 128
TOP = 30
CHARACTERS = 200_000  # of a text, enough to draw a batch from
CONVERSATIONS = 500
REAL = COLOURS[Category.ACTIVATIONS]


def padded_rows(recipe: Recipe) -> Drawing:
    """As many paragraphs as a batch has, drawn at random from the beginning of the recipe's text."""
    length = recipe.sequence_length
    lengths = _lengths(recipe)
    longest = max(lengths)
    real = sum(lengths)
    row = HEIGHT / len(lengths)
    shares = [1 - real / (len(lengths) * width) for width in (length, longest)]
    picture = Drawing(
        WIDTH,
        TOP + HEIGHT + 26,
        f"{len(lengths)} paragraphs of {min(lengths)} to {longest} tokens. In rows of {length} tokens {shares[0]:.0%} "
        f"of the places are grey, that is padding; in rows as long as the longest paragraph {shares[1]:.0%}. Packed "
        "one behind the other they need fewer rows, and no padding.",
    )
    for panel, width in enumerate((length, longest)):
        x = panel * (PANEL + GAP)
        for number, tokens in enumerate(lengths):
            y = TOP + number * row
            picture.area(x, y, PANEL * width / length, row - 2)
            picture.area(x, y, PANEL * tokens / length, row - 2, REAL)
        picture.words(x, TOP + HEIGHT + 18, f"{shares[panel]:.0%} padding")
    _draw_packed(picture, lengths, length, row)
    titles = (f"padded to T = {length}", f"to the longest, {longest}", "packed")
    for panel, title in enumerate(titles):
        picture.words(panel * (PANEL + GAP), 18, title, bold=True)
    return picture


def _lengths(recipe: Recipe) -> list[int]:
    """Of the paragraphs of one batch, in tokens."""
    tokenizer = load.load_tokenizer(source.locate(recipe.model))
    corpus = load_corpus(recipe.corpus)
    documents: Any = islice(Conversations(corpus, tokenizer), CONVERSATIONS)
    if isinstance(corpus.train, str) and not corpus.loss:
        documents = corpus.train[:CHARACTERS]
    rows = make_examples(documents, tokenizer, recipe.sequence_length, 1)
    batch = Random(recipe.seed).sample(rows, min(recipe.effective_batch_size, len(rows)))
    return [example["length"] for example in batch]


def _draw_packed(picture: Drawing, lengths: list[int], length: int, row: float) -> None:
    """The same paragraphs one behind the other, cut into rows of `length` tokens; a line where one ends."""
    x = 2 * (PANEL + GAP)
    left = sum(lengths)
    number = 0
    while left > 0:
        picture.area(x, TOP + number * row, PANEL * min(1, left / length), row - 2, REAL)
        left -= length
        number += 1
    for end in accumulate(lengths):
        full, tokens = divmod(end, length)
        y = TOP + full * row
        picture.line(x + PANEL * tokens / length, y, x + PANEL * tokens / length, y + row - 2)
    picture.words(x, TOP + number * row + 18, "no padding")
