"""Published rows: which are run with which PyTorch, what counts as equal, and that the page has the files' counts."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import against_real
import pytest

from workbench.base.paths import DATA

ROWS = json.loads((against_real.REAL / "public.json").read_text(encoding="utf-8"))["rows"]
EMULATED = json.loads((against_real.REAL / "emulated.json").read_text(encoding="utf-8"))
_layout_file = spec_from_file_location("layout", against_real.SCRIPTS / "layout.py")
layout = module_from_spec(_layout_file)  # beside the scripts, which find it there
_layout_file.loader.exec_module(layout)
PAGE = (DATA / "reference" / "emulator.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("release", EMULATED)
def test_what_was_kept_of_a_release_follows_from_its_rows_and_stands_on_the_page(release):
    kept = EMULATED[release]
    assert kept["summary"] == against_real.summary(kept["rows"])
    assert kept["summary"]["failed"] == 0
    by_id = {row["id"]: row for row in ROWS}
    for row in kept["rows"]:
        for kind in ("allocated", "reserved"):
            real = by_id[row["id"]][f"real_{kind}_bytes"]
            assert row.get(f"real_{kind}_bytes") == real
            if real is not None:
                is_near = abs(row[f"emulated_{kind}_bytes"] - real) <= by_id[row["id"]]["rounding"]
                assert row[f"{kind}_equal"] is is_near
        snapshot = against_real.snapshots().get(row["id"])
        if snapshot:
            assert by_id[row["id"]]["real_reserved_bytes"] == snapshot["reserved"]
            assert row["real_segments"] == sum(snapshot["segments"].values())
            assert row["real_requests"] == snapshot["requests"]
    summary = kept["summary"]
    equal = [
        f"{summary[f'{kind}_equal']} of {summary[f'{kind}_rows']}" if f"{kind}_rows" in summary else ""
        for kind in ("allocated", "reserved")
    ]
    assert f"| {release} | {summary['rows']} | {equal[0]} | {equal[1]} |" in PAGE


def test_our_own_pytorch_has_run_all_that_are_not_compiled_and_another_those_that_were_measured_with_it():
    uncompiled = [row["id"] for row in ROWS if not row.get("compiled")]
    whole = [kept for kept in EMULATED.values() if [row["id"] for row in kept["rows"]] == uncompiled]
    assert len(whole) == 1
    for release, kept in EMULATED.items():
        if kept is not whole[0]:
            measured = [row["id"] for row in ROWS if against_real.release_of(row) == release]
            assert [row["id"] for row in kept["rows"]] == measured


def test_a_python_without_triton_leaves_out_what_is_compiled_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(against_real, "has_triton", lambda python: False)
    monkeypatch.setattr(against_real, "repeat", lambda row, python: {"id": row["id"]})
    monkeypatch.setattr("sys.argv", ["against_real.py", "nanochat"])
    assert against_real.main() == 0
    out = capsys.readouterr().out
    assert "no Triton to compile them with: nanochat-d10-8x2048, nanochat-d20-8x2048" in out
    assert "0 rows, 0 failed" in out


def test_a_snapshot_is_equal_block_by_block_and_request_by_request(monkeypatch):
    real = {"segments": {"8: +4 -4": 2, "8: +8": 1}, "requests": 7, "digest": "ab"}
    monkeypatch.setattr(against_real, "snapshots", lambda: {"whole": real})
    row = {"id": "whole", "gpu": "t4"}
    found = against_real.compare_counts(row, real)
    assert (found["same_segments"], found["segments_equal"], found["requests_equal"]) == (3, True, True)
    moved = {"segments": {"8: +4 -4": 1, "8: -4 +4": 1, "8: +8": 1}, "requests": 7, "digest": "cd"}
    found = against_real.compare_counts(row, moved)
    assert (found["real_segments"], found["emulated_segments"], found["same_segments"]) == (3, 3, 2)
    assert not found["segments_equal"]
    assert not found["requests_equal"]
    row = {"id": "told in numbers", "gpu": "t4", "real_segments": 3, "real_requests": 8}
    found = against_real.compare_counts(row, {"segments": 3, "requests": 7})
    assert (found["segments_equal"], found["requests_equal"]) == (True, False)
    assert against_real.compare_counts({"id": "told in bytes", "gpu": "t4"}, {"allocated": 1}) == {}


def test_a_few_rows_are_kept_among_those_of_the_same_versions_in_the_order_of_the_rows(monkeypatch, tmp_path):
    rows = [{"id": name} for name in ("first", "second", "third")]
    versions = {"torch": "2.11.0", "transformers": "5.23.0"}
    before = {"versions": versions, "summary": {}, "rows": [{"id": "third"}, {"id": "gone"}]}
    (tmp_path / "emulated.json").write_text(json.dumps({"2.11.0": before}), encoding="utf-8")
    monkeypatch.setattr(against_real, "REAL", tmp_path)
    printed = SimpleNamespace(stdout="2.11.0 5.23.0")
    monkeypatch.setattr(against_real.subprocess, "run", lambda *_, **__: printed)
    python = SimpleNamespace(executable="python", torch_release="2.11.0")
    against_real.keep([{"id": "second"}], rows, python)
    kept = json.loads((tmp_path / "emulated.json").read_text(encoding="utf-8"))["2.11.0"]
    assert [row["id"] for row in kept["rows"]] == ["second", "third"]
    assert kept["summary"]["rows"] == 2
    printed.stdout = "2.11.0 5.24.0"
    against_real.keep([{"id": "first"}], rows, python)
    kept = json.loads((tmp_path / "emulated.json").read_text(encoding="utf-8"))["2.11.0"]
    assert [row["id"] for row in kept["rows"]] == ["first"]


def test_the_layout_of_a_snapshot_has_no_addresses_and_the_order_of_its_requests(tmp_path):
    blocks = [{"size": 512, "state": "active_allocated"}, {"size": 1536, "state": "inactive"}]
    events = [
        {"action": "alloc", "size": 500, "addr": 7},
        {"action": "free_requested", "size": 500},
        {"action": "free_completed", "size": 500},
    ]
    here = {"segments": [{"address": 1, "total_size": 2048, "blocks": blocks}] * 2, "device_traces": [events]}
    told = layout.layout(here)
    assert told["segments"] == {"2048: +512 -1536": 2}
    assert told["requests"] == 2
    assert layout.bytes_of_segments(here) == 4096
    later = {**here, "device_traces": [events[::-1]]}
    assert layout.layout(later)["digest"] != told["digest"]


def test_a_row_that_fails_or_is_not_printed_is_told_and_is_no_equal_one(monkeypatch, capsys):
    row = {**ROWS[0], "real_allocated_bytes": 100, "real_reserved_bytes": 200, "rounding": 1}
    python = SimpleNamespace(executable="python")
    answers = {
        '{"allocated": 101, "reserved": 202}': (True, False),
        '{"allocated": 98, "reserved": 200}': (False, True),
    }
    for printed, equal in answers.items():
        done = SimpleNamespace(returncode=0, stdout=f"words\n{printed}\n", stderr="")
        monkeypatch.setattr(against_real, "run_script", lambda *_, done=done: done)
        found = against_real.repeat(row, python)
        assert (found["allocated_equal"], found["reserved_equal"]) == equal
    for done in (
        SimpleNamespace(returncode=1, stdout="", stderr="RuntimeError: no\n"),
        SimpleNamespace(returncode=0, stdout="nothing\n", stderr=""),
    ):
        monkeypatch.setattr(against_real, "run_script", lambda *_, done=done: done)
        assert "failed" in against_real.repeat(row, python)
    assert against_real.summary([{"id": "a", "failed": "x"}]) == {"rows": 1, "failed": 1}
    assert "failed: RuntimeError: no" in capsys.readouterr().out
