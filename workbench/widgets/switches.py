"""The techniques as switches: by what becomes of the loss, and in each group the largest saving first."""

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
        self.button = ToggleButton(_dom_classes=("wb-fold",))
        self.rows = VBox()
        self.view = VBox([self.button, self.rows], _dom_classes=("wb-group",))
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
        self.rows.children = [toggle.view for toggle in self.toggles] if is_open else ()


class Switches:
    """All switches. Their order changes only by `arrange`: a row that moves is missed by a click, and loses the focus.

    Args:
        toggles: the techniques, by name.
    """

    def __init__(self, toggles: Mapping[str, TechniqueToggle]) -> None:
        self.toggles = toggles
        self.same = VBox(_dom_classes=("wb-group",))
        self.nearly = VBox(_dom_classes=("wb-group",))
        self.another = Fold("Another training")
        self.useless = Fold("Not possible here, or saving nothing")
        groups = [self.same, self.nearly, self.another.view, self.useless.view]
        self.view = VBox([HTML(page("heading")), *groups], _dom_classes=("wb-switches", "wb-part"))
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
        candidate = None
        settings = ""
        if isinstance(offer, Candidate):
            candidate = offer
            settings = replace(offer.recipe, techniques=offer.changes).title.removeprefix(toggle.cls.title)
        toggle.facts.value = page("facts", candidate=candidate, reason=offer, settings=settings, cls=toggle.cls)
        toggle.facts.remove_class("wb-old")

    def arrange(self, offers: Mapping[str, Offer]) -> None:
        """Put every switch into its group, by what is known of it."""
        groups: dict[Numerics | None, list[TechniqueToggle]] = {None: [], **{numerics: [] for numerics in Numerics}}
        by_saving = sorted(self.toggles.values(), key=lambda toggle: -saved_bytes(offers.get(toggle.cls.name)))
        for toggle in by_saving:
            offer = offers.get(toggle.cls.name)
            is_useless = offer is not None and saved_bytes(offer) <= 0 and not toggle.box.value
            groups[None if is_useless else toggle.cls.numerics].append(toggle)
        self.same.children = [self.same_title, *views(groups[Numerics.EXACT])]
        self.nearly.children = [self.nearly_title, *views(groups[Numerics.APPROXIMATE])]
        show_if(bool(groups[Numerics.APPROXIMATE]), self.nearly)
        different = groups[Numerics.DIFFERENT]
        self.another.fill(different, [in_short(toggle, offers) for toggle in different])
        self.useless.fill(groups[None], [toggle.cls.title for toggle in groups[None]])


def views(toggles: Sequence[TechniqueToggle]) -> list[w.Widget]:
    return [toggle.view for toggle in toggles]


def saved_bytes(offer: Offer | None) -> int:
    return offer.saved_bytes if isinstance(offer, Candidate) else 0


def in_short(toggle: TechniqueToggle, offers: Mapping[str, Offer]) -> str:
    """Its title, and what it saves if it does."""
    saved = saved_bytes(offers.get(toggle.cls.name))
    return f"{toggle.cls.title} −{format_bytes(saved)}" if saved > 0 else toggle.cls.title
