"""The classes in which other libraries hold settings: their fields, types and defaults.

No object of them is ever made: that would look at the device, change what accelerate knows of this process, and refuse
on a CPU what a GPU takes.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple, get_args, get_type_hints

from workbench.base.errors import ConfigurationError, UnavailableError, brief, explain_errors
from workbench.base.settings import type_adapter
from workbench.export.pasted import Section


class Owner(NamedTuple):
    """The fields of a class.

    Attributes:
        types: the type of each field.
        defaults: the default of each field that has one.
    """

    types: dict[str, Any]
    defaults: dict[str, Any]


@cache
def owner(package: str, name: str) -> Owner:
    """Read the fields of a class. Raises UnavailableError: its package is not installed, or has no such class."""
    cls = getattr(import_module(package), name, None) if find_spec(package) else None
    if cls is None:
        raise UnavailableError(f"recipe: these settings are of {package}'s {name}. Install it: pip install {package}")
    # An HfArgumentParser in the same process may have rewritten `field.type`, so hints are read.
    hints = get_type_hints(cls)
    types = {}
    defaults = {}
    for field in fields(cls):
        types[field.name] = hints[field.name]
        if field.default is not MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not MISSING:
            defaults[field.name] = field.default_factory()
    return Owner(types, defaults)


def title_with_version(title: str, package: str) -> str:
    """Return the title of a program with the version of the package whose fields are read, if it is installed."""
    return f"{title} ({package} {version(package)})" if package and find_spec(package) else title


def convert(value: Any, annotation: Any, setting_name: str) -> Any:
    """Convert a value, which may be a command line's text, to the field's type; an Enum becomes its value.

    Raises ConfigurationError: it is of another type, or none of a fixed list of choices.
    """
    if value == "auto" and str not in get_args(annotation):
        cure = "The Trainer puts its own number in the place of DeepSpeed's auto. Write the number."
        raise ConfigurationError(f"{setting_name}: auto is no value. {cure}")
    with explain_errors(f"{setting_name} cannot be {brief(value)}", "See the documentation of this class."):
        value = type_adapter(annotation).validate_python(value)
    if isinstance(value, Enum):
        return value.value
    # For `Enum | str` pydantic takes any text, so the choices are checked here.
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, Enum) and value is not None:
            choices = [str(choice.value) for choice in part]
            if str(value) not in choices:
                raise ConfigurationError(f"{setting_name} cannot be {brief(value)}. Known: {', '.join(choices)}.")
    return value


def classes_of(table: Mapping[str, Any], section: Section) -> list[str]:
    """List the classes whose fields a section has: the one that is called, or for a file the program's first class and
    those of which it has any field."""
    package = table.get("package", "transformers")
    if section.owner:
        return [section.owner] if "classes" in table else []
    if package == "peft":
        adapter = section.settings.get("peft_type", "LORA")
        return [name for name, kind in adapters().items() if kind == adapter]
    first, *others = table.get("classes", [""])
    with_fields = [name for name in others if section.settings.keys() & owner(package, name).types.keys()]
    return [first, *with_fields] if first else []


@cache
def adapters() -> dict[str, str]:
    """Return the kind of adapter of each of PEFT's classes of settings, by the class's name."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    return {cls.__name__: peft_type.value for peft_type, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
