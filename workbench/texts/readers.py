"""The meaning of a text's name: its place, and the kind of its rows.

A name is a path, with options after a colon: `novel.txt`, `old.txt:encoding=latin-1`, `reviews.csv:text=body` (the
column), `rows.jsonl:prompt=question,completion=answer`. Or it is a dataset of the Hugging Face hub: `user/set:test` is
a split, `user/set:train[:10%]` a part of one. A folder that is a clone of a dataset has such options too. Every error
names the file, the line or row, and a cure. `files` reads a file; `formats` has the contract of the columns.
"""

import codecs
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench.base.errors import explain_errors
from workbench.base.hub import ADDRESS, address_of
from workbench.texts import formats
from workbench.texts.chat import ANSWERS, LOSSES
from workbench.texts.download import data_set_files
from workbench.texts.faults import refusal, refuse_unreadable
from workbench.texts.files import FILES, OBJECTS, PLAIN, TABLES, kind_of, open_file
from workbench.texts.folders import LFS, is_data_set, load_data_set
from workbench.texts.formats import Format
from workbench.texts.source import (
    KINDS,
    SURROGATE,
    LeftOut,
    TextSource,
    missing_column_error,
    split_address,
    split_name,
)

# Other folders import these names from here; some are defined in the files beside this one.
__all__ = [
    "KINDS",
    "OBJECTS",
    "PLAIN",
    "LeftOut",
    "TextSource",
    "kind_of",
    "open_file",
    "refusal",
    "split_name",
]

READ = f"{', '.join(KINDS)}, packed or not (.gz), or a folder"
HUB = "hub"  # the kind of a text that `datasets` loaded; other kinds are the endings of files
# The options that name columns, each by the name that the contract has for it.
COLUMNS = tuple(dict.fromkeys(name for form in formats.FORMATS for name in form.arguments))
HUB_ID = re.compile(r"(?=[^@]{1,96}(@|\Z))[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@.+)?", re.ASCII)


# ---- what a name means ----


def find_text(name: str, alternatives: str) -> TextSource:
    """Find the text that a name means.

    Args:
        alternatives: other texts that could be given, for the message.

    Raises:
        ConfigurationError: there is no such file, its kind is not read, an option or encoding is unknown, a folder is
            empty, the hub has no such data set, or not for this user, or the rows cannot be learned from.
        UnavailableError: the hub cannot be reached, and the data set is not in the cache.
    """
    location, options = split_name(name)
    path = Path(os.path.expanduser(location))
    if not (location and os.path.exists(path)):
        return _find_on_hub(name, alternatives)
    source = TextSource(name, path)
    if source.is_folder and is_data_set(path):
        return _load_split(source, options, partial(load_data_set, path), str(path))
    files = source.files()
    if not files:
        endings = sorted({other.suffix or other.name for other in source.others()})
        content = f"only {', '.join(endings[:5])}" if endings else "it is empty"
        raise refusal(f"the folder {location!r} has no text in it ({content}). Put {', '.join(KINDS)} files there.")
    for file in files:
        _check_kind(file)
    return _apply_options(source, _read_options(name, options, {kind_of(file) for file in files}))


def _find_on_hub(name: str, alternatives: str) -> TextSource:
    """Find a data set of the hub. A name that may be a file's is refused as a file that does not exist."""
    repository, options = split_address(name)
    nothing = f"there is no file {name!r:.200} (looked in {Path.cwd()}), nor an embedded text"
    is_file_name = repository.lower().endswith((*KINDS, ".gz")) and "@" not in repository
    if not ADDRESS.match(repository) and (is_file_name or not HUB_ID.fullmatch(repository)):
        raise refusal(f"{nothing}. {alternatives}")
    with explain_errors(f"corpus: {name!r:.200} is no data set of the hub", "Write owner/name or owner/name@revision."):
        address = address_of(repository, "dataset")
    load = partial(data_set_files, address, nothing)
    return _load_split(TextSource(name, Path()), options, load, address.repository, address.revision)


