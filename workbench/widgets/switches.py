"""The techniques as switches, grouped by what becomes of the loss, the largest saving first in each group."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import ipywidgets as w

from workbench.advise.candidate import Candidate
from workbench.base.categories import format_bytes
from workbench.techniques import Numerics
from workbench.techniques.registry import in_words
from workbench.widgets.controls import TechniqueToggle, show_if
from workbench.widgets.light import HTML, ToggleButton, VBox
from workbench.widgets.pages import page
from workbench.widgets.savings import Offer


class Fold:
    """A group of switches that is closed until somebody opens it; its button says what is in it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.summary = ""
        self.toggles: Sequence[TechniqueToggle] = ()
        self.button = ToggleButton(css="wb-fold")
        self.rows = VBox()
        self.view = VBox([self.button, self.rows], css="wb-group")
        self.button.observe(self._show_rows, names="value")

    def fill(self, toggles: Sequence[TechniqueToggle], names: Sequence[str]) -> None:
        """Put these switches into the group, and open it if one of them is on."""
        self.summary = " · ".join(names)
        self.toggles = toggles
        show_if(bool(toggles), self.view)
        if any(toggle.box.value for toggle in toggles):
            self.button.value = True
        self._show_rows()

    def _show_rows(self, *_: object) -> None:
        is_open = self.button.value
        self.button.description = f"{'▾' if is_open else '▸'} {self.title}: {self.summary}"
        self.rows.children = views(self.toggles) if is_open else ()


class Switches:
    """All switches. Only `arrange` changes their order: a row that moves is missed by a click, and loses the focus.

    Args:
        toggles: the techniques, by name.
    """

    def __init__(self, toggles: Mapping[str, TechniqueToggle]) -> None:
        self.toggles = toggles
        self.same = VBox(css="wb-group")
        self.nearly = VBox(css="wb-group")
        self.another = Fold("Another training")
        self.useless = Fold("Not possible here, or saving nothing")
        groups = [self.same, self.nearly, self.another.view, self.useless.view]
        self.view = VBox([HTML(page("heading")), *groups], css="wb-switches wb-part")
        self.same_title = HTML("<p><b>Same loss</b> <small>exactly, up to rounding</small></p>")
        self.nearly_title = HTML("<p><b>Nearly the same loss</b> <small>fewer digits</small></p>")
        self.arrange({})

    def dim(self) -> None:
        """Dim the facts, which are those of an older recipe."""
        for toggle in self.toggles.values():
            toggle.facts.add_class("wb-old")

    def show_offer(self, name: str, offer: Offer) -> None:
        """Write what one technique does on its row."""
        toggle = self.toggles[name]
        settings = ""
        if isinstance(offer, Candidate):
            settings = in_words(offer.label).removeprefix(in_words(toggle.cls.name))
        toggle.facts.value = page("facts", offer=offer, settings=settings, cls=toggle.cls)
        toggle.facts.remove_class("wb-old")

    def arrange(self, offers: Mapping[str, Offer]) -> None:
        """Put every switch into its group, by its offer: a technique that is off and saves nothing is useless."""
        groups: dict[str, list[TechniqueToggle]] = defaultdict(list)
        titles: dict[str, list[str]] = defaultdict(list)
        for toggle in sorted(self.toggles.values(), key=lambda toggle: -saving_of(offers.get(toggle.cls.name))):
            offer = offers.get(toggle.cls.name)
            saved = saving_of(offer)
            group: str = toggle.cls.numerics
            if offer is not None and saved <= 0 and not toggle.box.value:
                group = "useless"
            groups[group].append(toggle)
            titles[group].append(f"{toggle.cls.title} −{format_bytes(saved)}" if saved > 0 else toggle.cls.title)
        self.same.children = [self.same_title, *views(groups[Numerics.EXACT])]
        self.nearly.children = [self.nearly_title, *views(groups[Numerics.APPROXIMATE])]
        show_if(bool(groups[Numerics.APPROXIMATE]), self.nearly)
        self.another.fill(groups[Numerics.DIFFERENT], titles[Numerics.DIFFERENT])
        self.useless.fill(groups["useless"], titles["useless"])


def views(toggles: Sequence[TechniqueToggle]) -> list[w.Widget]:
    return [toggle.view for toggle in toggles]


def saving_of(offer: Offer | None) -> int:
    return offer.saved_bytes if isinstance(offer, Candidate) else 0
