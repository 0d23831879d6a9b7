"""The table of foreign programs: its results belong to it, and what is made of a program's end."""

import json
import re
import subprocess
import tomllib
from types import SimpleNamespace

import programs
import pytest

from workbench.base.paths import DATA

TABLE = tomllib.loads((programs.REAL / "programs.toml").read_text(encoding="utf-8"))
RESULTS = json.loads(programs.RESULTS.read_text(encoding="utf-8"))


def test_each_program_has_a_commit_and_a_result_and_none_is_left_over():
    assert list(RESULTS) == list(TABLE)
    for program in TABLE.values():
        assert re.fullmatch(r"[0-9a-f]{40}", program["commit"])
    for row in RESULTS.values():
        assert row["outcome"] in programs.OUTCOMES
        if row["outcome"] == "unchanged":
            assert row["peak_allocated_bytes"] >= row["least_bytes"]
        else:
            assert row["cause"]


def test_the_pages_say_what_the_results_have():
    written = programs.page(TABLE, RESULTS)
    assert programs.RESULTS.with_suffix(".md").read_text(encoding="utf-8") == written
    unchanged = sum(row["outcome"] == "unchanged" for row in RESULTS.values())
    page = (DATA / "reference" / "emulator.md").read_text(encoding="utf-8")
    assert f"{unchanged} of {len(RESULTS)} public programs ran unchanged" in page


def test_a_published_peak_is_equal_if_it_is_so_when_rounded_as_there():
    program = {"published": {"gigabytes": "13.50", "source": "https://example.org"}}
    row = {"outcome": "unchanged", "peak_allocated_bytes": 13_497_533_440}
    assert programs.compare_with_authors(program, row) == "[13.50](https://example.org), equal"
    larger = {**row, "peak_allocated_bytes": 14_462_502_400}
    assert programs.compare_with_authors(program, larger) == "[13.50](https://example.org), here 14.46, +7.1%"
    assert programs.compare_with_authors({}, row) == ""
    assert programs.compare_with_authors(program, {**row, "outcome": "failed"}) == ""


DEVICE = {"peak_allocated_bytes": 1000, "peak_reserved_bytes": 2000}
REPORT = {
    "exit_status": 0,
    "processes": [{"torch": "2.13.0", "devices": [DEVICE]}],
    "peak_reserved_bytes": 2000,
    "lower_bound": [],
    "stuck_at": "line 4",
}


@pytest.mark.parametrize(
    ("changes", "counted", "outcome"),
    [
        ({}, {"steps": 3, "bytes": 900}, "unchanged"),
        ({}, {"steps": 3, "bytes": 1001}, "wrong"),
        ({"exit_status": 1}, {"steps": 3, "bytes": 900}, "failed"),
        ({"exit_status": 124}, {"steps": 3, "bytes": 900}, "unchanged"),
        ({"exit_status": 124}, {"steps": 1, "bytes": 900}, "failed"),
        ({"processes": []}, {"steps": 0, "bytes": 0}, "failed"),
    ],
)
def test_what_became_of_a_program(changes, counted, outcome, tmp_path, monkeypatch):
    def run(command, env, **_):
        (tmp_path / "counted" / "1.json").write_text(json.dumps(counted))
        return SimpleNamespace(returncode=0, stdout=json.dumps(REPORT | changes), stderr="a\nValueError: b\nc")

    monkeypatch.setattr(subprocess, "run", run)
    row = programs.run_program({"command": "python a.py"}, tmp_path, tmp_path / "counted", "python")
    assert row["outcome"] == outcome
    assert "cause" in row or outcome == "unchanged"


def test_a_program_without_its_checkout_or_its_data_is_not_run(tmp_path, monkeypatch):
    program = {"repository": "somebody/something", "commit": "0" * 40, "command": "python a.py", "made": ["mnist"]}
    assert programs.outcome(program, tmp_path, "python")["outcome"] == "not run"
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nOSError: disk\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    row = programs.run_program(program, tmp_path, tmp_path / "counted", "python")
    assert row == {"outcome": "not run", "cause": "its data could not be made: OSError: disk"}
