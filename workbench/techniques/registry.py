"""The techniques by their names: each has a table in `cards.toml`, and a class of that name in a file of that name."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from workbench.base.categories import Category
from workbench.base.paths import read_beside
from workbench.base.settings import parse_settings, split_settings, unknown_name_error
from workbench.techniques.base import Numerics, Technique


def _class_of(name: str, card: Mapping[str, Any]) -> type[Technique]:
    """Find a technique's class, of `batch_size` the class `BatchSize`, and give it its name and what its card says.

    Raises:
        TypeError: the card has a key that no technique has, perhaps a mistyped one.
    """
    unknown_keys = card.keys() - Technique.__annotations__.keys()
    if unknown_keys:
        raise TypeError(f"cards.toml: {name} has {', '.join(sorted(unknown_keys))}, which no technique has.")
    cls: type[Technique] = getattr(import_module(f"{__package__}.{name}"), name.title().replace("_", ""))
    cls.name = name
    for field, value in card.items():
        setattr(cls, field, value)
    cls.attacks = tuple(Category(category) for category in card.get("attacks", ()))
    cls.numerics = Numerics(card["numerics"])
    return cls


CARDS = read_beside(__file__, "cards.toml")
REGISTRY = {name: _class_of(name, card) for name, card in CARDS.items()}


def technique(name: str, /, **settings: Any) -> Technique:
    """Make a technique by its name.

    Raises:
        ConfigurationError: unknown name or setting, or a value out of range.
    """
    return _find(name).from_settings(settings)


def parse_technique(text: str) -> Technique:
    """Make a technique from its form on the command line, `lora=rank:8,alpha:16` or plain `lora`.

    Raises:
        ConfigurationError: unknown name or setting, or a value that is malformed or out of range.
    """
    name, _, settings = text.partition("=")
    cls = _find(name)
    return cls(**parse_settings(cls, split_settings(settings, name), name))


def in_words(label: str) -> str:
    """Return a recipe's label by the techniques' titles, for tables and pictures.

    `lora(rank=4) + optimizer(kind=adamw_8bit)` becomes LoRA (rank=4) + 8-bit AdamW. A label that is no technique's,
    such as `baseline`, stays as it is.
    """
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
    if first.istitle():  # Gradient is a word; LoRA is a name and stays
        first = first.lower()
    title = first + space + rest
    return f"{title} ({settings})" if settings else title


def _find(name: str) -> type[Technique]:
    if name not in REGISTRY:
        raise unknown_name_error("There is no technique", name, sorted(REGISTRY))
    return REGISTRY[name]
