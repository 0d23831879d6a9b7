import os

import pytest

from workbench.records import checkpoints


@pytest.fixture
def make(tmp_path):
    def made(step, **files):
        aside = tmp_path / ".aside" / f"checkpoint-{step}"
        (aside / "inner").mkdir(parents=True)
        for name, text in {"weights": "w" * 100, "inner/state": "s", **files}.items():
            (aside / name).write_text(text)
        final = tmp_path / f"checkpoint-{step}"
        checkpoints.commit(aside, final, {"tokens_seen": step})
        return final

    return made


def test_the_newest_is_that_of_the_highest_step(make, tmp_path):
    assert checkpoints.newest_checkpoint(tmp_path) is None
    nine, ten = make(9), make(10)
    assert checkpoints.newest_checkpoint(tmp_path) == ten
    assert checkpoints.counters(ten) == {"tokens_seen": 10}
    assert nine.exists()


def test_only_the_newest_two_are_kept(make, tmp_path):
    for step in (1, 2, 3, 10):
        make(step)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-3"]


def test_the_same_step_again_replaces_it(make):
    make(4)
    assert (make(4, weights="new") / "weights").read_text() == "new"


@pytest.mark.parametrize("name", ["weights", "inner/state", checkpoints.MANIFEST])
@pytest.mark.parametrize(
    "damage",
    [lambda path: path.unlink(), lambda path: os.truncate(path, 0), lambda path: path.write_text("x" * 100)],
    ids=["missing", "empty", "other content of the same length"],
)
def test_a_damaged_one_is_passed_over(make, tmp_path, name, damage):
    whole, damaged = make(1), make(2)
    damage(damaged / name)
    assert checkpoints.newest_checkpoint(tmp_path) == whole


def test_what_is_no_checkpoint_is_not_looked_at(make, tmp_path):
    (tmp_path / "checkpoint-final").mkdir()
    (tmp_path / "checkpoint-99").mkdir()  # without a manifest: the Trainer was killed while it wrote
    assert checkpoints.newest_checkpoint(tmp_path) is None
    assert checkpoints.newest_checkpoint(tmp_path / "nowhere") is None


def test_nothing_is_there_before_everything_is(make, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        make(1)
    assert checkpoints.newest_checkpoint(tmp_path) is None
