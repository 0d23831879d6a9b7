"""Published rows: which are run with which PyTorch, what counts as equal, and that the page has the files' counts."""

import json
from types import SimpleNamespace

import against_real
import pytest

from workbench.base.paths import DATA

ROWS = json.loads((against_real.REAL / "public.json").read_text(encoding="utf-8"))["rows"]
EMULATED = json.loads((against_real.REAL / "emulated.json").read_text(encoding="utf-8"))
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
            measured = [row["id"] for row in ROWS if against_real.measured_with(row) == release]
            assert [row["id"] for row in kept["rows"]] == measured


def test_a_python_without_triton_leaves_out_what_is_compiled_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(against_real, "has_triton", lambda python: False)
    monkeypatch.setattr(against_real, "repeated", lambda row, python: {"id": row["id"]})
    monkeypatch.setattr("sys.argv", ["against_real.py", "nanochat"])
    assert against_real.main() == 0
    out = capsys.readouterr().out
    assert "no Triton to compile them with: nanochat-d10-8x2048, nanochat-d20-8x2048" in out
    assert "0 rows, 0 failed" in out


def test_a_row_that_fails_or_is_not_printed_is_told_and_is_no_equal_one(monkeypatch, capsys):
    row = {**ROWS[0], "real_allocated_bytes": 100, "real_reserved_bytes": 200, "rounding": 1}
    python = SimpleNamespace(executable="python")
    answers = {
        '{"allocated": 101, "reserved": 202}': (True, False),
        '{"allocated": 98, "reserved": 200}': (False, True),
    }
    for printed, equal in answers.items():
        done = SimpleNamespace(returncode=0, stdout=f"words\n{printed}\n", stderr="")
        monkeypatch.setattr(against_real, "ran", lambda *_, done=done: done)
        found = against_real.repeated(row, python)
        assert (found["allocated_equal"], found["reserved_equal"]) == equal
    for done in (
        SimpleNamespace(returncode=1, stdout="", stderr="RuntimeError: no\n"),
        SimpleNamespace(returncode=0, stdout="nothing\n", stderr=""),
    ):
        monkeypatch.setattr(against_real, "ran", lambda *_, done=done: done)
        assert "failed" in against_real.repeated(row, python)
    assert against_real.summary([{"id": "a", "failed": "x"}]) == {"rows": 1, "failed": 1}
    assert "failed: RuntimeError: no" in capsys.readouterr().out
