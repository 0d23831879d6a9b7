"""Pictures of a text's tokens and of their bytes: rows of a batch, keys and values, logits."""

from itertools import accumulate, islice, pairwise
from random import Random
from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import PALE, WIDTH, Drawing
from workbench.lessons.pictures.by_hand import FP32, parameters, token_bytes
from workbench.recipe import Recipe

SHOWN = 8  # tokens of a block that are drawn
# the beginning of a text that a batch is drawn from: reading all of a large one would take long
CHARACTERS = 200_000
CONVERSATIONS = 500
PANEL = 204  # units: the width of T tokens
HEIGHT = 128  # units: the height of a batch, or of all layers
LAYERS = 4  # layers that are drawn at most; a large model has more


def blocks_of_a_text(recipe: Recipe) -> Drawing:
    """Lesson 01: draw the text to scale, with the part that a run reads.

    Below it stand the blocks of one step, and the tokens of one block, each above the one to be predicted.
    """
    from workbench import models
    from workbench.texts.corpus import load_corpus, make_blocks

    tokenizer = models.load_tokenizer(models.locate(recipe.model))
    batch = recipe.effective_batch_size
    length = recipe.sequence_length
    blocks = make_blocks(load_corpus(recipe.corpus), tokenizer, length, batch)
    train = len(blocks.train)
    held_out = len(blocks.held_out)
    whole = train + held_out
    read = recipe.steps * batch
    picture = Drawing(
        f"A text of {whole} blocks of {length} tokens: {recipe.steps} steps of {batch} read "
        f"{read} of them, and {held_out} at its end are held out. "
        "In a block every token is to be predicted from those before it."
    )
    picture.title(f"the text: {whole:,} blocks of {length} tokens")
    once = min(read, train)
    parts = ((once, Category.WEIGHTS, ""), (train - once, PALE, ""), (held_out, Category.ACTIVATIONS, ""))
    picture.bar(0, 0, 20, parts, WIDTH / whole)
    picture.text(0, 36, f"read in this run: {read}")
    picture.text(WIDTH, 36, f"held out, never trained on: {held_out}", anchor="end")
    picture.title(f"one step: {batch} blocks of {length} tokens, then AdamW changes the weights")
    picture.tiles(0, 0, (WIDTH, 9), Category.WEIGHTS, rows=batch)
    picture.title("one block: what the model reads, and below it what it should say")
    tokens = []
    for number in blocks.train[train // 2]["input_ids"][: SHOWN + 1]:
        text = tokenizer.decode([number]).replace("\n", "⏎")
        tokens.append(text.strip(" ")[:9])
    tile = WIDTH / SHOWN
    for place, (token, following) in enumerate(pairwise(tokens)):
        picture.area(place * tile, 0, tile - 4, 18, PALE, token)
        picture.text((place + 0.5) * tile - 2, 34, following, anchor="middle")
    return picture


def batch_rectangle(config: Any, *shapes: tuple[int, int]) -> Drawing:
    """Lesson 06: draw a rectangle for each (sequences, tokens), all to one scale; the first is the whole."""
    rows, columns = zip(*shapes, strict=True)
    row = 112 / max(rows)
    column = 236 / max(columns)
    whole = rows[0] * columns[0]
    listed = ", ".join(f"{sequences} × {length}" for sequences, length in shapes)
    picture = Drawing(
        f"Rectangles of sequences × tokens, to scale: {listed}. What a step keeps grows with the "
        "area, whichever side is cut."
    )
    kept = format_bytes(sum(token_bytes(config).values()))
    picture.title(f"one line a sequence; each token keeps {kept} of activations and logits")
    x = 0.0
    for sequences, length in shapes:
        picture.tiles(x, 0, (length * column, row), Category.ACTIVATIONS, rows=sequences)
        picture.text(x, sequences * row + 16, f"B × T = {sequences} × {length}", bold=True)
        picture.text(x, sequences * row + 34, f"{sequences * length / whole:.0%} of the area")
        x += length * column + 28
    return picture


def padded_rows(recipe: Recipe) -> Drawing:
    """Lesson 11: draw the paragraphs of a batch, padded in two ways, and packed.

    They are chosen at random from the beginning of the recipe's text.
    """
    length = recipe.sequence_length
    lengths = _lengths(recipe)
    longest = max(lengths)
    row = HEIGHT / len(lengths)

    def padding_in(width: int) -> str:
        return f"{1 - sum(lengths) / (len(lengths) * width):.0%}"

    picture = Drawing(
        f"{len(lengths)} paragraphs of {min(lengths)} to {longest} tokens. "
        f"In rows of {length} tokens {padding_in(length)} of the places are grey, "
        f"that is padding; in rows as long as the longest paragraph {padding_in(longest)}. "
        "Packed one behind the other they need fewer rows, and no padding."
    )
    picture.text(0, 12, f"to T = {length}: {padding_in(length)} padding", bold=True)
    picture.text(228, 12, f"to the longest, {longest}: {padding_in(longest)}", bold=True)
    picture.text(456, 12, "packed: no padding", bold=True)
    picture.top = 22
    for x, width in ((0, length), (228, longest)):
        picture.tiles(x, 0, (PANEL * width / length, row), PALE, rows=len(lengths))
        for number, tokens in enumerate(lengths):
            picture.area(x, number * row, PANEL * tokens / length - 2, row - 2, Category.ACTIVATIONS)
    full, rest = divmod(sum(lengths), length)
    picture.tiles(456, 0, (PANEL, row), Category.ACTIVATIONS, rows=full)
    picture.tiles(456, full * row, (PANEL * rest / length, row), Category.ACTIVATIONS)
    for end in accumulate(lengths):
        above, tokens = divmod(end, length)
        place = 456 + PANEL * tokens / length
        picture.line(place, above * row, place, above * row + row - 2)
    return picture


def _lengths(recipe: Recipe) -> list[int]:
    """Return the lengths of the paragraphs of one batch, in tokens."""
    from workbench import models
    from workbench.techniques.padding import make_examples
    from workbench.texts.corpus import Conversations, load_corpus

    tokenizer = models.load_tokenizer(models.locate(recipe.model))
    corpus = load_corpus(recipe.corpus)
    documents: Any = islice(Conversations(corpus, tokenizer), CONVERSATIONS)
    if isinstance(corpus.train, str) and not corpus.loss:
        documents = corpus.train[:CHARACTERS]
    rows = make_examples(documents, tokenizer, recipe.sequence_length, 1)
    batch = Random(recipe.seed).sample(rows, min(recipe.effective_batch_size, len(rows)))
    return [example["length"] for example in batch]


def prefix_in_front(config: Any, virtual_tokens: int, length: int) -> Drawing:
    """Lesson 07: draw two bars a layer, keys and values, to scale: a learned part in front of those of the text."""
    layers = config.n_layer
    bar = 272
    front = bar * virtual_tokens / (virtual_tokens + length)
    learned = 2 * virtual_tokens * layers * config.n_embd
    picture = Drawing(
        f"Each of {layers} layers has {virtual_tokens} learned keys in front of the {length} of "
        "the text, and as many values. Below the layers stands the text, "
        f"{length} tokens, without anything in front."
    )
    picture.title(f"learned: {virtual_tokens} × 2 × {config.n_embd:,} numbers in each of {layers} layers, {learned:,}")
    foot = min(layers, LAYERS) * 34 + 24
    for x, name in ((92, "keys"), (388, "values")):
        for y in range(0, foot - 24, 34):
            parts = [(front, Category.OPTIMIZER_STATES, ""), (bar - front, Category.ACTIVATIONS, f"{length} {name}")]
            picture.bar(x, y, 24, parts)
            picture.text(0, y + 17, f"layer {layers - y // 34}")
        picture.line(x + bar / 2, foot - 4, x + bar / 2, foot - 28, "arrow")
        picture.area(x + front, foot, bar - front, 22, label=f"{length} tokens")
    if layers > LAYERS:
        picture.text(0, foot - 8, "… and so on")
    picture.text(0, foot + 16, "the text")
    picture.legend(others={f"{virtual_tokens} learned": Category.OPTIMIZER_STATES, "of the text": Category.ACTIVATIONS})
    return picture


def key_value_cache(config: Any, prompt: int, new: int) -> Drawing:
    """Lesson 18b: draw a column of keys and values for each token.

    Those of the prompt come at once, then one with each new token; the last token's would never be needed.
    """
    layers = config.n_layer
    tokens = prompt + new - 1
    column = format_bytes(4 * 2 * layers * config.n_embd)
    picture = Drawing(
        f"A grid of {tokens} columns, one for each token, and {layers} rows, "
        f"one for each layer. The {prompt} columns of the prompt are filled at once, "
        f"then one with each new token. A column has {column}."
    )
    whole = format_bytes(tokens * 4 * 2 * layers * config.n_embd)
    picture.title(f"{tokens} tokens × {layers} layers × keys and values: {whole}")
    width = WIDTH / tokens
    tile = (width, HEIGHT / layers)
    picture.tiles(0, 0, tile, Category.WEIGHTS, columns=prompt, rows=layers)
    picture.tiles(prompt * width, 0, tile, Category.GRADIENTS, columns=new - 1, rows=layers)
    picture.text(0, HEIGHT + 16, f"the prompt: {prompt} tokens, one forward pass")
    picture.text(WIDTH, HEIGHT + 16, f"{new - 1} new tokens, a forward pass each", anchor="end")
    picture.title(f"one column: {column}, times the batch, times num_beams")
    return picture


def logits_in_chunks(config: Any, tokens: int, chunk: int) -> Drawing:
    """Lesson 13: draw hidden states, the head, and their product, the logits: all at once, and one chunk of them."""
    chunk = min(chunk, tokens)
    vocabulary = config.vocab_size
    hidden = config.hidden_size
    picture = Drawing(
        f"Hidden states, {tokens:,} × {hidden:,}, times the head make {tokens:,} × {vocabulary:,} "
        f"logits, a large rectangle. A chunk of them is {chunk:,} × {vocabulary:,}, "
        f"{chunk / tokens:.0%} of it. Everything is drawn to one scale."
    )
    # the logits begin here; left of them stand the hidden states
    left = 50
    scale = min((WIDTH - left) / vocabulary, HEIGHT / max(tokens, hidden))
    across = scale * vocabulary
    head = scale * hidden
    rows = (
        (tokens, "all at once", "three such tensors are alive"),
        (chunk, "in chunks", "two are alive, then the next"),
    )
    for at_a_time, title, alive in rows:
        size = format_bytes(FP32 * at_a_time * vocabulary)
        picture.title(f"{title}: {at_a_time:,} × {vocabulary:,}, {size}; {alive}")
        picture.area(left, 0, across, head)
        picture.top += head + 6
        picture.area(left - 8 - head, 0, head, scale * tokens, Category.ACTIVATIONS)
        picture.area(left, 0, across, scale * tokens)
        picture.area(left, 0, across, scale * at_a_time, Category.LOGITS_AND_LOSS)
        below = scale * tokens + 16
        picture.text(0, below, f"hidden states: {hidden:,} wide")
        picture.text(left + across, below, f"above: the head; below it: logits, {vocabulary:,} wide", anchor="end")
    return picture


def kept_logits(config: Any, sequences: int, length: int, batches: int) -> Drawing:
    """Lesson 18: draw the bytes of an evaluation, to one scale.

    They are those of the weights, of one evaluated batch, of all batches kept and joined, and of the likeliest tokens.
    """
    weights = FP32 * parameters(config)
    batch = 2 * FP32 * sequences * length * config.vocab_size
    likeliest = 8 * sequences * length * batches
    rows = {
        "the weights": weights,
        f"one batch, {sequences} × {length} tokens: its logits, and their log-softmax": batch,
        f"compute_metrics: the logits of {batches} batches, and once more to join them": batches * batch,
        f"{batches} batches, and of each only the likeliest tokens are kept": batch + likeliest,
    }
    picture = Drawing(
        f"Bars to scale. Weights {format_bytes(weights)}; "
        f"one evaluated batch {format_bytes(batch)}; the logits of {batches} batches, "
        f"kept and joined, {format_bytes(batches * batch)}; "
        "with the likeliest tokens alone hardly more than one batch."
    )
    for label, size in rows.items():
        colour = Category.WEIGHTS if label == "the weights" else Category.LOGITS_AND_LOSS
        picture.row(f"{label}: {format_bytes(size)}", [(size, colour, "")], WIDTH / max(rows.values()))
    return picture
