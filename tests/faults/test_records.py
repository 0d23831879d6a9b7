"""One odd file among the records never stops what reads them: it is named once, with its reason, and skipped."""

import json
import math
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.__main__ import main
from workbench.advise.compare import compare, comparison_text, list_unranked
from workbench.advise.frame import records, to_csv
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.journal import store
from workbench.journal.record import Record, Status, find_equal, read_all
from workbench.recipe import Recipe
from workbench.techniques import Lora

EACH = dict.fromkeys(map(str, Category), 100)
MEASURED = {
    "model": "gpt2-tiny", "device_kind": "cpu", "device_name": "a processor", "threads": 2, "data_sha256": "a",
    "status": Status.OK, "learning_rate": 1e-3, "steps_done": 2, "tokens_seen": 2048, "parameters": 10,
    "trainable_parameters": 10, "memory_source": "cpu-tracker", "peak_allocated_bytes": 700, "peak_phase": "backward",
    "by_category": EACH, "maximum_by_category": EACH,
    "by_phase": {"forward": 600, "backward": 700}, "losses": [3.0, 2.0], "held_out_loss_before": 3.5,
    "held_out_loss": 2.5, "timed_steps": 1, "step_time_s": 0.5, "tokens_per_s": 2048.0, "text_before": "a",
    "text_after": "b", "warnings": ["warm"], "owner": {"host": "elsewhere", "pid": 12, "start": "1.5"},
    "resumed_at_steps": [1],
}  # fmt: skip


def finished(recipe=None, **changes):
    return replace(Record.start(recipe or Recipe(model="gpt2-tiny")), **{**MEASURED, **changes})


BASE = finished()  # the record beside the odd ones
WHOLE = json.loads(finished(Recipe(model="gpt2-tiny") | Lora()).to_json())


def everything(folder: Path) -> None:
    """What users do with a folder of records. Raises nothing, whatever lies there."""
    from workbench.widgets.train import Train

    store.mark_killed(folder)
    frame = records(folder)
    to_csv(frame, folder / "all.csv")
    frame.to_parquet(folder / "all.parquet")
    assert frame.to_string()
    one = Record.start(Recipe(model="gpt2-tiny"), device_kind="cpu", threads=2, data_sha256="a", model="gpt2-tiny")
    find_equal(one, folder=folder)
    with suppress(ConfigurationError):  # to resume is refused where the recipes differ
        store.resumable(one, folder)
    assert Train(lambda: None, folder, lambda: None).runs.value
    with suppress(ConfigurationError):  # without a baseline
        table = compare(frame)
        assert comparison_text(table)
        assert list(list_unranked(frame)) == ["status", "reason"]


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from([2**31, 2**63, -(2**63), 10**400, 0, -1]),
    st.floats(allow_nan=True, allow_infinity=True), st.text(st.characters(), max_size=5),
    st.sampled_from(["", "ok", "running", "failed", "\ud800", "\x1b[31m", "1e-3", "9999-12-31T23:59:59.999+00:00",
                     "0001-01-01T00:00:00.000+00:00", "2026-W01-1"]),
    st.lists(st.integers(-1, 3), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(-1, 3), max_size=2),
)  # fmt: skip


def places(tree, path=()):
    if path:
        yield path
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*path, key))


@st.composite
def mutated(draw):
    """A valid record with a key dropped, renamed, or of another value, at one or two places."""
    data = json.loads(json.dumps(WHOLE))
    for _ in range(draw(st.integers(1, 2))):
        *way, key = draw(st.sampled_from(list(places(data))))
        inner = data
        for step in way:
            inner = inner[step]
        what = draw(st.sampled_from(["drop", "value", "value", "value", "rename"]))
        value = draw(VALUES) if what == "value" else inner.pop(key)
        if what == "value":
            inner[key] = value
        elif what == "rename" and isinstance(inner, dict):
            inner[draw(st.text(max_size=4))] = value
    return data


numbers = count()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_a_record_changed_anywhere_is_read_and_shown_or_refused(tmp_path, data):
    folder = tmp_path / str(next(numbers))
    BASE.save(folder)
    (folder / "zz.json").write_text(json.dumps(data))
    if len(read_all(folder)) == 2:
        everything(folder)
    assert BASE in read_all(folder)


def changed(*way, to):
    """The whole record with another value at one place."""
    data = json.loads(json.dumps(WHOLE))
    inner = data
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = to
    return json.dumps(data)


def without(*way):
    data = json.loads(json.dumps(WHOLE))
    inner = data
    for key in way[:-1]:
        inner = inner[key]
    del inner[way[-1]]
    return json.dumps(data)


