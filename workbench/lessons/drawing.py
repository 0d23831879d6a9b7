"""`Drawing`: a small picture in SVG for notebooks and pages, light or dark, wide or narrow.

Lines and letters have the colour of the text around them. An area has the colour of a memory category, or is pale. A
screen reader hears `description`.
"""

import html
from collections.abc import Iterable, Mapping, Sequence

from workbench.lessons.plots import COLOURS, INKS

WIDTH = 660
PALE = "#80808040"
EMPTY = "none"
LETTER = 8  # units: the width of a letter, about
HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)
# a part of a bar: its size, colour and label
Part = tuple[float, str, str]


class Drawing:
    """Shapes on a canvas that is WIDTH units wide and as high as they need; a unit is a pixel, on a narrow page less.

    Titles and rows begin a new part of the picture below the older shapes, and `y` counts from its top.

    Args:
        description: one or two sentences that say what can be seen.
    """

    def __init__(self, description: str) -> None:
        self.description = description
        self.shapes: list[str] = []
        # units: `y` counts from the top, and no shape reaches below the bottom
        self.top = 0.0
        self.bottom = 0.0

    def title(self, text: str) -> None:
        """Write a bold line above the part of the picture that follows."""
        self.top = self.bottom + 8
        self.text(0, 12, text, bold=True)
        self.top += 22

    def row(self, label: str, parts: Iterable[Part], scale: float) -> None:
        """Draw a bar below its label."""
        self.top = self.bottom + 8
        self.text(0, 12, label)
        self.bar(0, 18, 18, parts, scale)

    def bar(
        self,
        x: float,
        y: float,
        height: float,
        parts: Iterable[Part],
        scale: float = 1.0,
    ) -> None:
        """Draw areas side by side; the width of each is its size times `scale`."""
        for size, colour, label in parts:
            width = size * scale
            self.area(x, y, width, height, colour, label)
            x += width

    def area(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str = PALE,
        label: str = "",
    ) -> None:
        """Draw a filled rectangle, and in its middle a label if it has room. Without width or height, draw nothing."""
        if width <= 0 or height <= 0:
            return
        place = f'x="{x:g}" y="{self.top + y:g}" width="{width:g}" height="{height:g}"'
        fill = COLOURS.get(colour, colour)
        self.shapes.append(f'<rect {place} fill="{fill}" stroke="currentColor" stroke-width="0.6"/>')
        self.bottom = max(self.bottom, self.top + y + height)
        if LETTER * len(label) < width:
            ink = INKS.get(colour, "currentColor")
            self.text(x + width / 2, y + height / 2 + 5, label, anchor="middle", colour=ink)

    def tiles(
        self,
        x: float,
        y: float,
        tile: tuple[float, float],
        colour: str,
        columns: int = 1,
        rows: int = 1,
    ) -> None:
        """Draw rows of equal tiles; `tile` is the width and height of one, with the gap of 2 units to the next."""
        width, height = tile
        for row in range(rows):
            for column in range(columns):
                self.area(x + column * width, y + row * height, width - 2, height - 2, colour)

    def hill(
        self,
        x: float,
        floor: float,
        width: float,
        stacks: Sequence[Mapping[str, float]],
        scale: float,
    ) -> None:
        """Draw one column for each instant, whose categories are stacked from the floor upwards."""
        column = width / len(stacks)
        for instant, stack in enumerate(stacks):
            y = floor
            for category, size in stack.items():
                y -= size * scale
                self.area(x + instant * column, y, column, size * scale, category)

    def line(self, x: float, y: float, to_x: float, to_y: float, style: str = "") -> None:
        """Draw a straight line; its style is empty, `dashed` or `arrow`."""
        place = f'x1="{x:g}" y1="{self.top + y:g}" x2="{to_x:g}" y2="{self.top + to_y:g}"'
        attribute = {"dashed": "stroke-dasharray='5 4'", "arrow": "marker-end='url(#head)'"}.get(style, "")
        self.shapes.append(f'<line {place} stroke="currentColor" {attribute}/>')
        self.bottom = max(self.bottom, self.top + y, self.top + to_y)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        bold: bool = False,
        colour: str = "currentColor",
    ) -> None:
        """Write a line of text; `y` is its baseline, `anchor` is start, middle or end."""
        weight = 600 if bold else 400
        place = f'x="{x:g}" y="{self.top + y:g}" text-anchor="{anchor}" font-weight="{weight}"'
        self.shapes.append(f'<text {place} fill="{colour}">{html.escape(text)}</text>')
        self.bottom = max(self.bottom, self.top + y + 6)

    def legend(self, *categories: str, others: Mapping[str, str] | None = None) -> None:
        """Explain the colours below all shapes; `others` are colours by names that are no categories."""
        colours = dict(zip(categories, categories, strict=True)) | dict(others or {})
        x = float(WIDTH)
        for name, colour in colours.items():
            width = 30 + LETTER * len(name)
            if x + width > WIDTH:
                x = 0.0
                self.top = self.bottom + 8
            self.area(x, 0, 12, 12, colour)
            self.text(x + 18, 11, name.replace("_", " "))
            x += width

    def _repr_html_(self) -> str:
        description = html.escape(self.description)
        return (
            f'<svg role="img" aria-label="{description}" viewBox="0 0 {WIDTH} {self.bottom + 2:g}" '
            f'style="width: 100%; max-width: {WIDTH}px; height: auto; font: 13px system-ui, sans-serif">'
            f"<title>{description}</title>{HEAD}{''.join(self.shapes)}</svg>"
        )

    def __repr__(self) -> str:
        return self.description
