"""The meaning of a text's name: its place, and the kind of its rows.

A name is a path, with options after a colon: `novel.txt`, `old.txt:encoding=latin-1`, `reviews.csv:body` (the column),
`reviews.csv:column=body,encoding=cp1252`. Or it is a data set of the Hugging Face hub: `user/set:test` is a split,
`user/set:train[:10%]` a part of one. A folder that is a clone of a data set has such options too. Every error names the
file, the line or row, and a cure. `files` reads a file; `formats` recognises conversations.
"""

import codecs
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from workbench.base.errors import explain_errors
from workbench.base.hub import ADDRESS, address_of
from workbench.texts import formats
from workbench.texts.chat import ANSWERS, LOSSES
from workbench.texts.download import data_set_files
from workbench.texts.faults import refusal
from workbench.texts.files import FILES, OBJECTS, PLAIN, TABLES, kind_of, notes_on_form, open_file
from workbench.texts.folders import is_data_set, load_data_set
from workbench.texts.formats import Format
from workbench.texts.source import KINDS, SURROGATE, LeftOut, TextSource, split_address, split_name

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
PAIR = ("prompt", "completion")  # two options that only go together
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
        allowed += ["column", "loss", *PAIR]
    if kinds - {*TABLES, HUB}:
        allowed.append("encoding")
    if HUB in kinds:
        allowed += ["split", "config"]
    values: dict[str, Any] = {}
    for option in options[1:].split(",") if options else []:
        key, equals, value = option.partition("=")
        if not equals:
            key = "split" if HUB in kinds else "column"
            value = option
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
    # A packed table is not read, because it would have to be unpacked as a whole.
    if kind_of(path) not in FILES or (path.suffix.lower() == ".gz" and kind_of(path) in TABLES):
        raise refusal(f"{path} ends in {''.join(path.suffixes[-2:])}, which is not read. Give {READ}.")
    if (path / "dataset_dict.json").is_file():
        splits = sorted(split.name for split in path.iterdir() if split.is_dir())
        raise refusal(f"{path} holds the splits {', '.join(splits)}. Give one: {path / splits[-1]}")


# ---- what the rows are ----


def _apply_options(source: TextSource, options: dict[str, Any]) -> TextSource:
    """Apply the options to a text, and choose the kind of its rows.

    If no column is named, it is the first kind in `formats.FORMATS` whose columns are in the first file.
    """
    pair = [options.pop(name) for name in PAIR if name in options]
    is_named = "column" in options
    source = replace(source, **options)
    first = source.first_values()
    form: Format | None = None
    if len(pair) == 1 or (pair and is_named):
        raise refusal(f"{source.name!r}: give both, prompt=COLUMN,completion=COLUMN, or a column alone.")
    if pair:
        form = formats.pair_format(*pair)
    elif not is_named:
        form = _form_of_rows(source, first)
    elif formats.is_chat(first.get(source.column)):
        form = formats.chat_format(source.column)
    if form:
        source = replace(source, form=form, loss=source.loss or ANSWERS)
    elif source.loss:
        raise refusal(f"{source.name!r} has texts, no conversations: of these all counts. Leave loss=… out.")
    return replace(source, remarks=(*source.remarks, *_remarks_on_columns(source, first, is_named)))


def _form_of_rows(source: TextSource, first: dict[str, Any]) -> Format | None:
    """Return the kind of the rows, if they are conversations; None: they are texts.

    Args:
        first: the columns with their first values.

    Raises:
        ConfigurationError: the rows are of a kind that cannot be learned from.
    """
    names = []
    for name, value in first.items():
        # A column may have a name that conversations have, and hold a plain text.
        if name not in formats.CHATS or not isinstance(formats.as_list(value), str):
            names.append(name)
    form = formats.recognise(names)
    if form and form is not formats.TEXT:
        return form
    chats = [name for name in names if formats.is_chat(first[name])]
    if len(chats) == 1 and chats != ["prompt"]:  # a column of prompts has no answers
        return formats.chat_format(chats[0])
    for columns, reason in formats.UNUSABLE.items():
        if set(names).issuperset(columns) and (not form or "text" in columns):
            raise refusal(f"{source.name} has the columns {', '.join(names)[:300]}: {reason}.")
    return None


def _remarks_on_columns(source: TextSource, first: dict[str, Any], is_named: bool) -> list[str]:
    """Return remarks on the columns: the kind that was recognised, and the columns that are not read."""
    form = source.form
    remarks = []
    with suppress(Exception):  # reading the file reports its faults later
        remarks += notes_on_form(source.files()[0], source.encoding)
    if form and form.title:
        remarks.append(form.sentence(first))
    elif form and form.read is formats.chat and form not in formats.FORMATS and not is_named:
        remarks.append(f"the column {form.arguments[0]} is read, which holds messages")
    unread = []
    for name, value in first.items():
        # A label with other values than true and false is not KTO's.
        is_class = name in formats.LABELS and str(value).lower() not in ("true", "false")
        if is_class or name not in source.columns:
            unread.append(name)
    whole = formats.recognise(first.keys() - {"text"})
    if whole and not form:
        remarks.append(f"the column {source.column} alone is read, of rows with {' and '.join(whole.required)}")
    elif unread and (form or {"label", "labels"}.intersection(unread)):
        remarks.append(f"not read: the columns {', '.join(map(repr, unread[:12]))}")
    return remarks
