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


def test_widgets_look_alike_unless_they_are_given_a_look():
    one, other = light.HTML("one"), light.Checkbox()
    assert one.layout is other.layout
    assert one.style is light.HTML("two").style
    assert one.style is not other.style
    assert light.VBox(layout=w.Layout(display="none")).layout is not one.layout
    assert one.layout.display is None


def test_a_look_that_was_closed_is_made_again():
    before = light.shared_look(w.Layout, width="20em")
    assert light.shared_look(w.Layout, width="20em") is before
    before.close()
    assert light.shared_look(w.Layout, width="20em").comm is not None
