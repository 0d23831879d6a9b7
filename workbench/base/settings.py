"""Settings, which are dataclass fields that know their meaning and range.

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

from workbench.base.categories import drop_thousands_commas
from workbench.base.errors import ConfigurationError, brief

KINDS: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str}
IN_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}
# A text cannot be written if it is blank or holds a zero byte or a surrogate, which stands for a byte of a file's name
# that is not UTF-8.
UNWRITABLE = re.compile("^\\s*$|[\0\ud800-\udfff]")
TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@cache
def type_adapter(annotation: Any) -> Any:
    """Return pydantic's `TypeAdapter` of a type. pydantic is imported late, because most commands do without it."""
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
    """Declare a dataclass field with its documentation and range; the ends of the range are allowed values.

    Args:
        in_label: a label names the value even where it is the default, which nobody would guess.
    """
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices),
        "in_label": in_label,
    }
    return dataclasses.field(default=default, metadata=metadata)


def describe_field(field: Field[Any]) -> str:
    """Say in words what the field accepts: `an integer of at least 1`."""
    choices = field.metadata.get("choices")
    low = field.metadata.get("minimum")
    high = field.metadata.get("maximum")
    text = f"one of {', '.join(choices)}" if choices else IN_WORDS.get(type_name(field), "")
    if low is not None:
        text += f" of at least {low}"
    if high is not None:
        text += f" and at most {high}"
    if is_optional(field):
        text += " or none"
    return text


def check_settings(settings: Any, owner: str) -> None:
    """Validate every field; a whole number given for a `float` becomes one, so that equal settings are equal.

    Raises:
        ConfigurationError: naming the owner, the field, the value and what would be accepted.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if "help" in field.metadata and not _is_acceptable(field, value):
            raise _refusal(field, value, owner)
        if type_name(field) == "float" and isinstance(value, int):
            # The dataclass is frozen, although its construction is not over yet.
            object.__setattr__(settings, field.name, float(value))


def split_settings(text: str, owner: str) -> dict[str, str]:
    """Split `rank:8,alpha:16`, as typed on a command line, into a dictionary.

    Raises:
        ConfigurationError: a part is no name:value, or a name occurs twice.
    """
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
    return {name: _convert(fields[name], text, owner) for name, text in check_names(values, fields, owner).items()}


def check_names(values: object, allowed: Iterable[str], owner: str, what: str = "setting") -> dict[str, Any]:
    """Return values by name, such as those of a JSON file, as a dictionary whose names are all allowed.

    Raises:
        ConfigurationError: the values are no mapping, or a name is not allowed; the nearest allowed one is offered.
    """
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{owner} takes each {what} by its name, as in {{name: value}}, got {brief(values)}.")
    for name in values:
        if name not in allowed:
            raise unknown_name_error(f"{owner} has no {what}", name, allowed)
    return dict(values)


def unknown_name_error(complaint: str, name: object, names: Iterable[str]) -> ConfigurationError:
    """Return an error such as `lora has no setting 'rang'. Known: rank, alpha. Did you mean rank?`"""
    plain_names = dict(zip(map(normalize_name, names), names, strict=True))
    near = difflib.get_close_matches(normalize_name(str(name)), plain_names, n=1)
    guess = f" Did you mean {plain_names[near[0]]}?" if near else ""
    listed = ", ".join(names) or "it has no settings"
    hint = f"Known: {listed}." if len(listed) < 1000 else "Its documentation has them all."
    return ConfigurationError(f"{complaint} {brief(name)}. {hint}{guess}")


def normalize_name(name: str) -> str:
    """Return a name without what people write differently: capitals, and what stands between words."""
    return re.sub(r"[\W_]", "", name.lower())


def toml(value: Any) -> str:
    """Write a value as TOML has it. Raises ValueError for what TOML or a record cannot hold: none, NaN, text that is
    not Unicode, 2^63."""
    if isinstance(value, Mapping):
        entries = [f"{toml(name)} = {toml(entry)}" for name, entry in value.items()]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if not isinstance(value, str | int | float) or (value and _unwritable(value)):
        raise ValueError(f"{brief(value)} cannot be written")
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # JSON leaves a DEL as it is, and TOML does not take it


def parse_assignment(text: str) -> dict[str, Any]:
    """Read `technique.lora.rank=16` as a line of a TOML file; a value that is none of TOML is a text.

    Raises:
        ConfigurationError: it is no NAME=VALUE.
    """
    name, equals, value = text.partition("=")
    if equals:
        with suppress(ValueError, RecursionError):
            return tomllib.loads(f"{name} = {value}")
        with suppress(ValueError, RecursionError):
            return tomllib.loads(f"{name} = {toml(value)}")
    raise ConfigurationError(f"--set: {brief(text)} is not NAME=VALUE. Write for example technique.lora.rank=16.")


def merge_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the changes, table by table; an empty table replaces a full one."""
    result = {**settings, **changes}
    for name, value in changes.items():
        if value and isinstance(value, dict) and isinstance(settings.get(name), dict):
            result[name] = merge_settings(settings[name], value)
    return result


def _convert(field: Field[Any], text: str, owner: str) -> Any:
    if is_optional(field) and text.lower() in ("", "none"):
        return None
    try:
        match type_name(field):
            case "int":
                return int(drop_thousands_commas(text))
            case "float":
                return float(text)
            case "bool":
                return TRUTHS[text.lower()]
    except (ValueError, KeyError):
        raise _refusal(field, text, owner) from None
    return text


def type_name(field: Field[Any]) -> str:
    """Return the name of the field's type: `int` for `int` and for `int | None`."""
    types = get_args(field.type) or (field.type,)
    first = types[1] if types[0] is type(None) else types[0]
    return str(getattr(first, "__name__", first))


def is_optional(field: Field[Any]) -> bool:
    """Whether None is a value of the field."""
    return type(None) in get_args(field.type)


def _refusal(field: Field[Any], value: Any, owner: str) -> ConfigurationError:
    beyond = _unwritable(value) if isinstance(value, KINDS.get(type_name(field), object)) else ""
    return ConfigurationError(f"{owner}: {field.name} must be {describe_field(field)}{beyond}, got {brief(value)}.")


def _unwritable(value: Any) -> str:
    """Return the demand of paths, records or columns of a table that a value does not meet; empty if it meets all."""
    if isinstance(value, str) and UNWRITABLE.search(value):
        return ", not empty and all of it Unicode (rename a file whose name is not)"
    if isinstance(value, int | float) and 2**63 <= abs(value) < math.inf:
        return " and below 2^63"
    return ""


def _is_acceptable(field: Field[Any], value: Any) -> bool:
    if value is None:
        return is_optional(field)
    if not isinstance(value, KINDS.get(type_name(field), object)) or (
        isinstance(value, bool) and type_name(field) != "bool"
    ):
        return False
    if _unwritable(value) or (isinstance(value, float) and not math.isfinite(value)):
        return False
    choices = field.metadata.get("choices")
    low = field.metadata.get("minimum")
    high = field.metadata.get("maximum")
    if choices and value not in choices:
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def non_default_settings(entry: Any, *but: str) -> dict[str, Any]:
    """Return the settings of a technique or a recipe that differ from their defaults, `but` for some."""
    changed = {}
    for field_ in dataclasses.fields(entry):
        value = getattr(entry, field_.name)
        if field_.name not in but and value != field_.default:
            changed[field_.name] = value
    return changed
