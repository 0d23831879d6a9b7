"""The techniques as switches: by what becomes of the loss, and in each group the largest saving first."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ipywidgets as w

from workbench.advise.candidate import Candidate
from workbench.base.categories import format_bytes
from workbench.techniques import Numerics
from workbench.widgets.controls import TechniqueToggle, show_if
from workbench.widgets.light import HTML, ToggleButton, VBox
from workbench.widgets.pages import page
from workbench.widgets.savings import Offer


class Fold:
    """A group that is closed until somebody opens it; on its button stands what is in it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.summary = ""
        self.toggles: Sequence[TechniqueToggle] = ()
        self.button = ToggleButton(css="wb-fold")
        self.rows = VBox()
        self.view = VBox([self.button, self.rows], css="wb-group")
        self.button.observe(self._opened, names="value")

    def fill(self, toggles: Sequence[TechniqueToggle], names: Sequence[str]) -> None:
        """Where one of them is on, it is open."""
        self.summary = " · ".join(names)
        self.toggles = toggles
        show_if(bool(toggles), self.view)
        if any(toggle.box.value for toggle in toggles):
            self.button.value = True
        self._opened()

    def _opened(self, *_: object) -> None:
        is_open = self.button.value
        self.button.description = f"{'▾' if is_open else '▸'} {self.title}: {self.summary}"
        self.rows.children = views(self.toggles) if is_open else ()


class Switches:
    """All switches. Their order changes only by `arrange`: a row that moves is missed by a click, and loses the focus.

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

    def ask(self) -> None:
        """The facts are those of another recipe from now on, and dimmed."""
        for toggle in self.toggles.values():
            toggle.facts.add_class("wb-old")

    def tell(self, name: str, offer: Offer) -> None:
        """What one technique does, on its row."""
        toggle = self.toggles[name]
        settings = ""
        if isinstance(offer, Candidate):
            settings = replace(offer.recipe, techniques=offer.changes).title.removeprefix(toggle.cls.title)
        toggle.facts.value = page("facts", offer=offer, settings=settings, cls=toggle.cls)
        toggle.facts.remove_class("wb-old")

    def arrange(self, offers: Mapping[str, Offer]) -> None:
        """Put every switch into its group, by what is known of it."""
        groups: dict[str, list[TechniqueToggle]] = defaultdict(list)
        titles: dict[str, list[str]] = defaultdict(list)
        for toggle in sorted(self.toggles.values(), key=lambda toggle: -saved_bytes(offers.get(toggle.cls.name))):
            offer = offers.get(toggle.cls.name)
            saved = saved_bytes(offer)
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


def saved_bytes(offer: Offer | None) -> int:
    return offer.saved_bytes if isinstance(offer, Candidate) else 0
