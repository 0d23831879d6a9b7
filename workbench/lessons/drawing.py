"""`Drawing`: a small picture in SVG that stands in a notebook or on a page, light or dark, wide or narrow.

Lines and letters have the colour of the text around them; areas have the colours of memory categories (`COLOURS` of
`workbench.lessons.plots`) or are a pale grey. A screen reader hears `description`.
"""

import html
from dataclasses import dataclass, field

PALE = "#80808040"
FONT = "system-ui, sans-serif"


@dataclass
class Drawing:
    """Shapes on a canvas of `width` × `height` units; one unit is a pixel where there is room for it.

    Attributes:
        description: one or two sentences that tell what can be seen.
    """

    width: int
    height: int
    description: str
    shapes: list[str] = field(default_factory=list)

    def area(self, x: float, y: float, width: float, height: float, colour: str = PALE, label: str = "") -> None:
        """A filled rectangle, with words in its middle."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect {place} fill="{colour}" stroke="currentColor" stroke-width="0.6"/>')
        if label:
            self.words(x + width / 2, y + height / 2 + 5, label, anchor="middle")

    def line(self, x: float, y: float, to_x: float, to_y: float, *, dashed: bool = False, arrow: bool = False) -> None:
        """A straight line."""
        place = f'x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        head = ' marker-end="url(#head)"' if arrow else ""
        self.shapes.append(f'<line {place} stroke="currentColor"{dashes}{head}/>')

    def words(
        self, x: float, y: float, text: str, *, anchor: str = "start", size: int = 14, bold: bool = False
    ) -> None:
        """A line of text; `y` is where its letters stand, `anchor` is start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}'
        self.shapes.append(f'<text {place} fill="currentColor">{html.escape(text)}</text>')

    def _repr_html_(self) -> str:
        description = html.escape(self.description)
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
        )
        return (
            f'<svg role="img" aria-label="{description}" viewBox="0 0 {self.width} {self.height}" '
            f'style="width: 100%; max-width: {self.width}px; height: auto; font-family: {FONT}">'
            f"<title>{description}</title>{head}{''.join(self.shapes)}</svg>"
        )

    def __repr__(self) -> str:
        return self.description
