"""A recipe as people write it: as a command line, and as a file."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from workbench.paths import read_toml
from workbench.recipe import Recipe, changed_settings
from workbench.settings import assigned, described, merged, parse_settings, toml
from workbench.techniques import parse_technique

FILE = ".toml"  # how the name of a recipe file ends
EXAMPLE = "Write for example: steps = 50, and below it, a line each, [technique.lora], rank = 16."


def as_command(recipe: Recipe) -> str:
    """The command line that runs this recipe."""
    words = ["python", "-m", "workbench", "run", recipe.model]
    for name, value in changed_settings(recipe, "model", "techniques", "arguments", "callbacks").items():
        words += [flag(name), _written(value)]
    for entry in sorted(recipe.techniques, key=lambda t: t.name):
        changed = ",".join(f"{name}:{_written(value)}" for name, value in changed_settings(entry).items())
        words += ["--technique", f"{entry.name}={changed}" if changed else entry.name]
    for name, value in recipe.arguments.items():
        words += ["--set", f"arguments.{name}={toml(value)}"]
    words += ["--set", f"callbacks={toml(recipe.callbacks)}"] if recipe.callbacks else []
    return shlex.join(words)


def as_toml(recipe: Recipe) -> str:
    """A recipe file: the model, and what is not as by default. Inverse of `read_recipe`."""
    tables = [("", {"model": recipe.model, **changed_settings(recipe, "techniques", "arguments")})]
    named = sorted(recipe.techniques, key=lambda t: t.name)
    tables += [(f"technique.{t.name}", changed_settings(t)) for t in named]
    tables += [("arguments", dict(recipe.arguments))] if recipe.arguments else []
    lines = list[str]()
    for head, settings in tables:
        lines += ["", f"[{head}]"] if head else []
        lines += [f"{name} = {toml(value)}" for name, value in settings.items()]
    return "\n".join([*lines, ""])


def read_recipe(path: Path | str) -> Recipe:
    """The recipe in a file. Its own paths are seen from the working directory, not from that of the file.

    Raises ConfigurationError for a file that is no TOML, and as `Recipe.from_dict`.
    """
    return Recipe.from_dict(read_toml(Path(path), "recipe", EXAMPLE))


def parse_recipe(values: Mapping[str, str], techniques: Iterable[str] = (), changes: Iterable[str] = ()) -> Recipe:
    """A recipe from texts, as typed on a command line: fields by name, techniques as `lora=rank:8`, and changes as
    `technique.lora.rank=16`. A model that ends in `.toml` is a recipe file, over which all of them go.

    Raises ConfigurationError for a text that cannot be read, and as the recipe itself does.
    """
    given, data = parse_settings(Recipe, values, "run"), dict[str, Any]()
    if given.get("model", "").endswith(FILE):
        data = read_toml(Path(given.pop("model")), "recipe", EXAMPLE)
    for change in changes:
        data = merged(data, assigned(change))
    return Recipe.from_dict(data | given, [*map(parse_technique, techniques)])


def recipe_options() -> dict[str, tuple[str, str]]:
    """Of each field that a command line has an option for: the option, and its help."""
    return {
        f.name: (flag(f.name), f"{f.metadata['help']} ({described(f)}; default {_written(f.default)})")
        for f in fields(Recipe)
        if "help" in f.metadata
    }


def flag(field_name: str) -> str:
    """The command line's name of a field; people know some by a shorter one."""
    return {"effective_batch_size": "--batch-size"}.get(field_name, "--" + field_name.replace("_", "-"))


def _written(value: Any) -> str:
    """As the command line reads it back."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
