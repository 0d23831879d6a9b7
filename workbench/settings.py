"""Settings: dataclass fields that know their meaning, unit and range.

One declaration serves the validation, the command line, the notebooks' parameters and the widgets:

    rank: int = setting(8, "dimension of the low-rank update", minimum=1)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from typing import Any, get_args

from workbench.errors import ConfigurationError


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field with its documentation and range; the ends of the range are allowed values."""
    metadata = {"help": help, "unit": unit, "minimum": minimum, "maximum": maximum, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=metadata)


def described(field: Field[Any]) -> str:
    """What the field accepts, in words: `an integer of at least 1`."""
    plain = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}.get(kind(field), "")
    words = f"one of {', '.join(field.metadata['choices'])}" if field.metadata.get("choices") else plain
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    words += f" of at least {low}" if low is not None else ""
    words += f" and at most {high}" if high is not None else ""
    return words + (" or none" if optional(field) else "")


def check_settings(settings: Any, owner: str) -> None:
    """Validate every field; a whole number given for a `float` becomes one, so that equal settings are equal.

    Raises:
        ConfigurationError: naming the owner, the field, the value and what would be accepted.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if "help" in field.metadata and not _acceptable(field, value):
            raise ConfigurationError(f"{owner}: {field.name} must be {described(field)}, got {value!r}.")
        if kind(field) == "float" and isinstance(value, int):
            object.__setattr__(settings, field.name, float(value))  # the dataclass is frozen, and still being made


def parse_settings(cls: type[Any], values: Mapping[str, str], owner: str) -> dict[str, Any]:
    """Turn texts, as typed on a command line, into values of the fields' types.

    Raises:
        ConfigurationError: for an unknown name (listing the known ones) or a text that is not of the type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if "help" in field.metadata}
    unknown = [name for name in values if name not in fields]
    if unknown:
        known = ", ".join(fields) or "it has no settings"
        raise ConfigurationError(f"{owner} has no setting {unknown[0]!r}. Known: {known}.")
    return {name: _convert(fields[name], text, owner) for name, text in values.items()}


def _convert(field: Field[Any], text: str, owner: str) -> Any:
    if optional(field) and text.lower() in ("", "none"):
        return None
    try:
        return _READERS.get(kind(field), str)(text)
    except (ValueError, KeyError):
        raise ConfigurationError(f"{owner}: {field.name} must be {described(field)}, got {text!r}.") from None


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]


_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _boolean}
_KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str}


def kind(field: Field[Any]) -> str:
    """The name of the field's type: `int` for `int` and for `int | None`."""
    kinds = get_args(field.type) or (field.type,)
    return next(str(getattr(k, "__name__", k)) for k in kinds if k is not type(None))


def optional(field: Field[Any]) -> bool:
    """Whether None is a value."""
    return type(None) in get_args(field.type)


def _acceptable(field: Field[Any], value: Any) -> bool:
    if value is None:
        return optional(field)
    if not isinstance(value, _KINDS.get(kind(field), object)) or (isinstance(value, bool) and kind(field) != "bool"):
        return False
    choices, low, high = (field.metadata.get(key) for key in ("choices", "minimum", "maximum"))
    if choices and value not in choices:
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return (low is None or value >= low) and (high is None or value <= high)
