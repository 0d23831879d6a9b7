"""The techniques by their names: a table in `cards.toml`, and the class of that name in the file of that name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from workbench.measure.categories import Category
from workbench.paths import beside
from workbench.settings import parse_settings, separated, unknown
from workbench.techniques.base import Numerics, Technique

READ: dict[str, Callable[[Any], Any]] = {"attacks": lambda names: tuple(map(Category, names)), "numerics": Numerics}


def _class_of(name: str, card: Mapping[str, Any]) -> type[Technique]:
    """Of `batch_size` the class `BatchSize`, with its name and what its card says."""
    cls: type[Technique] = getattr(import_module(f"{__package__}.{name}"), name.title().replace("_", ""))
    for field, value in {"name": name, **card}.items():
        setattr(cls, field, READ.get(field, str)(value))
    return cls


CARDS = beside(__file__, "cards.toml")
REGISTRY = {name: _class_of(name, card) for name, card in CARDS.items()}


def technique(name: str, /, **settings: Any) -> Technique:
    """Make a technique by its name.

    Raises:
        ConfigurationError: unknown name or setting, or a value out of range.
    """
    return _known(name).given(settings)


def parse_technique(text: str) -> Technique:
    """Make a technique from the command line's form, `lora=rank:8,alpha:16` or plain `lora`.

    Raises:
        ConfigurationError: unknown name or setting, or a value that is malformed or out of range.
    """
    name, _, rest = text.partition("=")
    return _known(name)(**parse_settings(_known(name), separated(rest, name), name))


def _known(name: str) -> type[Technique]:
    if name not in REGISTRY:
        raise unknown("There is no technique", name, sorted(REGISTRY))
    return REGISTRY[name]
