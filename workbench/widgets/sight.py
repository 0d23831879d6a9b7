"""The text that would be trained on, before anything is: whether it is there, and what the model sees of it."""

import os
from collections.abc import Callable, Iterator

from workbench.models.source import EMBEDDED, RANDOM, is_gpt2
from workbench.recipe import Recipe
from workbench.texts.corpus import embedded
from workbench.texts.preview import show
from workbench.texts.readers import HUB_ID, KINDS, find_text, split_name
from workbench.widgets.controls import show_if
from workbench.widgets.light import ToggleButton
from workbench.widgets.pages import status
from workbench.widgets.part import Part


class Sight(Part):
    """What the model sees of the text, and what of it counts, once that is asked for; nothing is downloaded for it.

    Args:
        recipe: returns the recipe that would be trained; None while there is none.
    """

    def __init__(self, recipe: Callable[[], Recipe | None]) -> None:
        super().__init__()
        self.recipe = recipe
        self.button = ToggleButton(description="What the model sees", tooltip="the first tokens, and which count")
        self.view.children = (self.button, *self.view.children)
        self.button.observe(self.show, names="value")

    def show(self, *_: object) -> None:
        show_if(self.button.value, self.page)
        recipe = self.recipe()
        if self.button.value and recipe:
            super().show(recipe)
        else:
            self.stop()

    def answers(self, recipe: Recipe) -> Iterator[str]:
        lacking = not_local(recipe.model, recipe.corpus)
        if lacking:
            yield status(f"{lacking} would have to be fetched from the hub. Start does that; looking fetches nothing.")
            return
        preview = show(recipe.corpus, recipe.model, sequence_length=recipe.sequence_length, examples=1)
        yield str(preview._repr_html_())


def not_local(model: str, text: str) -> str:
    """The tokenizer or the text, whichever would have to be fetched first; empty if both are here."""
    name = model.removeprefix(RANDOM)
    if not (name in ("auto", EMBEDDED) or is_gpt2(name) or os.path.isdir(os.path.expanduser(name)) or in_cache(name)):
        return f"The tokenizer of {name}"
    if is_of_hub(text):
        return f"The text {text}"
    return ""


def in_cache(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "tokenizer.json"), str)


def is_of_hub(text: str) -> bool:
    """It is no embedded text and no file here, but may be the name of a data set."""
    location, _ = split_name(text)
    repository = text.partition(":")[0]
    is_here = text in embedded() or os.path.exists(os.path.expanduser(location))
    return not is_here and bool(HUB_ID.fullmatch(repository)) and not repository.lower().endswith((*KINDS, ".gz"))


def look_for_text(text: str) -> None:
    """Raises ConfigurationError: there is no such file, or none of its kind is read. No hub is asked."""
    if text not in embedded() and not is_of_hub(text):
        find_text(text, f"Embedded: {', '.join(embedded())}. Give one of these or the path of a UTF-8 text.")
