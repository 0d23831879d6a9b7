"""The text that would be trained on, before anything is: whether it is there, and what the model sees of it."""

import os
from collections.abc import Callable, Iterator

from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.texts.corpus import embedded
from workbench.texts.readers import HUB_ID, KINDS, find_text, split_name
from workbench.training.preview import show
from workbench.widgets.light import Button
from workbench.widgets.pages import status
from workbench.widgets.part import Part


class Preview(Part):
    """What the model sees of the text, and what of it counts, each time that is asked for.

    Args:
        recipe: returns the recipe that would be trained; None while there is none. May raise ConfigurationError.
    """

    def __init__(self, recipe: Callable[[], Recipe | None]) -> None:
        super().__init__()
        self.recipe = recipe
        self.shown_for: Recipe | None = None
        self.button = Button(description="What the model sees")
        self.view.children = (self.button, *self.view.children)
        self.button.on_click(self.look)

    def look(self, _: object) -> None:
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
    """Raises ConfigurationError: there is no such file, or none of its kind is read. No hub is asked."""
    if text in embedded():
        return
    location, _ = split_name(text)
    repository = text.partition(":")[0]
    is_name_on_hub = HUB_ID.fullmatch(repository) and not repository.lower().endswith((*KINDS, ".gz"))
    if os.path.exists(os.path.expanduser(location)) or not is_name_on_hub:
        find_text(text, f"Embedded: {', '.join(embedded())}. Give one of these or the path of a UTF-8 text.")
