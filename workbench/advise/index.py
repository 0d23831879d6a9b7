"""The index of a folder of records: the table of its files as they were last read, so that only new ones are read.

It is a Parquet file among the records. Nothing depends on it: without it, or with a damaged one, all records are read.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from workbench.base.errors import UnavailableError
from workbench.base.paths import PACKAGE, part_file, put_in_place
from workbench.journal.record import Record, read_record

NAME = ".index.parquet"
WORTH = 200  # records that are new in a folder, from which on its index is written
STATE = "state_of_file"  # a column beside those of the table: changes whenever the file is written
MADE_BY = b"workbench"  # the entry of the Parquet file that says which code made it
# The files of the package that decide what is in the table.
CODE = ("advise/frame.py", "journal/record.py", "recipe.py", "base/categories.py")


def read_frame(folder: Path, to_frame: Callable[[list[Record]], pd.DataFrame]) -> pd.DataFrame:
    """Return the table that `to_frame` makes of all records in a folder, oldest first."""
    states = _states_of_files(folder)
    indexed = _load(folder / NAME)
    unchanged = indexed[[states.get(name) == state for name, state in indexed[STATE].items()]]
    records = {}
    for name in sorted(states.keys() - set(unchanged.index)):
        record = read_record(folder / name)
        if record is not None:
            records[name] = record
    if not records and len(unchanged):
        return unchanged.drop(columns=STATE).reset_index(drop=True)
    frame = to_frame([*records.values()])
    frame[STATE] = [states[name] for name in records]
    frame.index = pd.Index(records, dtype="string")
    if len(unchanged):
        frame = pd.concat([unchanged, frame]).sort_index()
    if len(records) >= WORTH:
        _save(folder, frame)
    return frame.drop(columns=STATE).reset_index(drop=True)


def _states_of_files(folder: Path) -> Mapping[str, str]:
    """Return what changes of each file of a record whenever it is written: its time, its size and its inode."""
    states = {}
    with suppress(OSError), os.scandir(folder) as entries:  # there is no such folder, or nobody may read it
        for entry in entries:
            if entry.name.endswith(".json"):
                with suppress(OSError):
                    facts = entry.stat()
                    states[entry.name] = f"{facts.st_mtime_ns} {facts.st_size} {facts.st_ino}"
    return states


def _load(path: Path) -> pd.DataFrame:
    """Return the table of an index, each row under the name of its file; an empty one if there is none of this code."""
    with suppress(OSError, ValueError, pa.ArrowException):  # it may be missing, cut off, or another program's
        table = parquet.read_table(path, page_checksum_verification=True)
        if (table.schema.metadata or {}).get(MADE_BY) == _code():
            return table.to_pandas()
    return pd.DataFrame({STATE: []}, dtype="string")


def _save(folder: Path, frame: pd.DataFrame) -> None:
    """Write the index, if the folder can be written to.

    A copy of a record under another name is left out, because whether it counts depends on another file.
    """
    is_itself = frame["id"] + ".json" == frame.index
    table = pa.Table.from_pandas(frame[is_itself])
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), MADE_BY: _code()})
    with suppress(UnavailableError), part_file(folder, "records: the index") as part:
        parquet.write_table(table, part, write_page_checksum=True)
        put_in_place(part, NAME)


def _code() -> bytes:
    """Return a digest of the code that decides what is in the table."""
    digest = hashlib.sha256()
    for name in CODE:
        digest.update((PACKAGE / name).read_bytes())
    return digest.hexdigest().encode()
