"""Recipes, and other programs' settings, with what was understood of them and what not.

What other programs' settings mean here is written in `foreign.toml`, and nowhere else.
"""

from dataclasses import fields, replace

from workbench.export.meaning import ImportedRecipe, Settings
from workbench.export.pasted import read_sections
from workbench.export.whose import assign_programs
from workbench.recipe import Recipe

OURS = {field.name for field in fields(Recipe)} | {"technique"}
COMMON = {"learning_rate", "seed"}  # settings that all programs have


def read_settings(text: str, base: Recipe | None = None) -> ImportedRecipe:
    """Read a recipe (TOML, JSON), a record, or other programs' settings: a file, a command, calls of a script.

    Args:
        base: the recipe that gives what others' settings do not say: the text, and with some of them the model.

    Raises:
        ConfigurationError: it cannot be read, is of no program that is known, or has a value that is refused.
        UnavailableError: the package whose settings they are is not installed.
    """
    sections = read_sections(text)
    if len(sections) == 1 and not sections[0].owner and sections[0].before_options is None:
        data = sections[0].settings
        names = data.keys() - COMMON
        # Other programs have a few of our names, too, and one has a table of the name `model`.
        is_ours = 2 * len(names & OURS) >= len(names) > 0 and isinstance(data.get("model", ""), str)
        if isinstance(data.get("recipe"), dict) or is_ours:
            return import_own_recipe(Recipe.from_dict(data.get("recipe", data)))
    settings = Settings()
    for program, section in assign_programs(sections):
        settings.add(program, section)
    return settings.translate(replace(base or Recipe(), techniques=(), learning_rate=None, arguments={}))


def import_own_recipe(recipe: Recipe) -> ImportedRecipe:
    """Return a recipe of our own, and as `understood` what of it no control of the panel shows."""
    unseen = [(f"arguments.{name}", str(value)) for name, value in recipe.arguments.items()]
    unseen += [("callbacks", f"{name}, whose code a run imports") for name in recipe.callbacks]
    return ImportedRecipe(recipe, "the workbench", unseen)
