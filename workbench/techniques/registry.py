"""The techniques by their names: a table in `cards.toml`, and the class of that name in the file of that name."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from workbench.base.categories import Category
from workbench.base.paths import beside
from workbench.base.settings import parse_settings, separated, unknown
from workbench.techniques.base import Numerics, Technique


def _class_of(name: str, card: Mapping[str, Any]) -> type[Technique]:
    """Of `batch_size` the class `BatchSize`, with its name and what its card says."""
    cls: type[Technique] = getattr(import_module(f"{__package__}.{name}"), name.title().replace("_", ""))
    cls.name = name
    for field, value in card.items():
        setattr(cls, field, value)
    cls.attacks = tuple(Category(category) for category in card.get("attacks", ()))
    cls.numerics = Numerics(card["numerics"])
    return cls


CARDS = beside(__file__, "cards.toml")
REGISTRY = {name: _class_of(name, card) for name, card in CARDS.items()}


def technique(name: str, /, **settings: Any) -> Technique:
    """Make a technique by its name.

    Raises:
        ConfigurationError: unknown name or setting, or a value out of range.
    """
    return _find(name).given(settings)


def parse_technique(text: str) -> Technique:
    """Make a technique from the command line's form, `lora=rank:8,alpha:16` or plain `lora`.

    Raises:
        ConfigurationError: unknown name or setting, or a value that is malformed or out of range.
    """
    name, _, settings = text.partition("=")
    cls = _find(name)
    return cls(**parse_settings(cls, separated(settings, name), name))


def in_words(label: str) -> str:
    """A recipe's label as tables and pictures have it: of `lora(rank=4) + optimizer(kind=adamw_8bit)`, LoRA (rank=4) +
    8-bit AdamW. What is no technique's, as `baseline`, stays as it is."""
    in_order = []
    for entry in label.split(" + "):
        name, _, settings = entry.removesuffix(")").partition("(")
        if name in REGISTRY:
            entry = _words_of(REGISTRY[name], settings)
        in_order.append(entry)
    return " + ".join(in_order)


def _words_of(cls: type[Technique], settings: str) -> str:
    if settings in cls.called:
        return cls.called[settings]
    first, space, rest = cls.title.partition(" ")
    if first.istitle():  # as Gradient, and not as LoRA
        first = first.lower()
    title = first + space + rest
    if settings:
        title += f" ({settings})"
    return title


def _find(name: str) -> type[Technique]:
    if name not in REGISTRY:
        raise unknown("There is no technique", name, sorted(REGISTRY))
    return REGISTRY[name]
