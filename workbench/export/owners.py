"""The classes of settings that other libraries have: their own fields, types and defaults. None is ever made here.

Making one looks at the device, changes what accelerate knows of this process, and refuses on a CPU what a GPU takes.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple, get_args, get_type_hints

from workbench.base.errors import ConfigurationError, UnavailableError, brief, explained
from workbench.base.settings import checker
from workbench.export.pasted import Section


class Owner(NamedTuple):
    """The fields of a class.

    Attributes:
        types: of each field.
        defaults: of the fields that have one.
    """

    types: dict[str, Any]
    defaults: dict[str, Any]


@cache
def owner(package: str, name: str) -> Owner:
    """The fields of a class. Raises UnavailableError: its package is not installed, or has no such class."""
    cls = getattr(import_module(package), name, None) if find_spec(package) else None
    if cls is None:
        raise UnavailableError(f"recipe: these settings are of {package}'s {name}. Install it: pip install {package}")
    # not `field.type`, which an HfArgumentParser in the same process has rewritten
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


def versioned(title: str, package: str) -> str:
    """The title of a program with the version whose fields are read."""
    return f"{title} ({package} {version(package)})" if package and find_spec(package) else title


def checked(value: Any, annotation: Any, setting_name: str) -> Any:
    """The value as the field's type has it, from a command line's text too.

    Raises ConfigurationError: it is of another type, or none of a fixed list of choices.
    """
    if value == "auto" and str not in get_args(annotation):
        cure = "The Trainer puts its own number in the place of DeepSpeed's auto. Write the number."
        raise ConfigurationError(f"{setting_name}: auto is no value. {cure}")
    with explained(f"{setting_name} cannot be {brief(value)}", "See the documentation of this class."):
        value = checker(annotation).validate_python(value)
    if isinstance(value, Enum):
        return value.value
    for part in get_args(annotation):  # of `Enum | str`, where pydantic takes any text
        if isinstance(part, type) and issubclass(part, Enum) and value is not None:
            choices = [str(choice.value) for choice in part]
            if str(value) not in choices:
                raise ConfigurationError(f"{setting_name} cannot be {brief(value)}. Known: {', '.join(choices)}.")
    return value


def classes_of(table: Mapping[str, Any], section: Section) -> list[str]:
    """The classes whose fields a section has: the one that is called, or those of which a file has any."""
    package = table.get("package", "transformers")
    if section.owner:
        return [section.owner] if "classes" in table else []
    if package == "peft":
        adapter = section.settings.get("peft_type", "LORA")
        return [name for name, its_adapter in adapters().items() if its_adapter == adapter]
    first, *others = table.get("classes", [""])
    with_fields = [name for name in others if section.settings.keys() & owner(package, name).types.keys()]
    return [first, *with_fields] if first else []


@cache
def adapters() -> dict[str, str]:
    """PEFT's classes of settings, and the adapter that each is of."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    return {cls.__name__: peft_type.value for peft_type, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
