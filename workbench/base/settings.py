"""Settings: dataclass fields that know their meaning and range.

One declaration serves the validation, the command line, the notebooks' parameters and the widgets:

    rank: int = setting(8, "dimension of the low-rank update", minimum=1)
"""

import dataclasses
import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field
from functools import cache
from typing import Any, get_args

from workbench.base.categories import ungrouped
from workbench.base.errors import ConfigurationError, brief

KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str}
IN_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}
# surrogates stand for bytes of a file's name that are not UTF-8
UNWRITABLE = re.compile("^\\s*$|[\0\ud800-\udfff]")
TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@cache
def checker(annotation: Any) -> Any:
    """pydantic's `TypeAdapter` of a type. pydantic is imported late, because most commands do without it."""
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    in_label: bool = False,
) -> Any:
    """A dataclass field with its documentation and range; the ends of the range are allowed values.

    Args:
        in_label: a label names its value even where that is the default, which nobody would guess.
    """
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices),
        "in_label": in_label,
    }
    return dataclasses.field(default=default, metadata=metadata)


def described(field: Field[Any]) -> str:
    """What the field accepts, in words: `an integer of at least 1`."""
    choices = field.metadata.get("choices")
    low = field.metadata.get("minimum")
    high = field.metadata.get("maximum")
    text = f"one of {', '.join(choices)}" if choices else IN_WORDS.get(kind(field), "")
    if low is not None:
        text += f" of at least {low}"
    if high is not None:
        text += f" and at most {high}"
    if optional(field):
        text += " or none"
    return text


def check_settings(settings: Any, owner: str) -> None:
    """Validate every field; a whole number given for a `float` becomes one, so that equal settings are equal.

    Raises:
        ConfigurationError: naming the owner, the field, the value and what would be accepted.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if "help" in field.metadata and not _acceptable(field, value):
            raise _refusal(field, value, owner)
        if kind(field) == "float" and isinstance(value, int):
            # the dataclass is frozen, and still being made
            object.__setattr__(settings, field.name, float(value))


def separated(text: str, owner: str) -> dict[str, str]:
    """`rank:8,alpha:16`, as typed on a command line, as a dictionary. Raises ConfigurationError: it is no name:value,
    or a name is there twice."""
    values: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, colon, value = part.partition(":")
        if not colon:
            raise ConfigurationError(
                f"{owner}: {part!r} is not a setting. Write name:value, as in lora=rank:8,alpha:16."
            )
        if key.strip() in values:
            raise ConfigurationError(f"{owner}: {key.strip()} is given twice. Keep one of the two values.")
        values[key.strip()] = value.strip()
    return values


def parse_settings(cls: type[Any], values: Mapping[str, str], owner: str) -> dict[str, Any]:
    """Turn texts, as typed on a command line, into values of the fields' types.

    Raises:
        ConfigurationError: for an unknown name (listing the known ones) or a text that is not of the type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if "help" in field.metadata}
    return {name: _convert(fields[name], text, owner) for name, text in named(values, fields, owner).items()}


def named(values: object, allowed: Iterable[str], owner: str, what: str = "setting") -> dict[str, Any]:
    """Values by name, from a JSON file for example, once they are known to be that.

    Raises:
        ConfigurationError: they are no mapping, or a name is not allowed; the nearest one that is is offered.
    """
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{owner} takes each {what} by its name, as in {{name: value}}, got {brief(values)}.")
    for name in values:
        if name not in allowed:
            raise unknown(f"{owner} has no {what}", name, allowed)
    return dict(values)


def unknown(complaint: str, name: object, names: Iterable[str]) -> ConfigurationError:
    """`lora has no setting 'rang'. Known: rank, alpha. Did you mean rank?`"""
    plain_names = dict(zip(map(plain, names), names, strict=True))
    near = difflib.get_close_matches(plain(str(name)), plain_names, n=1)
    guess = f" Did you mean {plain_names[near[0]]}?" if near else ""
    listed = ", ".join(names) or "it has no settings"
    hint = f"Known: {listed}." if len(listed) < 1000 else "Its documentation has them all."
    return ConfigurationError(f"{complaint} {brief(name)}. {hint}{guess}")


