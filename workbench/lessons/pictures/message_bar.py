"""Lesson 16: the card as one bar, cut into the numbers of an out-of-memory message; above it, what was asked for."""

from workbench.advise.message import ErrorMessage, two_digits
from workbench.base.categories import Category
from workbench.lessons.drawing import PALE, Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
ROW = 104
TENSORS = COLOURS[Category.WEIGHTS]
NOT_OURS = COLOURS[Category.TEMPORARIES]
REQUEST = COLOURS[Category.ACTIVATIONS]
LETTER = 7.6  # units of a letter of size 13, about


def message_bar(*messages: ErrorMessage) -> Drawing:
    """A row for each message, to the scale of its card; what was asked for stands above what is free."""
    rows = "; ".join(_described(message) for message in messages)
    picture = Drawing(WIDTH, ROW * len(messages) + 22, f"Each bar is a whole card. {rows}.")
    for row, message in enumerate(messages):
        _draw_card(picture, row * ROW, message)
    x = 0.0
    for title, colour in (("tensors", TENSORS), ("gaps", PALE), ("not PyTorch's", NOT_OURS), ("asked for", REQUEST)):
        picture.area(x, ROW * len(messages) + 4, 13, 13, colour)
        picture.words(x + 19, ROW * len(messages) + 15, title, size=12)
        x += 130
    return picture


def _draw_card(picture: Drawing, y: float, message: ErrorMessage) -> None:
    capacity = message.whole_bytes
    if not capacity:
        picture.words(0, y + 15, "The message does not say how much the card has.")
        return
    picture.words(0, y + 15, f"{two_digits(message.requested_bytes or 0)} asked for, of {two_digits(capacity)}")
    x = 0.0
    for title, size, colour in _parts(message):
        width = WIDTH * min(size, capacity) / capacity
        label = f"{title} {two_digits(size)}"
        if width < LETTER * len(label):
            label = two_digits(size) if width > LETTER * len(two_digits(size)) else ""
        picture.area(x, y + 52, width, 34, colour, label)
        x += width
    start = min(x, WIDTH) - WIDTH * min(message.free_bytes or 0, capacity) / capacity
    wanted = WIDTH * (message.requested_bytes or 0) / capacity
    begin = max(min(start, WIDTH - wanted), 0)  # what is too wide ends where the card ends
    picture.area(begin, y + 26, min(max(wanted, 3), WIDTH), 20, REQUEST)
    if message.allowed_bytes is not None:
        limit = WIDTH * message.allowed_bytes / capacity
        picture.line(limit, y + 22, limit, y + 90, dashed=True)
        picture.words(limit + 4, y + 100, f"{two_digits(message.allowed_bytes)} allowed", size=12)


def _parts(message: ErrorMessage) -> list[tuple[str, int, str]]:
    """From left to right, with the free part last."""
    return [
        ("tensors", message.allocated_bytes or 0, TENSORS),
        ("gaps", message.unallocated_bytes or 0, PALE),
        ("not PyTorch's", message.elsewhere_bytes or 0, NOT_OURS),
        ("free", message.free_bytes or 0, "none"),
    ]


def _described(message: ErrorMessage) -> str:
    parts = ", ".join(f"{two_digits(size)} {title}" for title, size, _ in _parts(message))
    return f"Of {two_digits(message.whole_bytes or 0)}: {parts}; {two_digits(message.requested_bytes or 0)} asked for"
