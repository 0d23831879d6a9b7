"""Files of a crash, on the command line: logs, notebooks, memory snapshots."""

import io
import json
import pickle
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.__main__ import main

MIB, GIB = 2**20, 2**30
MESSAGES = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))
GAPS = MESSAGES["kohya 2029"]["text"]
TRAIN = {"filename": "/home/me/train.py", "line": 7, "name": "<module>"}
ADAM = {"filename": "/venv/torch/optim/adam.py", "line": 5, "name": "_init_group"}


def test_a_log_is_read_whatever_its_encoding(tmp_path, capsys):
    log = tmp_path / "crash.log"
    for content in (GAPS.encode() + b"\xff", GAPS.encode("utf-16")):  # the second as PowerShell writes it
        log.write_bytes(content)
        assert main(["doctor", str(log)]) == 0
        printed = capsys.readouterr().out
        assert "gaps (reserved by PyTorch, unallocated)" in printed
        assert "\nCause\n  fragmentation\n" in printed
        assert "Lesson: 15_out_of_memory" in printed


def test_standard_input_is_read(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(MESSAGES["therock 2118"]["text"].encode())))
    assert main(["doctor", "-", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["allowed_bytes"] == int(1.05 * GIB)
    assert [cause["name"] for cause in data["causes"]] == ["a cap"]


def test_of_a_notebook_the_failed_cell_is_read(tmp_path, capsys):
    traceback = MESSAGES["transformers 26702"]["text"].replace("OutOfMemoryError", "\x1b[0;31mOutOfMemoryError\x1b[0m")
    error = {"output_type": "error", "traceback": traceback.splitlines()}
    printed = {"output_type": "stream", "text": ["step 1\n"]}
    cells = [{"cell_type": "markdown"}, {"cell_type": "code", "outputs": [printed, error]}]
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert main(["doctor", str(path)]) == 0
    assert "predictions kept by the evaluation" in capsys.readouterr().out


def snapshot_of(*blocks):
    """Blocks are (MiB, state, frames); the last of the history was refused 9 MiB."""
    made = []
    trace = []
    address = 0
    for mib, state, frames in blocks:
        made.append({"address": address, "size": mib * MIB, "requested_size": mib * MIB, "state": state})
        if frames:
            event = {"action": "alloc", "addr": address, "size": mib * MIB, "frames": frames, "time_us": 0}
            trace.append(event)
        address += mib * MIB
    trace.append({"action": "oom", "size": 9 * MIB, "frames": [], "device_free": 0})
    segment = {"device": 0, "address": 0, "total_size": address, "blocks": made}
    return {"segments": [segment], "device_traces": [trace]}


def test_a_snapshot_tells_what_a_message_cannot(tmp_path, capsys):
    path = tmp_path / "oom.pickle"
    blocks = [
        (4, "active_allocated", None),
        (6, "inactive", None),
        (8, "active_allocated", [ADAM, TRAIN]),
        (6, "inactive", None),
    ]
    path.write_bytes(pickle.dumps(snapshot_of(*blocks)))
    assert main(["doctor", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    causes = {cause["name"]: cause for cause in data["causes"]}
    assert [*causes] == ["fragmentation", "something left from before", "too much"]
    assert causes["fragmentation"]["because"].startswith("9.0 MiB were refused. At the end 12.0 MiB are reserved")
    assert causes["something left from before"]["because"].startswith("4.0 MiB of the 12.0 MiB at the peak")
    assert "The largest part of the peak is optimizer: 8.0 MiB of 12.0 MiB" in causes["too much"]["because"]
    assert "Optimizer offloading" in causes["too much"]["cure"]
    assert main(["doctor", str(path)]) == 0
    assert "by the innermost line of the program" in capsys.readouterr().out


def test_a_snapshot_without_history_blames_nobody(tmp_path, capsys):
    path = tmp_path / "later.pickle"
    path.write_bytes(pickle.dumps({"segments": snapshot_of((4, "active_allocated", None))["segments"]}))
    assert main(["doctor", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["causes"] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"nothing", "message: there is no out-of-memory message"),
        (pickle.dumps(print), "wants to call builtins.print"),
        (pickle.dumps({"weights": 1}), "is no memory snapshot"),
        (b"{}", "message: there is no out-of-memory message"),
    ],
)
def test_what_a_file_lacks_is_said(tmp_path, capsys, content, words):
    path = tmp_path / "crash"
    path.write_bytes(content)
    assert main(["doctor", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_snapshot_has_to_be_a_file(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps({}))))
    assert main(["doctor", "-"]) == 2
    assert "Give its name in place of -" in capsys.readouterr().err
