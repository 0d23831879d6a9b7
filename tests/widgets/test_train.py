"""The part that trains, before anything is trained: what is told at once; and advice after one that failed."""

from dataclasses import replace

import pytest
from parts import MIB, Machine

from workbench.base.errors import ConfigurationError
from workbench.journal.record import Record, Status
from workbench.recipe import Recipe
from workbench.techniques import Lora
from workbench.widgets import train as module
from workbench.widgets.preview import Preview
from workbench.widgets.train import Advice, Train


class Panel:
    """What the playground is to it."""

    def __init__(self, recipe, folder):
        self.recipe = recipe
        self.train = Train(lambda: self.recipe, folder, on_result=lambda: None)


@pytest.fixture
def panel(tmp_path):
    return Panel(Recipe(model="gpt2-xl", sequence_length=1024) | Lora(rank=2), tmp_path)


def test_a_text_that_is_missing_is_told_before_start(panel, tmp_path, monkeypatch, subtests):
    monkeypatch.setattr("workbench.texts.readers.data_set_files", None)  # no hub is asked
    panel.recipe = Recipe(corpus="shakespeare")
    panel.train.show()
    assert not panel.train.start.disabled
    (tmp_path / "empty").mkdir()
    for text in (tmp_path / "nope.txt", tmp_path / "empty", "nope.md", "x" * 500 + ".txt"):
        with subtests.test(text=text):
            panel.recipe = Recipe(corpus=str(text))
            panel.train.show()
            assert panel.train.start.disabled
            assert "Start is off: corpus: the" in panel.train.what.value
    panel.recipe = Recipe(corpus="user/set:train")  # only Start asks the hub
    panel.train.show()
    assert not panel.train.start.disabled


def test_the_time_that_is_left_is_told_in_hours_and_minutes(panel, monkeypatch):
    record = Record.start(panel.recipe, device_kind="cpu")
    panel.train.on_begin(replace(panel.recipe, steps=1000))
    clock = iter([0.0, 101.84])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    panel.train.on_progress(replace(record, steps_done=1))
    assert panel.train.message.endswith("step 1 of 1000")
    panel.train.on_progress(replace(record, steps_done=11))
    assert panel.train.message.endswith("step 11 of 1000, about 2 h 48 min left")


# ---- advice ----


def failed(**facts):
    recipe = Recipe(model="gpt2-tiny", effective_batch_size=16, sequence_length=256)
    known = {
        "status": Status.OOM, "device_kind": "cpu", "memory_cap_bytes": 400 * MIB, "peak_phase": "backward",
        "peak_allocated_bytes": 400 * MIB, "by_category": {"activations": 300 * MIB, "weights": 100 * MIB},
    }  # fmt: skip
    return replace(Record.start(recipe, model="gpt2-tiny"), **{**known, **facts})


def test_the_cause_is_there_before_anything_is_predicted_and_then_what_would_fit():
    pages = []
    advice = Advice()
    advice.predictor = Machine(lambda recipe: pages.append(advice.page.value))
    advice.show(failed())
    assert advice.wait(30)
    assert "ran out of memory in the backward phase" in pages[0]
    assert "The largest part of the peak was activations" in pages[0]
    assert "Gradient checkpointing" in advice.page.value
    advice.forget()
    assert advice.page.value == ""


def test_advice_says_why_there_is_none():
    def refuse(recipe):
        raise ConfigurationError("no <b>such</b> model")

    advice = Advice()
    advice.predictor = Machine(refuse)
    advice.show(failed())
    assert advice.wait(30)
    assert "no &lt;b&gt;such" in advice.page.value


# ---- what the model sees ----


@pytest.fixture
def preview(tmp_path):
    rows = '{"messages": [{"role": "user", "content": "<b>Who?</b>"}, {"role": "assistant", "content": "I am."}]}\n'
    (tmp_path / "chats.jsonl").write_text(rows * 50)
    shown = Preview(lambda: shown.wanted)
    shown.wanted = Recipe(model="gpt2-xl", corpus=str(tmp_path / "chats.jsonl"), sequence_length=32)
    return shown


def test_the_text_is_shown_as_the_model_sees_it_once_that_is_asked_for(preview):
    assert preview.page.value == ""
    preview.button.click()
    assert preview.wait()
    assert "<mark" in preview.page.value
    assert "<b>Who" not in preview.page.value


def test_of_another_text_nothing_is_shown_until_it_is_asked_for(preview, panel):
    panel.recipe = preview.wanted
    seen = panel.train.preview
    seen.button.click()
    assert seen.wait()
    panel.train.show()
    assert "<mark" in seen.page.value, "nothing was changed"
    panel.recipe = replace(panel.recipe, corpus="nope.txt")
    panel.train.show()
    assert seen.page.value == ""
    seen.button.click()
    assert seen.wait()
    assert "⚠ corpus: there is no file" in seen.page.value


def test_a_recipe_that_cannot_be_used_has_no_preview(preview):
    def refuse():
        raise ConfigurationError("recipe: <b>no</b>.")

    preview.recipe = refuse
    preview.button.click()
    assert "⚠ recipe: &lt;b&gt;no" in preview.page.value
