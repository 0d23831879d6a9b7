"""Memory snapshots of PyTorch are read from their pickles, which are not executed. The numbers here are made up."""

import json
import os
import pickle

import pytest

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.gpus.emulator.inside._emulated_history import report_growth
from workbench.gpus.snapshot import SnapshotDifference, read_snapshot

MIB = 2**20
TRAIN = {"filename": "/home/me/train.py", "line": 7, "name": "<module>"}
FORWARD = {"filename": "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"}
ADAM = {"filename": "/venv/lib/python3.11/site-packages/torch/optim/adam.py", "line": 5, "name": "_init_group"}


def allocated(address, mib, *frames, time=0):
    return {"action": "alloc", "addr": address, "size": mib * MIB, "frames": list(frames), "time_us": time}


def freed(address, mib, time=0):
    return {"action": "free_completed", "addr": address, "size": mib * MIB, "frames": [], "time_us": time}


def block(address, mib, state="active_allocated", *frames):
    return {"address": address, "size": mib * MIB, "requested_size": mib * MIB, "state": state, "frames": list(frames)}


def segment(*blocks):
    total = sum(entry["size"] for entry in blocks)
    return {"device": 0, "address": blocks[0]["address"], "total_size": total, "blocks": list(blocks)}


def snapshot_of(activation_mib):
    """Weights from before the history, an activation that is freed, gradients, and Adam's states."""
    return {
        "segments": [
            segment(block(0, 4, "active_allocated", TRAIN), block(4 * MIB, 12, "inactive")),
            segment(block(100 * MIB, 2), block(102 * MIB, 2)),
        ],
        "device_traces": [
            [
                allocated(50 * MIB, activation_mib, FORWARD, TRAIN),
                allocated(100 * MIB, 2),
                freed(50 * MIB, activation_mib),
                allocated(102 * MIB, 2, ADAM, TRAIN),
                {"action": "oom", "size": 9 * MIB, "frames": [], "device_free": 0},
            ],
            [],
        ],
    }


@pytest.fixture
def written(tmp_path):
    def write(content, name="step.pickle"):
        path = tmp_path / name
        path.write_bytes(pickle.dumps(content))
        return path

    return write


def test_the_peak_is_told_by_line_and_by_kind_and_what_is_reserved_is_drawn(written):
    (device,) = read_snapshot(written(snapshot_of(8))).devices
    assert device.peak_bytes == 14 * MIB
    assert device.kinds == {"data and others": 4 * MIB, "forward pass": 8 * MIB, "backward pass": 2 * MIB}
    assert device.lines["/home/me/train.py:7 in <module>"] == 12 * MIB
    assert (device.reserved_bytes, device.bytes_in_use, device.largest_free_bytes) == (20 * MIB, 8 * MIB, 12 * MIB)
    text = str(device)
    assert "  refused: 9.0 MiB" in text
    assert f"{'█' * 10}{'░' * 30}  4.0 MiB in use" in text
    assert f"{'█' * 40}  4.0 MiB in use" in text


def test_without_a_history_it_is_what_was_in_use_at_the_end(written):
    content = snapshot_of(8)
    whole = read_snapshot(written({"segments": content["segments"]})).devices[0]
    assert whole.peak_bytes == 8 * MIB
    assert "it has no history: what was in use at the end" in str(whole)
    assert read_snapshot(written(content["segments"])).devices[0].lines == whole.lines


def test_frames_of_cpp_are_nobodys_line_and_weights_without_frames_are_from_before(written):
    engine = {"filename": "??", "line": 0, "name": "torch::autograd::Engine::thread_main(...)"}
    gather = {"filename": "memory_snapshot.cpp", "line": 0, "name": "torch::cuda::gather_with_cpp()"}
    content = {
        "segments": [segment(block(0, 4), block(4 * MIB, 2), block(6 * MIB, 1))],
        "device_traces": [[allocated(4 * MIB, 2, gather, TRAIN), allocated(6 * MIB, 1, gather, engine)]],
    }
    device = read_snapshot(written(content)).devices[0]
    assert device.lines == {
        "before the history begins": 4 * MIB,
        "/home/me/train.py:7 in <module>": 2 * MIB,
        "PyTorch's own threads: the backward pass": MIB,
    }
    assert device.kinds["before the history begins"] == 4 * MIB
    assert device.kinds["backward pass"] == MIB


def test_two_are_compared_line_by_line(written):
    difference = SnapshotDifference(
        read_snapshot(written(snapshot_of(8))), read_snapshot(written(snapshot_of(24), "later.pickle"))
    )
    (change,) = difference.changes()
    assert (change["device"], change["peak_bytes"]) == (0, 16 * MIB)
    assert change["lines"] == {"/home/me/train.py:7 in <module>": 16 * MIB}
    assert change["kinds"] == {"forward pass": 16 * MIB}
    assert "+16.0 MiB  forward pass" in str(difference)
    assert json.loads(json.dumps(difference.to_dict()))["devices"][0]["peak_bytes"] == 16 * MIB


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_execute_something_is_refused(written, tmp_path):
    path = written({"segments": [Attack(tmp_path / "executed")]})
    with pytest.raises(ConfigurationError, match=r"wants to call posix.mkdir.*It was not executed"):
        read_snapshot(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [{}, {"segments": 7}, "text", {"segments": [{"device": 0}]}, None])
def test_what_is_no_snapshot_is_refused_with_how_to_write_one(written, content):
    with pytest.raises(ConfigurationError, match=r"is no memory snapshot \(.*torch.cuda.memory._dump_snapshot"):
        read_snapshot(written(content))


def test_the_command_prints_one_or_compares_two(written, capsys):
    first = written(snapshot_of(8))
    second = written(snapshot_of(24), "later.pickle")
    assert main(["snapshot", str(first), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["refused_bytes"] == [9 * MIB]
    assert main(["snapshot", str(first), str(second)]) == 0
    assert "device 0: peak +16.0 MiB" in capsys.readouterr().out


# ---- growth ----


def steps(bytes_of_step):
    """Each step allocates and frees 8 MiB, and keeps `bytes_of_step(step)` more of line 7."""
    trace = []
    for step in range(8):
        trace += [allocated(9999, 8, FORWARD, TRAIN, time=10 * step), freed(9999, 8, time=10 * step + 5)]
        if bytes_of_step(step):
            trace.append({**allocated(step, 0, TRAIN, time=10 * step + 6), "size": bytes_of_step(step)})
    return trace, [10 * step + 7 for step in range(8)]


def test_what_is_kept_at_every_step_grows():
    grown = report_growth(*steps(lambda step: 3 * MIB))
    assert grown == {
        "steps": 7,
        "bytes_a_step": 3 * MIB,
        "lines": [{"line": "/home/me/train.py:7 in <module>", "bytes_a_step": 3 * MIB}],
    }


@pytest.mark.parametrize("bytes_of_step", [lambda step: 0, lambda step: 512, lambda step: 9 * MIB * (step == 2)])
def test_what_is_freed_or_tiny_or_kept_once_does_not(bytes_of_step):
    assert report_growth(*steps(bytes_of_step)) is None


def test_without_times_or_with_few_steps_nothing_is_said():
    trace, marks = steps(lambda step: 3 * MIB)
    assert report_growth(trace, marks[:3]) is None
    assert report_growth([{key: event[key] for key in event if key != "time_us"} for event in trace], marks) is None
    assert report_growth([], marks) is None
