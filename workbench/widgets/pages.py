"""Pieces of HTML: escaped, with words beside every picture, in the page's own colours so that both themes read well."""

import base64
import html
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.lessons.plots import COLOURS
from workbench.measure.categories import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNUSED, CONTEXT = "reserved, unused", "CUDA context"
SHADES: dict[str, str] = {
    **{str(name): colour for name, colour in COLOURS.items()},
    UNUSED: "#c8c8c8",
    CONTEXT: "#5c5c5c",
}
TRACK = "height: 1.1em; display: flex; border: 1px solid #808080; border-radius: 3px; overflow: hidden; flex: 1"
END = "position: absolute; top: -3px; bottom: -3px; border-left: 3px solid #D55E00"


def live_page() -> bool:
    """Whether somebody looks on: pages of JupyterLab, Notebook, VS Code and Colab let a cell ask for input, papermill
    and nbconvert do not (`allow_stdin` in Jupyter's messaging protocol)."""
    from IPython.core.getipython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    request = kernel.get_parent() if kernel else None
    return bool((request or {}).get("content", {}).get("allow_stdin"))


def escaped(text: object) -> str:
    return html.escape(str(text))


def small(text: object) -> str:
    return f"<small>{escaped(text)}</small>"


def alarm(words: object) -> str:
    return f'<p role="alert">⚠ {escaped(words)}</p>'


def picture(figure: "Figure", words: str) -> str:
    """An image with its text equivalent; no file and no network."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=100)
    source = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="{escaped(words)}" src="data:image/png;base64,{source}" style="max-width: 100%">'


def bar(parts: Mapping[str, int], whole_bytes: int, words: str) -> str:
    """Bytes by name as a bar whose full width is `whole_bytes`; if their sum is more, a line marks where that ends."""
    total = sum(parts.values())
    width = max(whole_bytes, total, 1)
    spans = "".join(
        f'<span title="{escaped(_words(name, size))}" style="width: {100 * size / width:.2f}%; '
        f'background: {SHADES[name]}"></span>'
        for name, size in parts.items()
        if size > 0
    )
    beyond = 0 < whole_bytes < total
    end = f'<span title="the memory ends here" style="{END}; left: {100 * whole_bytes / width:.2f}%"></span>'
    return (
        f'<div role="img" aria-label="{escaped(words)}" style="display: flex; position: relative">'
        f'<span style="{TRACK}">{spans}</span>{end if beyond else ""}</div>'
    )


def legend(parts: Mapping[str, int]) -> str:
    """The parts in words, with the colour of their part of the bar."""
    items = (
        f'<span style="white-space: nowrap; margin-right: 1em"><span style="color: {SHADES[name]}">■</span> '
        f"{escaped(_words(name, size))}</span>"
        for name, size in parts.items()
        if size > 0
    )
    return f"<small>{' '.join(items)}</small>"


def _words(name: str, size: int) -> str:
    return f"{name.replace('_', ' ')} {format_bytes(size)}"
