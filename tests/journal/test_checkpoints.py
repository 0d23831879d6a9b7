import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.journal import checkpoints
from workbench.journal.record import warn_once

SEEN = {"tokens_seen": 7, "padding_tokens": 0}
CONTENTS = dict.fromkeys(("model.safetensors", "training_args.bin", *checkpoints.NEEDED), b"x" * 100)


@pytest.fixture
def make(tmp_path):
    """Writes the checkpoint of a step into a folder."""

    def write(step, folder=tmp_path, **files):
        aside = folder / ".aside" / f"checkpoint-{step}"
        aside.mkdir(parents=True)
        for name, data in {**CONTENTS, **files}.items():
            (aside / name).write_bytes(data)
        final = folder / f"checkpoint-{step}"
        checkpoints.commit(aside, final, {**SEEN, "tokens_seen": step})
        return final

    return write


def manifest_of(checkpoint):
    return json.loads((checkpoint / checkpoints.MANIFEST).read_text())


def write_manifest(checkpoint, manifest):
    (checkpoint / checkpoints.MANIFEST).write_text(json.dumps(manifest))


def passed_over(folder, damaged, whole, capsys):
    """The warning, one line of it, told once."""
    warn_once.cache_clear()
    assert checkpoints.newest_checkpoint(folder) == whole
    assert checkpoints.newest_checkpoint(folder) == whole
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: resume: ")
    assert f" in {damaged} cannot be used (" in line
    assert line.endswith("Remove the folder of this checkpoint; the one before it will do. It is passed over.")
    return line


def test_the_newest_is_that_of_the_highest_step(make, tmp_path, capsys):
    assert checkpoints.newest_checkpoint(tmp_path) is None
    nine, ten = make(9), make(10)
    assert checkpoints.newest_checkpoint(tmp_path) == ten
    assert checkpoints.read_counters(ten) == {"tokens_seen": 10, "padding_tokens": 0}
    assert nine.exists()
    assert capsys.readouterr().err == ""


def test_only_the_newest_two_are_kept(make, tmp_path):
    for step in (1, 2, 3, 10):
        make(step)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-3"]


def test_the_same_step_again_replaces_it(make):
    make(4)
    assert (make(4, **{"model.safetensors": b"new"}) / "model.safetensors").read_bytes() == b"new"


DAMAGED = ("model.safetensors", "training_args.bin", "trainer_state.json", checkpoints.MANIFEST)
DAMAGES = {
    "missing": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    "other content": lambda path: path.write_text("y" * 100),
}


def test_a_damaged_one_is_passed_over_and_named(make, tmp_path, capsys, subtests):
    for name, damage in itertools.product(DAMAGED, DAMAGES):
        with subtests.test(name=name, damage=damage):
            folder = tmp_path / damage / name
            whole, damaged = make(1, folder), make(2, folder)
            DAMAGES[damage](damaged / name)
            assert name in passed_over(folder, damaged, whole, capsys)


def test_what_is_no_checkpoint_is_not_looked_at(make, tmp_path):
    (tmp_path / "checkpoint-final").mkdir()
    (tmp_path / "checkpoint-²").mkdir()
    (tmp_path / "checkpoint-99").mkdir()  # without a manifest: the Trainer was killed while it wrote
    (tmp_path / "checkpoint-98").write_text("a file")
    assert checkpoints.newest_checkpoint(tmp_path) is None
    assert checkpoints.newest_checkpoint(tmp_path / "nowhere") is None