ODD = {  # reason: file
    "Expecting value: line 1 column 1 (char 0)": "",
    "maximum recursion depth exceeded": "[" * 200_000,
    "Expecting ',' delimiter": json.dumps(WHOLE)[:-1],
    "'utf-8' codec can't decode byte 0xff": b'{"id": "\xff"}',
    "'NoneType' object is not iterable": "null",
    "NaN is no number below 2^63": changed("losses", to=[math.nan]),
    "-Infinity is no number below 2^63": changed("held_out_loss", to=-math.inf),
    "9223372036854775808 is no number below 2^63": changed("peak_allocated_bytes", to=2**63),
    "00 is no number below 2^63": changed("recipe", "steps", to=10**400),
    "Out of range float values are not JSON compliant": json.dumps(WHOLE).replace("2048.0", "1e999"),
    "peak_allocated_bytes: Input should be a valid integer": changed("peak_allocated_bytes", to="700"),
    "losses: Input should be a valid array": changed("losses", to="3.0"),
    "losses.1: Input should be a valid number": changed("losses", to=[3.0, None]),
    "longest_first: Input should be a valid boolean": changed("longest_first", to=1),
    "Invalid JSON": changed("label", to="\ud800"),
    "by_category: Input should be an object": changed("by_category", to=[]),
    "its by_category cannot be {'weights': 5,": changed("by_category", "weights", to=5),
    "its by_category cannot be {'gradients': 100,": without("by_category", "weights"),
    "status: Field required": without("status"),
    "status: Input should be 'running', 'ok'": changed("status", to="fine"),
    "its owner cannot be {'pid': 3, 'start': '1.5'}": changed("owner", to={"pid": 3, "start": "1.5"}),
    "its owner cannot be {'host': 'elsewhere', 'pid': -7": changed("owner", "pid", to=-7),
    "owner: Input should be an object": changed("owner", to=[1]),
    "Invalid isoformat string: 'yesterday'": changed("created_at", to="yesterday"),
    "its created_at cannot be '2026-W01-1'": changed("created_at", to="2026-W01-1"),
    "created_at: Input should be a valid string": changed("created_at", to=3),
    "recipe: Input should be an object": changed("recipe", to=[]),
    "recipe: steps must be an integer of at least 1, got '2'). Move it away.": changed("recipe", "steps", to="2"),
    "its recipe cannot be {'model': ": changed("recipe", "techniques", to=None),
    "recipe: corpus must be a text, got 7). Move it away.": changed("recipe", "corpus", to=7),
    "its id cannot be '../../x'": changed("id", to="../../x"),
    "colour: Unexpected keyword argument": changed("colour", to=3),
}


def test_a_record_that_is_none_is_named_once_with_its_reason(runs_folder, capsys, subtests):
    BASE.save(runs_folder)
    for reason, content in ODD.items():
        with subtests.test(reason):
            odd = runs_folder / f"odd{next(numbers)}.json"
            odd.write_bytes(content if isinstance(content, bytes) else content.encode())
            try:
                assert store.mark_killed() == []
                assert list(records()["id"]) == [record.id for record in read_all()] == [BASE.id]
            finally:
                odd.unlink()
            (warning,) = capsys.readouterr().err.splitlines()
            assert warning.startswith(f"warning: records: {odd} is not a record (")
            assert reason in warning
            assert warning.endswith("). Move it away.")


def a_copy(path):
    shutil.copy(BASE.save(path.parent), path)


NO_FILE = "is not a record (it is no file)"
NO_FILES = {
    "folder": (Path.mkdir, NO_FILE),
    "pipe": (os.mkfifo, NO_FILE),
    "dangling link": (lambda path: path.symlink_to("nowhere"), NO_FILE),
    "link to itself": (lambda path: path.symlink_to(path), NO_FILE),
    "endless device": (lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    "copy": (a_copy, f"is a copy of {BASE.id}.json"),
}


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path, capsys, subtests):
    for name, (make, reason) in NO_FILES.items():
        with subtests.test(name):
            folder = tmp_path / name
            BASE.save(folder)
            odd = folder / f"{next(numbers)}.json"
            make(odd)
            assert read_all(folder) == [BASE] == read_all(folder)
            assert capsys.readouterr().err == f"warning: records: {odd} {reason}. Move it away.\n"


def test_a_file_of_somebody_else_is_named(runs_folder, monkeypatch, capsys):
    BASE.save(runs_folder)
    (runs_folder / "0.json").touch()
    read = Path.read_text

    def closed(path, *arguments, **options):
        if path.name == "0.json":
            raise PermissionError(13, "Permission denied")
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", closed)
    assert read_all() == [BASE]
    assert f"some in {runs_folder} are other users', who let nobody read them" in capsys.readouterr().err


def test_a_copy_of_a_record_that_ran_does_not_overwrite_it(runs_folder):
    """It says `running`, of a process that is gone: to mark it as killed would be to lose the finished record."""
    replace(BASE, status=Status.RUNNING, owner={}).save(runs_folder).rename(runs_folder / "0-copy.json")
    BASE.save(runs_folder)
    assert store.mark_killed() == []
    assert read_all() == [BASE]


def test_a_run_and_the_list_of_runs_are_not_stopped(runs_folder, model_name, text_file, capsys):
    from workbench.widgets.train import Train

    BASE.save(runs_folder)
    (runs_folder / "x.json").mkdir()
    quick = ["--corpus", str(text_file), "--steps", "1", "--sequence-length", "16", "--sample-tokens", "0", "--reuse"]
    assert main(["run", model_name, *quick]) == 0
    assert main(["records"]) == 0
    assert main(["compare"]) == 0
    assert capsys.readouterr().err.count("x.json is not a record") == 1
    assert Train(lambda: None, None, lambda: None).runs.value.count("<tr>") == 2


def test_what_is_no_number_is_written_as_missing(tmp_path, subtests):
    for number in (math.nan, math.inf, -math.inf):
        with subtests.test(number=number):
            record = finished(held_out_loss=number, tokens_per_s=number, error="caf\udce9.txt is not there")
            path = record.save(tmp_path)
            read = Record.read(path)
            assert (read.held_out_loss, read.tokens_per_s, read.error) == (None, None, "caf?.txt is not there")
            assert "NaN" not in path.read_text()
