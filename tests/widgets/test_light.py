"""The messages of a panel: ZeroMQ drops what is more than 1,000, and knows only every 500 how many were read."""

import ipywidgets as w
import pytest

from workbench import Playground, Recipe
from workbench.widgets import light


@pytest.fixture
def messages(monkeypatch):
    found = []
    opened, sent = w.Widget.open, w.Widget.send_state
    monkeypatch.setattr(w.Widget, "open", lambda self: (found.append(self), opened(self)))
    monkeypatch.setattr(w.Widget, "send_state", lambda self, key=None: (found.append(self), sent(self, key)))
    return found


def test_a_panel_is_made_in_fewer_messages_than_zeromq_holds(messages, tmp_path):
    Playground(Recipe(model="random:gpt2-tiny", steps=1), folder=tmp_path)
    assert 0 < len(messages) < 500


def test_all_widgets_share_a_layout_and_those_of_a_class_a_style():
    one, other = light.HTML("one"), light.Checkbox()
    assert one.layout is other.layout
    assert one.style is light.HTML("two").style
    assert one.style is not other.style


def test_a_look_that_was_closed_is_made_again():
    before = light.the_only(w.Layout)
    assert light.the_only(w.Layout) is before
    before.close()
    assert light.HTML().layout.comm is not None
