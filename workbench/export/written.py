"""A recipe as people write it: as a command line, and as a file."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from workbench.base.paths import read_toml
from workbench.base.settings import assigned, described, merged, parse_settings, toml
from workbench.recipe import Recipe, changed_settings
from workbench.techniques import Technique, parse_technique

FILE = ".toml"  # how the name of a recipe file ends
EXAMPLE = "Write for example: steps = 50, and below it, a line each, [technique.lora], rank = 16."


def as_command(recipe: Recipe) -> str:
    """The command line that runs this recipe."""
    command = ["python", "-m", "workbench", "run", recipe.model]
    for name, value in changed_settings(recipe, "model", "techniques", "arguments", "callbacks").items():
        command += [flag(name), _written(value)]
    for technique in by_name(recipe):
        settings = [f"{name}:{_written(value)}" for name, value in changed_settings(technique).items()]
        command += ["--technique", f"{technique.name}={','.join(settings)}".rstrip("=")]
    for name, value in recipe.arguments.items():
        command += ["--set", f"arguments.{name}={toml(value)}"]
    if recipe.callbacks:
        command += ["--set", f"callbacks={toml(recipe.callbacks)}"]
    return shlex.join(command)


def as_toml(recipe: Recipe) -> str:
    """A recipe file: the model, and what is not as by default. Inverse of `read_recipe`."""
    lines = assignments({"model": recipe.model, **changed_settings(recipe, "techniques", "arguments")})
    for technique in by_name(recipe):
        lines += ["", f"[technique.{technique.name}]", *assignments(changed_settings(technique))]
    if recipe.arguments:
        lines += ["", "[arguments]", *assignments(recipe.arguments)]
    return "\n".join([*lines, ""])


def assignments(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {toml(value)}" for name, value in settings.items()]


def by_name(recipe: Recipe) -> list[Technique]:
    return sorted(recipe.techniques, key=lambda technique: technique.name)


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
    fields_of_recipe = parse_settings(Recipe, values, "run")
    data: dict[str, Any] = {}
    if fields_of_recipe.get("model", "").endswith(FILE):
        data = read_toml(Path(fields_of_recipe.pop("model")), "recipe", EXAMPLE)
    # What is typed goes over what the file says.
    for change in changes:
        data = merged(data, assigned(change))
    return Recipe.from_dict(data | fields_of_recipe, [parse_technique(text) for text in techniques])


def recipe_options() -> dict[str, tuple[str, str]]:
    """Of each field that a command line has an option for: the option, and its help."""
    options = {}
    for field in fields(Recipe):
        if "help" in field.metadata:
            meaning = f"{field.metadata['help']} ({described(field)}; default {_written(field.default)})"
            options[field.name] = (flag(field.name), meaning)
    return options


def flag(field_name: str) -> str:
    """The command line's name of a field; people know some by a shorter one."""
    if field_name == "effective_batch_size":
        return "--batch-size"
    return "--" + field_name.replace("_", "-")


def _written(value: Any) -> str:
    """As the command line reads it back."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
