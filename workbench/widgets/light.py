"""Widgets that share one layout and, by their class, one style; `panel.css` says what makes one look different.

Every widget is a message to the page, and its layout and its style would be two more. Of the messages that wait for a
busy page ZeroMQ holds 1,000 and drops what comes after (its socket option `ZMQ_SNDHWM`); the page then says "widget
model not found", or waits for ever for the end of the cell. A panel is hundreds of widgets.
"""

from functools import partial
from typing import Any

import ipywidgets as w

_shared: dict[type[w.Widget], w.Widget] = {}


def the_only(cls: type[w.Widget]) -> w.Widget:
    """Return the one widget of a class of layouts or styles, which all others share."""
    if cls not in _shared or _shared[cls].comm is None:  # Widget.close_all() closes it
        _shared[cls] = cls()
    return _shared[cls]


def light(cls: type[w.Widget], *args: Any, css: str = "", **state: Any) -> Any:
    """Return a widget of this class; `css` are its classes in `panel.css`, `state` its traits."""
    state["_dom_classes"] = tuple(css.split())
    state["layout"] = the_only(w.Layout)
    if hasattr(cls, "style"):
        state["style"] = the_only(cls.style.klass)
    return cls(*args, **state)


HTML = partial(light, w.HTML)
VBox = partial(light, w.VBox)
HBox = partial(light, w.HBox)
Box = partial(light, w.Box)
# without continuous updates typing counts when Enter is pressed or the field is left
Text = partial(light, w.Text, continuous_update=False)
Dropdown = partial(light, w.Dropdown)
Combobox = partial(light, w.Combobox, continuous_update=False)
Checkbox = partial(light, w.Checkbox, indent=False)
Button = partial(light, w.Button)
ToggleButton = partial(light, w.ToggleButton)