def plain(name: str) -> str:
    """Without what people write differently: capitals, and what is between words."""
    return re.sub(r"[\W_]", "", name.lower())


def toml(value: Any) -> str:
    """A value as TOML has it. Raises ValueError for what TOML or a record cannot hold: none, NaN, no Unicode, 2^63."""
    if isinstance(value, Mapping):
        entries = [f"{toml(name)} = {toml(entry)}" for name, entry in value.items()]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if not isinstance(value, str | int | float) or (value and _unwritable(value)):
        raise ValueError(f"{brief(value)} cannot be written")
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # JSON leaves it, TOML does not take it


def assigned(text: str) -> dict[str, Any]:
    """`technique.lora.rank=16` as a TOML file has it; what is no value of TOML is a text.

    Raises ConfigurationError for what is no NAME=VALUE.
    """
    name, equals, value = text.partition("=")
    if equals:
        with suppress(ValueError, RecursionError):
            return tomllib.loads(f"{name} = {value}")
        with suppress(ValueError, RecursionError):
            return tomllib.loads(f"{name} = {toml(value)}")
    raise ConfigurationError(f"--set: {brief(text)} is not NAME=VALUE. Write for example technique.lora.rank=16.")


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes over the settings, table by table; an empty table empties."""
    result = {**settings, **changes}
    for name, value in changes.items():
        if value and isinstance(value, dict) and isinstance(settings.get(name), dict):
            result[name] = merged(settings[name], value)
    return result


def _convert(field: Field[Any], text: str, owner: str) -> Any:
    if optional(field) and text.lower() in ("", "none"):
        return None
    try:
        match kind(field):
            case "int":
                return int(ungrouped(text))
            case "float":
                return float(text)
            case "bool":
                return TRUTHS[text.lower()]
    except (ValueError, KeyError):
        raise _refusal(field, text, owner) from None
    return text


def kind(field: Field[Any]) -> str:
    """The name of the field's type: `int` for `int` and for `int | None`."""
    types = get_args(field.type) or (field.type,)
    first = types[1] if types[0] is type(None) else types[0]
    return str(getattr(first, "__name__", first))


def optional(field: Field[Any]) -> bool:
    """Whether None is a value."""
    return type(None) in get_args(field.type)


def _refusal(field: Field[Any], value: Any, owner: str) -> ConfigurationError:
    beyond = _unwritable(value) if isinstance(value, KINDS.get(kind(field), object)) else ""
    return ConfigurationError(f"{owner}: {field.name} must be {described(field)}{beyond}, got {brief(value)}.")


def _unwritable(value: Any) -> str:
    """The demand that a value does not meet for a path, a record, or a column of a table; empty if it meets all."""
    if isinstance(value, str) and UNWRITABLE.search(value):
        return ", not empty and all of it Unicode (rename a file whose name is not)"
    if isinstance(value, int | float) and 2**63 <= abs(value) < math.inf:
        return " and below 2^63"
    return ""


def _acceptable(field: Field[Any], value: Any) -> bool:
    if value is None:
        return optional(field)
    if not isinstance(value, KINDS.get(kind(field), object)) or (isinstance(value, bool) and kind(field) != "bool"):
        return False
    if _unwritable(value) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    choices = field.metadata.get("choices")
    low = field.metadata.get("minimum")
    high = field.metadata.get("maximum")
    if choices and value not in choices:
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def changed_settings(entry: Any, *but: str) -> dict[str, Any]:
    """The settings, of a technique or a recipe, that differ from their defaults; without some."""
    changed = {}
    for field_ in dataclasses.fields(entry):
        value = getattr(entry, field_.name)
        if field_.name not in but and value != field_.default:
            changed[field_.name] = value
    return changed
