"""Pictures of the tensors that the blocks of a GPT-2 keep for the backward pass."""

from typing import Any

from workbench.base.categories import Category
from workbench.lessons.drawing import EMPTY, PALE, WIDTH, Drawing

# tensors of shape (B, T, C) that each part of a block keeps, since its gradient needs them
PARTS = {"norm": 2, "attention": 4, "norm ": 2, "MLP: 5 results, each four times as wide": 20}
KEPT = sum(PARTS.values())
WAYS = ("without", "selective", "checkpointed")
# the results of a block in their order: name, size in tensors of (B, T, C), and the ways in which it is kept
RESULTS = (
    ("the block's input", 1, "without selective checkpointed"),
    ("LayerNorm", 1, "without"),
    ("c_attn: queries, keys, values", 3, "without selective"),
    ("attention", 1, "without selective"),
    ("c_proj", 1, "selective"),
    ("sum with the input", 1, "without"),
    ("LayerNorm", 1, "without"),
    ("c_fc", 4, "without selective"),
    ("GELU, four results", 16, "without"),
    ("c_proj", 1, "selective"),
)
SQUARE = 150  # units: the side of the larger matrix of probabilities
BESIDES = 260  # units: the left end of the column "kept besides"


def checkpointed_blocks(config: Any) -> Drawing:
    """Lesson 03: draw one block as 28 tiles, and below it all blocks of a model, without checkpointing and with."""
    layers = config.num_hidden_layers
    most = layers + KEPT - 1
    picture = Drawing(
        f"One block keeps {KEPT} tensors, 20 of them in its MLP. "
        f"Without checkpointing {layers} blocks keep {KEPT * layers}; with it {layers}, "
        f"one each, and {KEPT - 1} more of the block that is being recomputed."
    )
    picture.title(f"one block keeps {KEPT} tensors of B × T × C")
    tile = WIDTH / KEPT
    picture.tiles(0, 0, (tile, 26), Category.ACTIVATIONS, columns=KEPT)
    picture.bar(0, 28, 20, [(tensors * tile - 2, EMPTY, part) for part, tensors in PARTS.items()])
    rows = {
        f"{layers} blocks, at the end of the forward pass: {KEPT} × {layers} = {KEPT * layers}": [KEPT] * layers,
        f"checkpointed, while the last is recomputed: {layers} + {KEPT - 1} = {most}": [1] * (layers - 1) + [KEPT],
    }
    width = WIDTH / layers
    for title, blocks in rows.items():
        picture.title(title)
        picture.tiles(0, 0, (width, 28), PALE, columns=layers)
        for block, tensors in enumerate(blocks):
            picture.area(block * width, 0, (width - 2) * tensors / KEPT, 26, Category.ACTIVATIONS)
    return picture


def kept_in_block() -> Drawing:
    """Lesson 03b: draw a row for each result, and a column for each way: coloured tiles are kept, grey ones are not."""
    sums = dict.fromkeys(WAYS, 0)
    for _, tensors, ways in RESULTS:
        for way in ways.split():
            sums[way] += tensors
    listed = ", ".join(f"{way} {tensors}" for way, tensors in sums.items())
    picture = Drawing(
        f"The results of one block, in tensors of B × T × C. Kept are: {listed}. Selectively all of the GELU's 16 go."
    )
    for column, (way, tensors) in enumerate(sums.items()):
        picture.text(212 + column * 149, 16, f"{way}: {tensors}", bold=True)
    for row, (name, tensors, ways) in enumerate(RESULTS):
        y = 26 + row * 22
        picture.text(0, y + 12, name)
        for column, way in enumerate(WAYS):
            colour = Category.ACTIVATIONS if way in ways else PALE
            picture.tiles(212 + column * 149, y, (9, 17), colour, columns=tensors)
    return picture


def written_out_and_fused(config: Any, length: int) -> Drawing:
    """Lesson 12: draw the tensors that GELU and attention keep, and those besides if they are written out in Python.

    Above stands GELU of one block; below it attention of one head, for `length` tokens and for more, to one scale.
    """
    longer = length * max(2, 1024 // length)
    head = config.n_embd // config.n_head
    picture = Drawing(
        "Left, what is kept either way: of GELU one tensor, "
        f"of attention four strips of T × {head} a head, which grow with T. Right, "
        "what is kept besides if they are written out: three more tensors, "
        f"and a square of T × T probabilities a head, small for {length} tokens, "
        f"large for {longer}."
    )
    picture.title("kept either way")
    picture.text(BESIDES, -10, "kept besides, if written out in Python", bold=True)
    tensors = [(76, Category.ACTIVATIONS, name) for name in ("x", "x / 2", "tanh", "1 + tanh")]
    picture.bar(0, 0, 30, tensors[:1])
    picture.bar(BESIDES, 0, 30, tensors[1:])
    picture.text(0, 48, "GELU: B × T × 4 C")
    picture.text(BESIDES, 48, "three tensors of B × T × 4 C")
    scale = SQUARE / longer
    strip = head * scale + 2
    left = 0.0
    right = float(BESIDES)
    for tokens in (length, longer):
        side = tokens * scale
        # queries, keys, values, output
        picture.tiles(left, 94, (strip, side + 2), Category.ACTIVATIONS, columns=4)
        picture.area(right, 94, side, side, Category.ACTIVATIONS)
        for x in (left, right):
            picture.text(x, 86, f"T = {tokens:,}")
        left += max(4 * strip, 60) + 24
        right += max(side, 60) + 24
    picture.text(0, 114 + SQUARE, f"attention, a head: four of T × {head}")
    picture.text(BESIDES, 114 + SQUARE, "the probabilities, T × T")
    return picture


def pack_and_unpack() -> Drawing:
    """Lesson 10b: draw how a saved activation goes to a file and comes back, while a weight stays."""
    picture = Drawing(
        "The forward pass saves an activation and a weight. "
        "The hook named pack writes the activation to a file and gives autograd its path, "
        "and gives the weight back as it is. The hook named unpack reads the file again for the "
        "backward pass."
    )
    columns = (
        (0, "forward pass", Category.ACTIVATIONS, "activation"),
        (268, "autograd keeps", EMPTY, "a path"),
        (520, "backward pass", Category.ACTIVATIONS, "activation"),
    )
    for x, name, colour, label in columns:
        picture.text(x, 16, name, bold=True)
        picture.area(x, 30, 120, 34, colour, label)
        picture.area(x, 130, 120, 34, Category.WEIGHTS, "weight")
    for y in (47, 147):
        for x, hook in ((138, "pack"), (392, "unpack")):
            picture.line(x, y, x + 124, y, "arrow")
            picture.text(x + 62, y - 8, hook, anchor="middle")
    picture.area(268, 86, 120, 26, Category.ACTIVATIONS, "file")
    picture.line(176, 50, 264, 96, "arrow")
    picture.line(392, 98, 470, 52, "arrow")
    return picture
