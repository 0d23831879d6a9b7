"""The options of `commands.toml` as argparse's: what their `type` reads, and how one is added to a parser."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.base.categories import ungrouped


def _at_least(least: int, number: type = int) -> Callable[[str], Any]:
    """A reader of texts that are a number of at least this."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            value = number(ungrouped(text))
            if value >= least:
                return value
        raise argparse.ArgumentTypeError(f"{text!r:.90} is not a number of at least {least}.")

    return read


def _share(text: str) -> float:
    """`all`, `none`, or a number between them."""
    with suppress(ValueError):
        share = float({"all": "1", "none": "0"}.get(text, text))
        if 0 <= share <= 1:
            return share
    raise argparse.ArgumentTypeError(f"{text!r:.90} is not all, none or a share between 0 and 1.")


TYPES: dict[str, Callable[[str], Any]] = {
    "count": _at_least(1),
    "number": _at_least(0),
    "seconds": _at_least(0, float),
    "path": Path,
    "share": _share,
}


def add_option(parser: argparse.ArgumentParser, option: str, **fields: Any) -> None:
    """Add one; its fields are those of `add_argument`, the type by its name in `TYPES`."""
    if "type" in fields:
        fields["type"] = TYPES[fields["type"]]
    if isinstance(fields.get("metavar"), list):
        fields["metavar"] = tuple(fields["metavar"])
    parser.add_argument(*option.split(), **fields)
