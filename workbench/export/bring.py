"""Recipes, and other programs' settings, with what was understood of them and what not; and data sets in memory.

What other programs' settings mean here is written in `foreign.toml`, and nowhere else.
"""

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from workbench.base.paths import aside, folder_of_runs, put_in_place
from workbench.export.meaning import Brought, Settings
from workbench.export.pasted import read_sections
from workbench.export.whose import belonging
from workbench.recipe import Recipe
from workbench.texts import readers
from workbench.texts.corpus import load_corpus

if TYPE_CHECKING:
    from datasets import Dataset

OURS = {field.name for field in fields(Recipe)} | {"technique"}
COMMON = {"learning_rate", "seed"}  # to all programs


def read_settings(text: str, base: Recipe | None = None) -> Brought:
    """Read a recipe (TOML, JSON), a record, or other programs' settings: a file, a command, calls of a script.

    Args:
        base: gives what others' settings do not say: the text, and with some of them the model.

    Raises:
        ConfigurationError: it cannot be read, is of no program that is known, or has a value that is refused.
        UnavailableError: the package whose settings they are is not installed.
    """
    sections = read_sections(text)
    if len(sections) == 1 and not sections[0].owner and sections[0].before_options is None:
        data = sections[0].settings
        names = data.keys() - COMMON
        # others have a few of our names, too, and a table of the name model
        is_ours = 2 * len(names & OURS) >= len(names) > 0 and isinstance(data.get("model", ""), str)
        if isinstance(data.get("recipe"), dict) or is_ours:
            return ours(Recipe.from_dict(data.get("recipe", data)))
    settings = Settings()
    for program, section in belonging(sections):
        settings.add(program, section)
    return settings.translated(replace(base or Recipe(), techniques=(), learning_rate=None, arguments={}))


def ours(recipe: Recipe) -> Brought:
    """A recipe, and what of it no control shows."""
    unseen = [(f"arguments.{name}", str(value)) for name, value in recipe.arguments.items()]
    unseen += [("callbacks", f"{name}, whose code a run imports") for name in recipe.callbacks]
    return Brought(recipe, "the workbench", unseen)


def keep(dataset: "Dataset", column: str = "") -> str:
    """Write the texts or conversations of a `datasets.Dataset` beside the records; returns their name for a recipe.

        Recipe(corpus=keep(dataset, "review"))

    The name is made of the text's hash: the same texts give the same recipe.

    Raises:
        ConfigurationError: no such column, not a Dataset, or no text in it.
        UnavailableError: the disk is full, or the folder cannot be written to.
    """
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, list) or not hasattr(dataset, "__len__"):
        cure = "Of several splits give one, as dataset['train']; read a stream first: Dataset.from_list(list(stream))."
        raise readers.refusal(f"a datasets.Dataset is needed, got a {type(dataset).__name__}. {cure}")
    kept = (column or readers.column_of(names)).split(",")
    for name in kept:
        if name not in names:
            raise readers.refusal(f"the data set has no column {name!r}; it has {', '.join(names)}. Name one.")
    with aside(folder_of_runs("texts"), "corpus: the data set", ".parquet") as part:
        renamed = {} if readers.column_of(kept) == ",".join(kept) else {column: "text"}
        dataset.select_columns(kept).rename_columns(renamed).to_parquet(part)
        return str(put_in_place(part, f"{load_corpus(str(part)).sha256[:16]}.parquet"))
