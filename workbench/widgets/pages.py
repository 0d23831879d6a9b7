"""Pieces of HTML: escaped, with words beside every picture, in the page's own colours so that both themes read well."""

import base64
import html
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.lessons.plots import COLOURS
from workbench.measure.categories import Category, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACK = "height: 1.1em; display: flex; border: 1px solid #808080; border-radius: 3px; overflow: hidden"


def escaped(text: object) -> str:
    return html.escape(str(text))


def picture(figure: "Figure", words: str) -> str:
    """An image with its text equivalent; no file and no network."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=100)
    source = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="{escaped(words)}" src="data:image/png;base64,{source}" style="max-width: 100%">'


def bar(by_category: Mapping[str, int], whole_bytes: int, words: str) -> str:
    """Bytes by category as a bar whose full width is `whole_bytes`, or the sum if that is more."""
    whole = max(whole_bytes, sum(by_category.values()), 1)
    parts = "".join(
        f'<span title="{escaped(_words(name, size))}" style="width: {100 * size / whole:.2f}%; '
        f'background: {COLOURS[Category(name)]}"></span>'
        for name, size in by_category.items()
        if size > 0
    )
    return f'<div role="img" aria-label="{escaped(words)}" style="{TRACK}">{parts}</div>'


def legend(by_category: Mapping[str, int]) -> str:
    """The categories in words, with the colour of their part of the bar."""
    items = (
        f'<span style="white-space: nowrap; margin-right: 1em"><span style="color: {COLOURS[Category(name)]}">■</span> '
        f"{escaped(_words(name, size))}</span>"
        for name, size in by_category.items()
        if size > 0
    )
    return f"<small>{' '.join(items)}</small>"


def _words(name: str, size: int) -> str:
    return f"{name.replace('_', ' ')} {format_bytes(size)}"