def _load_split(
    source: TextSource, options: str, load: Callable[..., Any], path: str, revision: str = ""
) -> TextSource:
    """Load a split of a data set of the hub or of a clone, with a remark on the number of rows in other splits.

    Args:
        load: takes a config and a split, and returns the files of the split and the rows of each split.
        path: the argument of `datasets.load_dataset`.
    """
    values = _read_options(source.name, options, {HUB})
    config = values.pop("config", None)
    split = values.pop("split", "train")
    files, counts = load(config, split)
    splits_read = counts if split == "all" else re.findall(r"(?:\A|\+)(\w+)", split)
    others = [f"{name} with {count:,}" for name, count in counts.items() if name not in splits_read]
    if others:
        source = replace(source, remarks=(f"the rows of other splits are left out: {', '.join(others)}",))
    arguments = {"path": path, "name": config, "split": split, "revision": revision}
    source = replace(source, downloaded=files, load_arguments=tuple(arguments.items()))
    return _apply_options(source, values)


def _read_options(name: str, options: str, kinds: set[str]) -> dict[str, Any]:
    """Read the options of a name, and check that the kinds of its files have them."""
    allowed: list[str] = []
    if kinds - {*PLAIN}:
        allowed += [*COLUMNS, "loss"]
    if kinds - {*TABLES, HUB}:
        allowed.append("encoding")
    if HUB in kinds:
        allowed += ["split", "config"]
    values: dict[str, Any] = {}
    for option in options[1:].split(",") if options else []:
        if not option:
            raise refusal(f"{name!r}: there is an empty option. Leave the last colon or comma out.")
        key, equals, value = option.partition("=")
        if not equals and HUB in kinds:
            key = "split"
            value = option
        elif (not equals or key == "column") and "text" in allowed:
            column = value if equals else option
            raise refusal(f"{name!r}: name a column by what it holds, such as text={column or 'COLUMN'}.")
        if key not in allowed:
            raise refusal(
                f"{name!r}: {min(kinds) or 'plain text'} has no {key or 'option without a name'}, "
                f"only {'=…, '.join(allowed)}=… can be given. Leave {option!r} out."
            )
        if key in values or not value:
            raise refusal(f"{name!r}: {key} is {'given twice' if value else 'empty'}. Give one {key}, or none.")
        if key == "loss" and value not in LOSSES:
            raise refusal(f"{name!r}: there is no loss {value!r}. Known: {', '.join(LOSSES)}.")
        values[key] = _canonical_encoding(value) if key == "encoding" else value
    return values


def _canonical_encoding(name: str) -> str:
    """Return the usual name of an encoding. Raises ConfigurationError if there is no such encoding."""
    try:
        "".encode(name)  # refuses a codec that is none of texts, such as base64
        canonical = codecs.lookup(name).name
    except (LookupError, ValueError):
        raise refusal(f"there is no encoding {name!r}. Common ones: utf-8, latin-1, cp1252, shift_jis.") from None
    return "utf-8-sig" if canonical == "utf-8" else canonical


def _check_kind(path: Path) -> None:
    """Refuse a path that is no file of a kind that is read."""
    if SURROGATE.search(str(path)):
        raise refusal(f"the name {str(path)!r} is not UTF-8, so that no record can hold it. Rename it.")
    if not path.is_file() and not path.is_dir():
        what = "not a regular file" if path.exists() else "a link that leads nowhere"
        raise refusal(f"{path} is {what}. Give a file with text in it.")
    if path.is_file():
        try:
            with path.open("rb") as file:
                is_pointer = file.read(len(LFS)) == LFS
        except OSError as error:
            refuse_unreadable(error, path)
        if is_pointer:
            raise refusal(f"{path} is a pointer of Git LFS, without the text itself. Run: git lfs pull")
    # A packed table is not read, because it would have to be unpacked as a whole.
    if kind_of(path) not in FILES or (path.suffix.lower() == ".gz" and kind_of(path) in TABLES):
        raise refusal(f"{path} ends in {''.join(path.suffixes[-2:])}, which is not read. Give {READ}.")
    if (path / "dataset_dict.json").is_file():
        splits = sorted(split.name for split in path.iterdir() if split.is_dir())
        raise refusal(f"{path} holds the splits {', '.join(splits)}. Give one: {path / splits[-1]}")


