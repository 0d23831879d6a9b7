"""Predictions that come with the workbench: what is taken from a file, what is not, and that they are still true."""

import random
from dataclasses import replace

import pytest

from tests.lessons.test_timeline import one_step, prediction
from workbench.prediction import cache, committed
from workbench.prediction.committed import known_predictions
from workbench.prediction.predict import EMULATOR, predict_all
from workbench.recipe import Recipe
from workbench.techniques import Lora

RECIPE = Recipe(model="gpt2", effective_batch_size=8, sequence_length=64)
DRAWN = 20


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The committed folder is an empty one; the recipes that were predicted after all."""
    wanted = []

    def answer_all(recipe, gpus):
        wanted.extend((recipe.label, gpu) for gpu in gpus)
        made = prediction(one_step(), label=recipe.label, recipe_settings=recipe.to_dict())
        return [replace(made, gpu=gpu) for gpu in gpus]

    monkeypatch.delenv("WORKBENCH_ENGINE")
    monkeypatch.setattr(committed, "FOLDER", tmp_path / "predictions")
    monkeypatch.setattr(committed, "predict_all", answer_all)
    return wanted


def test_nothing_is_written_unless_it_is_asked_for(asked, monkeypatch):
    assert [answer.gpu for answer in known_predictions(RECIPE, ["t4", "rtx3090"])] == ["t4", "rtx3090"]
    assert asked == [("baseline", "t4"), ("baseline", "rtx3090")]
    assert not committed.FOLDER.exists()


def test_what_was_kept_is_taken_and_what_was_not_is_predicted(asked, monkeypatch):
    monkeypatch.setenv(committed.CHOICE, committed.KEEP)
    (kept,) = known_predictions(RECIPE, ["t4"], timeline=True)
    monkeypatch.delenv(committed.CHOICE)
    asked.clear()
    again, other = known_predictions(RECIPE, ["t4", "rtx3090"], timeline=True)
    assert (again, again.timeline.operations) == (kept, kept.timeline.operations)
    assert other.gpu == "rtx3090"
    assert asked == [("baseline", "rtx3090")]


def test_without_its_timeline_it_serves_a_table_and_no_step_to_drag(asked, monkeypatch):
    monkeypatch.setenv(committed.CHOICE, committed.KEEP)
    known_predictions(RECIPE, ["t4"])
    asked.clear()
    assert known_predictions(RECIPE, ["t4"])[0].timeline is None
    assert not asked
    assert known_predictions(RECIPE, ["t4"], timeline=True)[0].timeline is not None
    assert asked == [("baseline", "t4")]


@pytest.mark.parametrize(("variable", "value"), [(committed.CHOICE, committed.LIVE), ("WORKBENCH_ENGINE", "shadow")])
def test_who_wants_them_live_gets_them_live(asked, monkeypatch, variable, value):
    monkeypatch.setenv(committed.CHOICE, committed.KEEP)
    known_predictions(RECIPE, ["t4"])
    asked.clear()
    monkeypatch.setenv(variable, value)
    known_predictions(RECIPE, ["t4"])
    assert asked == [("baseline", "t4")]


def test_the_key_is_of_all_that_decides(monkeypatch):
    first = committed.key(RECIPE, "t4")
    assert first == committed.key(replace(RECIPE), "t4")
    others = [committed.key(RECIPE | Lora(), "t4"), committed.key(RECIPE, "rtx3090")]
    monkeypatch.setattr(committed, "GENERATION", committed.GENERATION + 1)
    others.append(committed.key(RECIPE, "t4"))
    monkeypatch.undo()
    monkeypatch.setattr(committed, "versions", lambda: dict.fromkeys(committed.LIBRARIES, "0.0"))
    others.append(committed.key(RECIPE, "t4"))
    assert len({first, *others}) == 5


def test_the_build_of_a_library_is_not_its_release(monkeypatch):
    keys = []
    for build in ("2.13.0+cpu", "2.13.0"):
        monkeypatch.setattr(committed, "versions", lambda build=build: dict.fromkeys(committed.LIBRARIES, build))
        keys.append(committed.key(RECIPE, "t4"))
    assert keys[0] == keys[1]


# ---- the files themselves ----

FILES = sorted(committed.FOLDER.iterdir())


def asked_for(file):
    """The recipe, the card and the answer of a file."""
    answer = cache.read_prediction(file)
    return answer.recipe, answer.gpu, answer


def test_every_file_is_of_this_generation_and_these_versions():
    """Else nobody would ever ask for it: `python tools/lessons.py` makes them anew."""
    assert FILES
    for file in FILES:
        recipe, gpu, answer = asked_for(file)
        assert file.stem == committed.key(recipe, gpu), file.name
        assert answer.source == f"emulated:{gpu}", file.name


@pytest.mark.usefixtures("emulator")
def test_some_of_them_made_anew_are_the_same(subtests):
    """Others every time: it prints which, and a number that has moved means: raise GENERATION."""
    for file in random.sample(FILES, min(DRAWN, len(FILES))):
        recipe, gpu, answer = asked_for(file)
        with subtests.test(file=file.name, recipe=recipe.label, model=recipe.model, gpu=gpu):
            (anew,) = predict_all(recipe, [gpu], engine=EMULATOR)
            assert replace(anew, versions={}) == replace(answer, versions={})
