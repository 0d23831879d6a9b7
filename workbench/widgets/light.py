"""ipywidgets that share one layout and one style with all others which are given none.

Every widget is a message to the page, and so are its layout and its style. Of the messages that wait for a busy page
ZeroMQ holds 1,000 and drops what comes after (its socket option `ZMQ_SNDHWM`), and the page then says "widget model not
found", or waits for ever for the end of the cell. A panel is hundreds of widgets.
"""

from typing import Any

import ipywidgets as w

LABEL = {"description_width": "initial"}  # as wide as its words
_SHARED: dict[tuple[Any, ...], w.Widget] = {}


def shared_look(cls: type[w.Widget], **state: str) -> w.Widget:
    """One layout, or one style, for all that look like this; whoever changes it later changes it for all."""
    key = (cls, *state.items())
    if key not in _SHARED or _SHARED[key].comm is None:  # closed, as by Widget.close_all()
        _SHARED[key] = cls(**state)
    return _SHARED[key]


class Light(w.DOMWidget):  # type: ignore[misc]
    """A widget's layout and style, where it is not given its own."""

    def __init__(self, *args: Any, **state: Any) -> None:
        looks = {"layout": shared_look(w.Layout)}
        if hasattr(type(self), "style"):
            looks["style"] = shared_look(type(self).style.klass)
        super().__init__(*args, **{**looks, **state})


class HTML(Light, w.HTML):  # type: ignore[misc]
    pass


class VBox(Light, w.VBox):  # type: ignore[misc]
    pass


class HBox(Light, w.HBox):  # type: ignore[misc]
    pass


class Checkbox(Light, w.Checkbox):  # type: ignore[misc]
    pass