# ---- what the rows are ----


def _apply_options(source: TextSource, options: dict[str, Any]) -> TextSource:
    """Apply the options to a source, and choose the format of its examples: the one that is named, or the one whose
    columns the first file has.

    Raises ConfigurationError: the options name no format, or the columns fit none or more than one.
    """
    named = {name: options.pop(name) for name in COLUMNS if name in options}
    source = replace(source, **options)
    source.check_begin()
    first = source.first_values()
    if named:
        form = _choose_format(source, named)
        arguments = tuple(named.get(name, "") for name in form.arguments)
        missing = [column for column in named.values() if column not in first]
        if first and missing and not (missing == [named.get("input")] and source.has_column(missing[0])):
            raise missing_column_error(
                replace(source, arguments=arguments), first, f"{source.name} has no column {missing[0]!r}"
            )
    else:
        form = _format_of(source, first)
        arguments = form.arguments
    if form.read is None and source.loss and first:
        raise refusal(f"{source.name!r} has texts, no conversations: of these all counts. Leave loss=… out.")
    loss = (source.loss or ANSWERS) if form.read else ""
    source = replace(source, form=form, arguments=arguments, loss=loss)
    return replace(source, remarks=(*source.remarks, *_remarks_on_columns(source, first)))


def _choose_format(source: TextSource, named: dict[str, str]) -> Format:
    """Return the format that options name. Raises ConfigurationError: they name none, or a part of one."""
    for form in formats.FORMATS:
        if {*form.columns} <= named.keys() <= {*form.arguments}:
            return form
    formats_known = "; ".join(",".join(f"{name}=…" for name in form.columns) for form in formats.FORMATS)
    raise refusal(f"{source.name!r}: {', '.join(named)} is no whole format. Give one of these: {formats_known}.")


def _format_of(source: TextSource, first: dict[str, Any]) -> Format:
    """Return the format of the examples.

    Args:
        first: the columns with their first values.

    Raises:
        ConfigurationError: they are of none, of more than one, or of a kind that is not trained on.
    """
    if not first:
        return formats.TEXT
    for columns, reason in formats.REJECTED.items():
        if {*columns} <= first.keys():
            cure = "Give texts or conversations."
            if "text" in first:
                cure = f"To train on the texts alone, write {source.address('text=text')}"
            raise refusal(f"{source.name} has the columns {', '.join(first)[:300]}: {reason}. {cure}")
    possible = formats.formats_of(first)
    full = [form for form in possible if all(first[name] not in (None, "", []) for name in form.columns)]
    if len(full) > 1:
        addresses = [source.address(form.address(first)) for form in full]
        raise refusal(
            f"{source.name} has the columns {', '.join(first)[:300]}, which can be read in {len(full)} ways. Say "
            f"which: {' or '.join(addresses)}"
        )
    if not possible:
        raise missing_column_error(source, first, f"{source.name} has columns of no format that is read by itself")
    return [*full, *possible][0]


def _remarks_on_columns(source: TextSource, first: dict[str, Any]) -> list[str]:
    """Return a remark on the columns that are not read."""
    unread = [repr(name) for name in first if name not in source.columns]
    if "prompt" in source.form.columns and isinstance(first.get(source.arguments[0]), str) and "tools" in first:
        unread.append("'tools'")  # they belong to messages, and these are texts
    return [f"not read: the columns {', '.join(unread[:12])}"] if unread else []
