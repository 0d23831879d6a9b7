"""Records: one JSON file per run, written aside and renamed."""

import dataclasses
import json
import os
import re
import secrets
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Self

from workbench.base.categories import format_bytes
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, in_a_line
from workbench.base.paths import git_commit, is_valid_name, path_inside, runs_folder, versions, write_whole
from workbench.base.result import Result
from workbench.base.settings import type_adapter
from workbench.recipe import Recipe

# One more whenever a field changes its name or its meaning; `_migrate` then knows the older form.
SCHEMA_VERSION = 3
WORLD = ("world_size", "device_kind", "device_name", "threads", "shard")
DECIDING = ("recipe_id", "data_sha256", "memory_cap_bytes", "longest_first", "versions", "git_commit", *WORLD)
OWNER = {"host": str, "pid": int, "start": str}
# The start of a process: on Linux the boot of the system and the ticks since then; elsewhere, and before schema 3, a
# time in seconds.
START = re.compile(r"[0-9a-f-]{36} \d{1,18}|\d{1,18}(\.\d{1,18})?")


def name_in_file(field_name: str) -> str:
    """Return the name that a field of a record has in its file."""
    if field_name == "recipe_settings":
        return "recipe"
    return field_name


class Status(StrEnum):
    """The way in which a run ended. Only `ok` runs are ever ranked."""

    RUNNING = "running"
    OK = "ok"
    DIVERGED = "diverged"
    OOM = "oom"
    INTERRUPTED = "interrupted"
    KILLED = "killed"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True)
