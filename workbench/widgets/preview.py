"""The text before training: whether there is such a text, and what the model sees of it."""

import os
from collections.abc import Callable, Iterator

from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.texts.corpus import list_embedded
from workbench.texts.readers import HUB_ID, KINDS, find_text, split_name
from workbench.training.preview import show
from workbench.widgets.light import Button
from workbench.widgets.pages import status
from workbench.widgets.part import Part


class Preview(Part):
    """A button, and the text as the model sees it, with the tokens that count in the loss, after each press.

    Args:
        recipe: returns the recipe that would be trained; None while there is none. May raise ConfigurationError.

    Attributes:
        shown_for: the recipe of the newest press; None: there was none.
    """

    def __init__(self, recipe: Callable[[], Recipe | None]) -> None:
        super().__init__()
        self.recipe = recipe
        self.shown_for: Recipe | None = None
        self.button = Button(description="What the model sees")
        self.view.children = (self.button, *self.view.children)
        self.button.on_click(self._press)

    def _press(self, _: object) -> None:
        try:
            self.shown_for = self.recipe()
            self.show(self.shown_for)
        except ConfigurationError as error:
            self.refuse(error)

    def answers(self, recipe: Recipe) -> Iterator[str]:
        yield status("Reading the text and the tokenizer, from the hub if they are not here …")
        preview = show(recipe.corpus, recipe.model, sequence_length=recipe.sequence_length, examples=1)
        yield str(preview._repr_html_())


def look_for_text(text: str) -> None:
    """Refuse a text that is no file, or one of a kind that is not read (ConfigurationError). No hub is asked."""
    if text in list_embedded():
        return
    location, _ = split_name(text)
    repository = text.partition(":")[0]
    is_name_on_hub = HUB_ID.fullmatch(repository) and not repository.lower().endswith((*KINDS, ".gz"))
    if os.path.exists(os.path.expanduser(location)) or not is_name_on_hub:
        find_text(text, f"Embedded: {', '.join(list_embedded())}. Give one of these or the path of a UTF-8 text.")
