"""The controls give the recipe that they were set to, and say why one cannot be used."""

import html
from dataclasses import fields

import pytest

from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, GradientCheckpointing, Lora
from workbench.widgets.controls import OF_A_RUN, SENTENCE


def test_every_technique_and_every_setting_has_its_control(form):
    assert set(form.toggles) == set(REGISTRY)
    for name, toggle in form.toggles.items():
        assert set(toggle.controls) == {field.name for field in fields(REGISTRY[name])}
        for field in fields(REGISTRY[name]):
            assert any(
                field.metadata["help"] in html.unescape(help_text.value)
                for help_text in toggle.controls_with_help([field.name])[1:]
            )
    assert set(form.controls) == {f.name for f in fields(Recipe) if "help" in f.metadata}


def test_every_setting_is_in_the_sentence_with_the_training_or_behind_more_settings(form):
    button, rest = form.more()
    assert rest.children == ()
    button.value = True
    shown = {widget.description for widget in rest.children if hasattr(widget, "description")} - {""}
    beside = {name.replace("_", " ") for name in (*SENTENCE, *OF_A_RUN)}
    assert shown == {name.replace("_", " ") for name in form.controls} - beside
    assert "wb-hidden" not in rest._dom_classes
    button.value = False
    assert "wb-hidden" in rest._dom_classes


def test_the_controls_give_the_recipe_they_were_set_to(form):
    recipe = Recipe(
        model="gpt2", effective_batch_size=16, learning_rate=2e-4, dropout=0.0, seed=7,
        arguments={"weight_decay": 0.1}, callbacks=["a.b:C"],  # have no control, and stay
        techniques=(Lora(rank=3, alpha=5.0), GradientCheckpointing(use_reentrant=True)),
    )  # fmt: skip
    form.show(recipe)
    assert form.recipe() == recipe
    form.show(Recipe(model="gpt2-tiny"))
    assert form.recipe() == Recipe(model="gpt2-tiny")


def test_switching_a_technique_on_adds_it_and_shows_its_settings(form, subtests):
    for name, technique in REGISTRY.items():
        with subtests.test(technique=name):
            toggle = form.toggles[name]
            assert "wb-hidden" in toggle.settings._dom_classes
            before = len(form.changes)
            toggle.box.value = True
            assert len(form.changes) > before
            assert "wb-hidden" not in toggle.settings._dom_classes
            assert form.recipe().techniques == (technique(),)
            toggle.box.value = False
            assert form.recipe().techniques == ()


def test_what_cannot_be_combined_is_greyed_with_the_reason(form):
    form.toggles["lora"].box.value = True
    other = form.toggles["qlora"]
    assert other.box.disabled
    assert "qlora brings an adapter beside the frozen model, which lora forbids" in other.reason
    form.toggles["lora"].box.value = False
    assert not other.box.disabled
    assert other.reason == ""


def test_a_batch_of_six_is_accumulated_in_two_pieces(form):
    accumulation = form.toggles["gradient_accumulation"]
    form.controls["effective_batch_size"].value = "6"
    assert not accumulation.box.disabled, "the default of 4 does not divide it, but 2 does"
    accumulation.box.value = True
    assert form.error.value == ""
    assert form.recipe().techniques[0].settings() == {"steps": 2}


def test_where_a_setting_would_help_its_field_is_there(form):
    smaller = form.toggles["batch_size"]
    form.controls["effective_batch_size"].value = "7"
    assert not smaller.box.disabled
    smaller.box.value = True
    assert "Possible: 1." in form.error.value
    assert "wb-hidden" not in smaller.settings._dom_classes
    smaller.controls["size"].value = "1"
    assert form.error.value == ""


def test_what_a_card_cannot_do_is_not_what_a_switch_offers(form):
    form.suit("t4")  # no bf16
    form.toggles["mixed_precision"].box.value = True
    assert form.recipe().techniques[0].settings() == {"dtype": "fp16"}


def test_settings_of_a_switch_are_kept_while_it_is_off(form):
    lora = form.toggles["lora"]
    lora.box.value = True
    lora.controls["rank"].value = "32"
    lora.box.value = False
    form.controls["steps"].value = "13"
    lora.box.value = True
    assert form.recipe().techniques == (Lora(rank=32),)


def test_a_number_is_never_changed_without_a_word(form, subtests):
    for typed, words in (("1.5", "steps must be an integer"), ("0", "at least 1"), ("", "integer")):
        with subtests.test(typed=typed):
            form.controls["steps"].value = typed
            assert words in form.error.value
            assert form.valid() is None
            form.controls["steps"].value = "3"
            assert form.error.value == ""


def test_a_setting_out_of_range_is_said_and_the_control_stays_usable(form):
    form.toggles["lora"].box.value = True
    form.toggles["lora"].controls["alpha"].value = "<b>much"
    assert "lora: alpha must be a number" in form.error.value
    assert "<b>much" not in form.error.value
    with pytest.raises(ConfigurationError):
        form.recipe()
    form.toggles["lora"].controls["alpha"].value = "8"
    assert form.error.value == ""
    assert form.recipe().techniques == (Lora(alpha=8.0),)