class Record(Result):
    """The record of a run: what was asked for (`recipe`), what really happened, and what was measured.

    Units are in the names. Fields are None, or empty, where a run did not get that far. `by_category` is read at the
    instant of the peak and sums to `peak_allocated_bytes`; `maximum_by_category` is each category's own maximum,
    whenever that was, except `unattributed`: that is always the part of the peak which the tracker did not see.
    """

    __pydantic_config__: ClassVar = {
        "strict": True,
        "extra": "forbid",
        "allow_inf_nan": False,
        "alias_generator": name_in_file,
    }

    id: str
    created_at: str
    status: Status
    recipe_settings: dict[str, Any]  # `recipe` in the file
    recipe_id: str
    label: str
    schema_version: int = SCHEMA_VERSION
    # the world it ran in
    rank: int = 0
    world_size: int = 1
    device_kind: str = ""  # cuda, cpu or mps
    device_name: str = ""
    threads: int | None = None  # PyTorch's, on a CPU
    shard: str = ""  # the part of the model that each of several ranks keeps
    # the training that really happened
    model: str = ""
    dtype: str = ""
    learning_rate: float | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    steps_done: int = 0
    tokens_seen: int = 0  # without padding
    padding_tokens: int | None = 0  # None where it was not counted
    skipped_steps: int = 0  # loss scaling skips a step after an overflow in fp16
    parameters: int | None = None
    trainable_parameters: int | None = None
    memory_cap_bytes: int | None = None
    device_bytes: int | None = None  # a GPU's whole memory
    longest_first: bool = False  # the order of the examples was changed for that
    data_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str = ""
    error: str = ""
    warnings: list[str] = field(default_factory=list)  # things that went wrong without spoiling the figures
    owner: dict[str, Any] = field(default_factory=dict)  # host, process and its start, while and after it ran
    resumed_at_steps: list[int] = field(default_factory=list)
    # memory
    memory_source: str = ""
    before_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_phase: str = ""
    by_category: dict[str, int] = field(default_factory=dict)
    maximum_by_category: dict[str, int] = field(default_factory=dict)
    by_phase: dict[str, int] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)  # the peak of each of several, and its parts
    # out of memory: the operation that failed, if it was tracked; its request; what was in use before it
    failed_operation: str = ""
    requested_bytes: int | None = None
    allocated_at_failure_bytes: int | None = None
    reserved_at_failure_bytes: int | None = None
    # memory outside of the device, which a technique uses on purpose; None where nothing was moved
    peak_host_bytes: int | None = None
    peak_disk_bytes: int | None = None
    moved_bytes: int | None = None  # there and back, over the whole run
    # loss
    losses: list[float] = field(default_factory=list)
    held_out_loss_before: float | None = None
    held_out_loss: float | None = None
    rates_tried: dict[str, float | None] = field(default_factory=dict)  # held-out loss by rate, if this was searched
    # speed, warm-up steps left out
    timed_steps: int = 0
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    step_processor_s: float | None = None  # processor time of this process, of all its threads
    contended_share: float | None = None  # share of the processors' time that others took while none was idle
    # text and model
    text_before: str = ""
    text_after: str = ""
    model_path: str = ""

    @classmethod
    def start(cls, recipe: Recipe, **facts: Any) -> Self:
        """Return a `running` record for a run that begins now."""
        now = datetime.now(UTC)
        unique = f"{now:%Y%m%dT%H%M%S%f}-{secrets.token_hex(2)}-{recipe.id}"  # several processes, one instant
        return cls(
            id=unique,
            created_at=now.isoformat(timespec="milliseconds"),
            status=Status.RUNNING,
            recipe_settings=recipe.to_dict(),
            recipe_id=recipe.id,
            label=recipe.label,
            versions=versions(),
            git_commit=git_commit(),
            **facts,
        )

    @property
    def recipe(self) -> Recipe:
        """The recipe that was asked for. Raises ConfigurationError: it has a technique or a setting that this workbench
        does not know."""
        return Recipe.from_dict(self.recipe_settings)

    def path(self, folder: Path | None = None) -> Path:
        """Return the path of the record's file. Raises ConfigurationError for an id that cannot be a file's name."""
        return path_inside(folder or runs_folder(), f"{self.id}.json")

    def save(self, folder: Path | None = None) -> Path:
        """Write `<id>.json` and return its path. It is written whole or not at all, whatever happens meanwhile."""
        return write_whole(self.path(folder), self.to_json())

    def to_json(self) -> str:
        """Return strict JSON: a number that is not finite becomes null, and what is no Unicode in a text becomes
        `?`."""
        values = {}
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and not isfinite(value):
                value = None
            values[name_in_file(name)] = value
        return json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace").decode()

    def to_dict(self) -> dict[str, Any]:
        """Return what the record's file holds, JSON-ready."""
        return dict(json.loads(self.to_json()))

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read the record in a file. One of an older schema is brought into today's form.

        Raises:
            ConfigurationError: the file is not a whole record, or a newer workbench wrote it.
            PermissionError: it is another user's, who lets nobody read it.
        """
        try:
            if not path.is_file():
                raise ValueError("it is no file")  # opening a pipe would wait for somebody to write into it
            data = dict(json.loads(path.read_text(encoding="utf-8"), parse_int=_integer, parse_constant=_integer))
            schema = data.setdefault("schema_version", 1)
            if type(schema) is not int or schema < 1:
                raise ValueError(f"its schema_version is {schema!r:.90}")
            if schema <= SCHEMA_VERSION:
                return _check_types(_migrate(data))
        except PermissionError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"records: {path} is not a record ({in_a_line(error)}). Move it away.") from None
        raise ConfigurationError(
            f"records: {path} was written by a newer workbench (schema {schema}; this one reads up "
            f"to {SCHEMA_VERSION}). Update the workbench."
        )

    @property
    def device(self) -> str:
        """The device in words, for tables and messages."""
        return str(Device(self.device_kind, self.device_name, threads=self.threads))

    def __str__(self) -> str:
        """Peak, loss and speed, and where record and model are. A figure that the run did not get to has no line."""
        lines = [f"{self.label} on {self.model}, {self.device}: {self.status} {self.error}".rstrip()]
        if self.peak_allocated_bytes is not None:
            sizes = []
            for name, size in self.by_category.items():
                if size:
                    sizes.append(f"{name.replace('_', ' ')} {format_bytes(size)}")
            phase = self.peak_phase.replace("_", " ")
            peak = format_bytes(self.peak_allocated_bytes)
            lines.append(f"  peak    {peak} in the {phase} ({self.memory_source}): {', '.join(sizes)}")
        losses: list[Any] = self.losses or [None]
        in_training = f"{_in_digits(losses[0])} → {_in_digits(losses[-1])} in training"
        held_out = f"{_in_digits(self.held_out_loss_before)} → {_in_digits(self.held_out_loss)}"
        lines.append(f"  loss    {in_training}; held out {held_out}")
        if self.ranks:
            lines.append(f"  ranks   {_ranks_text(self)}")
        speed = "not timed"
        if self.timed_steps:
            speed = f"{self.tokens_per_s:,.0f} tokens/s over {self.timed_steps} steps"
        if self.parameters is not None:
            speed += f"; {self.trainable_parameters:,} of {self.parameters:,} parameters trained"
        lines += [f"  speed   {speed}", f"  record  {self.path()}"]
        if self.model_path:
            lines.append(f"  model   {self.model_path}")
        lines += [f"  warning {warning}" for warning in self.warnings]
        if self.text_after:
            lines += [f"\nbefore: {self.text_before}", f"\nafter:  {self.text_after}"]
        return "\n".join(lines)


def _migrate(data: dict[str, Any]) -> dict[str, Any]:
    """Bring a record's data into today's form.

    Schema 1 knew one process only and had the device in one text, `AMD EPYC (cpu, 2 threads)`. This is the one place
    where such a text is taken apart. Its optimizer offloading had two backends; PyTorch's is left. Schema 2 had the
    time at which the owner began as a number.
    """
    owner = data.get("owner")
    if data["schema_version"] < 3 and isinstance(owner, dict) and type(owner.get("began")) is float:
        owner["start"] = f"{owner.pop('began'):.6f}"
    if data["schema_version"] == 1:
        data["device_name"] = data.pop("device", "")
        match = re.fullmatch(r"(.*) \((\w+)(?:, (\d{1,9}) threads)?\)", data["device_name"])
        if match:
            data["device_name"] = match[1]
            data["device_kind"] = match[2]
            data["threads"] = int(match[3]) if match[3] else None
        offloading = data["recipe"].get("techniques", {}).get("optimizer_offloading", {})
        if offloading.get("backend") == "pytorch":
            del offloading["backend"]
    data["schema_version"] = SCHEMA_VERSION
    return data


def _integer(text: str) -> int:
    """Read an integer. Raises ValueError for one that a column of a table cannot hold, and for NaN and Infinity."""
    if not text[-1].isdigit() or abs(int(text)) >= 2**63:
        raise ValueError(f"{text:.30} is no number below 2^63")
    return int(text)


def _check_types(data: dict[str, Any]) -> Record:
    """Make the record of its data. Raises ValueError for a field that is missing, unknown, not of its type, or of no
    use to a table."""
    record: Record = type_adapter(Record).validate_json(json.dumps(data, allow_nan=False))
    settings = record.recipe_settings
    # Not the techniques: a user may have some that are not registered here.
    _check_settings(json.dumps({**settings, "techniques": {}}))
    owner = record.owner
    owner_types = {name: type(value) for name, value in owner.items()}
    created_at = datetime.fromisoformat(record.created_at).replace(tzinfo=UTC).isoformat(timespec="milliseconds")
    is_good = {
        "id": is_valid_name(record.id),  # folders are named by it
        "created_at": record.created_at == created_at,
        "recipe_settings": isinstance(settings.get("techniques"), dict),
        "owner": owner_types in ({}, OWNER) and owner.get("pid", 1) > 0 and START.fullmatch(owner.get("start", "0")),
        "by_category": sum(record.by_category.values()) == (record.peak_allocated_bytes or 0),
    }
    for name, good in is_good.items():
        if not good:
            raise ValueError(f"its {name_in_file(name)} cannot be {getattr(record, name)!r:.90}")
    return record


@lru_cache(maxsize=1024)
def _check_settings(text: str) -> None:
    """Raise ValueError for settings, in JSON, of which no recipe can be made. Many records have the same ones."""
    Recipe.from_dict(json.loads(text))


@cache
def warn_once(message: str) -> None:
    """Print a warning on standard error, once in a process, however often a folder is read."""
    print(f"warning: {message}", file=sys.stderr)


def read_all(folder: Path | None = None, newest: int | None = None, containing: str = "") -> list[Record]:
    """Read the records of a folder, oldest first. A file that is not a record is named on standard error and skipped.

    Args:
        newest: at most so many, from the newest; no other files are opened. None: all.
        containing: only files in which this pattern matches; a search is much faster than reading a record.
    """
    folder = folder or runs_folder()
    names: list[str] = []
    with suppress(OSError):  # there is no such folder, or nobody may read it
        names = sorted(os.listdir(folder), reverse=True)
    pattern = re.compile(containing.encode())
    records: list[Record] = []
    for name in names:
        if len(records) == newest:
            break
        path = folder / name
        if path.suffix != ".json":
            continue
        record = read_record(path, pattern)
        if record is not None:
            records.append(record)
    return records[::-1]


ANYTHING = re.compile(b"")


def read_record(path: Path, pattern: re.Pattern[bytes] = ANYTHING) -> Record | None:
    """Return the record in a file. None, with a line on standard error, if it is not a record; None without one if the
    pattern is not in the file."""
    try:
        if pattern.pattern and not (path.is_file() and pattern.search(path.read_bytes())):
            return None
        record = Record.read(path)
        # A copy of a record may have an earlier status.
        if record.id != path.stem and record.path(path.parent).exists():
            raise ConfigurationError(f"records: {path} is a copy of {record.id}.json. Move it away.")
        return record
    except PermissionError:
        warn_once(f"records: some in {path.parent} are other users', who let nobody read them. They are left out.")
    except (ConfigurationError, OSError) as error:
        warn_once(str(error))
    return None


def find_equal(record: Record, *, sampled: bool = False, folder: Path | None = None) -> Record | None:
    """Return the newest `ok` record that this run would repeat: all that decides a result is equal.

    None if there is none, and for a model in a folder of the user's, whose weights may have changed since.

    Args:
        sampled: whether it must have sample texts.
    """
    if os.path.isdir(record.model):
        return None
    for other in reversed(read_all(folder, containing=record.recipe_id)):
        equal = all(getattr(other, name) == getattr(record, name) for name in DECIDING)
        if other.status is Status.OK and equal and (other.text_after or not sampled):
            return other
    return None


# ---- parts of a record's text ----


def _in_digits(loss: float | None) -> str:
    if loss is None:
        return "none"
    return f"{loss:.3f}"


def _ranks_text(record: Record) -> str:
    """Describe the peaks of several ranks: that of each, where they are equal; or the highest and the lowest, and which
    category makes most of the difference."""
    ordered = sorted(record.ranks, key=lambda facts: facts["peak_allocated_bytes"])
    low = ordered[0]
    high = ordered[-1]
    more = high["peak_allocated_bytes"] - low["peak_allocated_bytes"]
    head = f"{record.world_size}, shard {record.shard}: {format_bytes(high['peak_allocated_bytes'])}"
    if not more:
        return f"{head} on each"
    parts = {name: size - low["by_category"].get(name, 0) for name, size in high["by_category"].items()}
    most = max(parts, key=parts.__getitem__)
    return (
        f"{head} on rank {high['rank']}, {format_bytes(more)} more than on rank {low['rank']}; "
        f"most of that is {most.replace('_', ' ')}"
    )
