"""The part that trains, before anything is trained: what is told at once, and whose recipe advice changes."""

from dataclasses import replace

import pytest

from workbench.journal.record import Record
from workbench.prediction.predict import CPU
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, Lora, Qlora
from workbench.widgets import sight
from workbench.widgets import train as module
from workbench.widgets.train import Train


class Panel:
    """What the playground is to it."""

    def __init__(self, recipe, folder):
        self.recipe = recipe
        self.train = Train(lambda: self.recipe, self.choose, folder, changed=lambda: None)
        self.train.here.show = lambda recipe: None  # which would predict

    def choose(self, recipe):
        self.recipe = recipe


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


def test_advice_on_a_stand_in_changes_the_recipe_of_the_panel_alone_by_what_is_advised(panel):
    panel.train.stands_in.value = True
    ran = panel.train.trained()
    assert (ran.model, ran.sequence_length) == ("gpt2-tiny", 128)
    panel.train.advised = ran
    panel.train.advice.choose(ran | GradientCheckpointing())
    assert panel.recipe == Recipe(model="gpt2-xl", sequence_length=1024) | Lora(rank=2) | GradientCheckpointing()
    assert "found for gpt2-tiny, now set for gpt2-xl as well" in panel.train.message
    panel.train.advice.choose(replace(ran, techniques=(Lora(rank=1),)))
    assert panel.recipe == Recipe(model="gpt2-xl", sequence_length=1024) | Lora(rank=1) | GradientCheckpointing()


def test_advice_that_does_not_suit_the_recipe_of_the_panel_changes_nothing(panel):
    panel.train.advised = Recipe()
    before = panel.recipe
    panel.train.advice.choose(Recipe() | Qlora())
    assert panel.recipe == before
    assert "Nothing was changed. recipe: " in panel.train.message
    panel.recipe = None  # the form cannot be used
    panel.train.advice.choose(Recipe() | GradientCheckpointing())
    assert panel.recipe is None
    assert "Nothing was changed: first mend" in panel.train.message


def test_the_time_that_is_left_is_told_in_hours_and_minutes(panel, monkeypatch):
    record = Record.start(Recipe(), device_kind="cpu")
    panel.train.progress.max = 1000
    monkeypatch.setattr(type(module.RUNNER), "seconds_per_step", 10.184)
    panel.train.progressed(record)
    assert panel.train.message.endswith("step 0 of 1000, about 2 h 50 min left")


def test_a_cap_on_a_card_leaves_the_context_out(panel, monkeypatch):
    card = module.GPUS["t4"]
    here = panel.train.here
    here.gpu.value = "t4"
    here.budget.value = "8GiB"
    assert here.limit.have_bytes == 8 * 2**30 + card.context_bytes_estimate
    here.gpu.value = CPU
    assert here.limit.budget_bytes == 8 * 2**30


# ---- what the model sees ----


def test_nothing_is_fetched_to_look_at_a_text(monkeypatch, subtests):
    monkeypatch.setattr(sight, "in_cache", lambda model: False)
    answers = {
        ("gpt2-tiny", "shakespeare"): "",
        ("auto", "shakespeare"): "",
        ("gpt2-xl", "shakespeare"): "",
        ("random:gpt2", "novel.txt"): "",
        ("user/model", "shakespeare"): "The tokenizer of user/model",
        ("gpt2", "user/set:train"): "The text user/set:train",
    }
    for asked, answer in answers.items():
        with subtests.test(asked=asked):
            assert sight.not_local(*asked) == answer


def test_the_text_is_shown_as_the_model_sees_it_once_that_is_asked_for(tmp_path):
    rows = '{"messages": [{"role": "user", "content": "<b>Who?</b>"}, {"role": "assistant", "content": "I am."}]}\n'
    (tmp_path / "chats.jsonl").write_text(rows * 50)
    recipe = Recipe(model="gpt2-xl", corpus=str(tmp_path / "chats.jsonl"), sequence_length=32)
    seen = sight.Sight(lambda: recipe)
    seen.quiet_s = 0
    seen.show()
    assert not seen.is_working
    assert "wb-hidden" in seen.page._dom_classes
    seen.button.value = True
    assert seen.wait()
    assert "wb-hidden" not in seen.page._dom_classes
    assert "<mark" in seen.page.value
    assert "<b>Who" not in seen.page.value
    recipe = Recipe(corpus=str(tmp_path / "nope.txt"))
    seen.show()
    assert seen.wait()
    assert "⚠ corpus: there is no file" in seen.page.value
    recipe = Recipe(model="user/model")
    seen.show()
    assert seen.wait()
    assert "The tokenizer of user/model would have to be fetched" in seen.page.value