def test_nothing_is_there_before_everything_is(make, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        make(1)
    assert checkpoints.newest_checkpoint(tmp_path) is None


# ---- tampered manifests ----

HASH = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
EMPTY = {"bytes": 0, "sha256": HASH}
MANIFESTS = {
    "a list": "[]", "null": "null", "a number": "7", "a text": '"x"', "nothing": "", "half": '{"files": {', "{}": "{}",
    "brackets": "[" * 200_000, "objects": '{"a":' * 200_000, "huge": " " * 2_000_000 + "{}", "NaN": "NaN",
    "no files": json.dumps({"counters": SEEN}), "files a list": json.dumps({"counters": SEEN, "files": []}),
    "no file is named": json.dumps({"counters": SEEN, "files": {}}), "files null": '{"counters": {}, "files": null}',
}  # fmt: skip


NO_COUNTERS = (
    [], None, {}, {"tokens_seen": 1}, {**SEEN, "tokens_seen": "7"}, {**SEEN, "padding_tokens": None},
    {**SEEN, "tokens_seen": 1.5}, {**SEEN, "tokens_seen": [1]},
)  # fmt: skip


def test_a_manifest_that_is_none_or_counts_nothing_is_passed_over(make, tmp_path, capsys, subtests):
    whole, damaged = make(1), make(2)
    manifest = manifest_of(damaged)
    for case, text in MANIFESTS.items():
        with subtests.test(case=case):
            (damaged / checkpoints.MANIFEST).write_text(text)
            passed_over(tmp_path, damaged, whole, capsys)
    for counters in NO_COUNTERS:
        with subtests.test(counters=counters):
            write_manifest(damaged, {**manifest, "counters": counters})
            assert checkpoints.MANIFEST in passed_over(tmp_path, damaged, whole, capsys)


NAMES = (
    "../../x",
    "/dev/zero",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a\0b",
    "pipe",
    "zero",
    "folder",
    "out",
    "x" * 300,
    "nope",
)


def test_a_name_that_is_no_file_of_the_folder_is_never_opened(make, tmp_path, capsys, subtests):
    whole, damaged = make(1), make(2)
    (tmp_path / "x").write_text("secret")
    os.mkfifo(damaged / "pipe")
    (damaged / "zero").symlink_to("/dev/zero")
    (damaged / "out").symlink_to(tmp_path / "x")
    (damaged / "folder").mkdir()
    manifest = manifest_of(damaged)
    for name in NAMES:
        with subtests.test(name=name):
            write_manifest(damaged, {**manifest, "files": {**manifest["files"], name: EMPTY}})
            passed_over(tmp_path, damaged, whole, capsys)


def test_a_manifest_that_is_a_pipe_or_a_device_is_never_opened(make, tmp_path, capsys):
    whole, damaged = make(1), make(2)
    (damaged / checkpoints.MANIFEST).unlink()
    os.mkfifo(damaged / checkpoints.MANIFEST)
    assert "there is no such file" in passed_over(tmp_path, damaged, whole, capsys)


def test_a_file_of_another_size_is_not_hashed(make, tmp_path, capsys):
    whole, damaged = make(1), make(2)
    os.truncate(damaged / "model.safetensors", 2**40)  # sparse: to hash it would take an hour
    assert "not as it was written" in passed_over(tmp_path, damaged, whole, capsys)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(counters=JSON, files=JSON, entry=JSON, name=st.sampled_from(["model.safetensors", "optimizer.pt", "x"]))
def test_whatever_a_manifest_says_the_one_before_is_taken(make, tmp_path, counters, files, entry, name):
    if not (tmp_path / "checkpoint-2").exists():
        make(1), make(2)
    path = tmp_path / "checkpoint-2" / checkpoints.MANIFEST
    whole = json.loads((tmp_path / "checkpoint-1" / checkpoints.MANIFEST).read_text())
    for changed in (
        {**whole, "counters": counters},
        {**whole, "files": files},
        {**whole, "files": {name: entry}},
        files,
    ):
        path.write_text(json.dumps(changed))
        assert checkpoints.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"


def test_a_checkpoint_that_never_had_what_resuming_needs_is_passed_over(make, tmp_path, capsys, subtests):
    needed = "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"
    for name in needed:
        with subtests.test(name=name):
            whole, damaged = make(1, tmp_path / name), make(2, tmp_path / name)
            (damaged / name).unlink()
            manifest = manifest_of(damaged)
            del manifest["files"][name]
            write_manifest(damaged, manifest)
            assert "it is missing" in passed_over(tmp_path / name, damaged, whole, capsys)
