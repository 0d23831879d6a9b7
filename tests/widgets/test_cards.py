"""Candidates as cards: advice after an out-of-memory, and plans, with a made-up predictor."""

import time
from dataclasses import replace
from types import SimpleNamespace

from parts import MIB, Machine, words_of

from workbench.advise.doctor import diagnose
from workbench.base.errors import ConfigurationError
from workbench.journal.record import Record, Status
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing
from workbench.widgets.cards import Advice, MakeItFit
from workbench.widgets.controls import RecipeForm
from workbench.widgets.savings import Savings

RECIPE = Recipe(model="gpt2-tiny", effective_batch_size=16, sequence_length=256)  # 612 MiB, 712 with a GPU's own


def record(**facts):
    known = {
        "status": Status.OOM, "device_kind": "cpu", "memory_cap_bytes": 400 * MIB, "peak_phase": "backward",
        "peak_allocated_bytes": 400 * MIB, "by_category": {"activations": 300 * MIB, "weights": 100 * MIB},
    }  # fmt: skip
    return replace(Record.start(RECIPE, model="gpt2-tiny"), **{**known, **facts})


def made(kind, choose=print, machine=None):
    part = kind(choose)
    part.predictor = machine or Machine()
    return part


def shown(part):
    """Of each card its candidate, its button, and what it says."""
    assert part.wait(30)
    buttons_and_texts = [card.children for card in part.cards.children]
    return [
        SimpleNamespace(candidate=candidate, take=take, words=text)
        for candidate, (take, text) in zip(part.candidates, buttons_and_texts, strict=True)
    ]


# ---- advice ----


def test_every_advice_is_a_card_that_says_what_it_needs_and_costs_and_sets_the_recipe():
    chosen = []
    advice = made(Advice, chosen.append)
    advice.show(record())
    cards = shown(advice)
    assert [card.candidate.words for card in cards] == [c.words for c in diagnose(record(), predict=Machine()).changes]
    (checkpointing,) = [card for card in cards if "gradient_checkpointing" in card.take.description]
    assert "✓ Fits" in checkpointing.words.value
    assert "249 MiB to spare" in checkpointing.words.value
    assert "461 MiB" in checkpointing.words.value
    assert "stays the same (exact)" in checkpointing.words.value
    assert "gives up: most of a second forward pass" in checkpointing.words.value
    assert checkpointing.take.button_style == "primary"
    checkpointing.take.click()
    assert chosen == [checkpointing.candidate.recipe]
    assert "Each of these alone is enough" in words_of(advice)


def test_the_cause_is_there_before_anything_is_predicted_and_what_attacks_the_peak_is_tried_first():
    pages = []
    machine = Machine(lambda recipe: pages.append(words_of(advice)))
    advice = made(Advice, machine=machine)
    advice.show(record())
    shown(advice)
    assert "ran out of memory in the backward phase" in pages[0]
    assert "The largest part of the peak was activations" in pages[0]
    first = [t.name for recipe in machine.asked[:12] for t in recipe.techniques]
    assert "gradient_checkpointing" in first
    assert "lora" not in first
    assert any("1 so far" in page for page in pages), "a card is shown before all are there"


def test_the_switches_wait_until_the_advice_is_there():
    order = []
    savings = Savings(RecipeForm(RECIPE, ["lora"]).toggles)
    savings.quiet_s = 0
    savings.predictor = lambda *_: order.append("switch") or SimpleNamespace(need_bytes=1)

    def slow(recipe):
        if not savings.is_working:
            savings.show(RECIPE, "t4")
        time.sleep(0.01)
        order.append("advice")

    advice = made(Advice, machine=Machine(slow))
    advice.show(record(memory_cap_bytes=101 * MIB))
    shown(advice)
    assert savings.wait(10)
    assert order.count("advice") > 3
    assert order[order.index("switch") :] == ["switch"] * 2


def test_under_a_hard_cap_what_attacks_too_little_is_not_predicted(subtests):
    for cap, fitting, most_predictions in ((140, ["gradient_accumulation"], 12), (101, [], 10)):
        with subtests.test(cap=cap):
            machine = Machine()
            advice = made(Advice, machine=machine)
            advice.show(record(memory_cap_bytes=cap * MIB, by_category={"weights": 100 * MIB}))  # it failed early
            cards = shown(advice)
            assert [name for card in cards for name in card.candidate.names if card.candidate.fits] == fitting
            assert len(machine.asked) <= most_predictions
            assert {"lora", "optimizer"}.isdisjoint(t.name for recipe in machine.asked for t in recipe.techniques)


def test_what_does_not_fit_looks_like_no_advice_and_says_so():
    advice = made(Advice)
    advice.show(record(memory_cap_bytes=101 * MIB))
    (card,) = shown(advice)
    assert card.take.button_style == ""
    assert "✗ The closest; does not fit" in card.words.value
    assert "No single change is enough" in words_of(advice)
    assert diagnose(record(memory_cap_bytes=101 * MIB), predict=Machine()).plan_command in words_of(advice)


def test_advice_says_why_there_is_none():
    advice = made(Advice, machine=Machine(raising(ConfigurationError("no <b>such</b> model"))))
    advice.show(record())
    assert shown(advice) == []
    assert "No prediction helps: no &lt;b&gt;such" in words_of(advice)
    advice.show(record(status=Status.OK))
    shown(advice)
    assert 'role="alert"' in words_of(advice)


def raising(error):
    def answer(recipe):
        raise error

    return answer


# ---- make it fit ----


def plan(limit, machine=None, recipe=RECIPE, gpu="t4"):
    chosen = []
    part = made(MakeItFit, chosen.append, machine)
    part.show(recipe, gpu, limit)
    part.button.click()
    return part, shown(part), chosen


def test_a_plan_is_cards_with_the_best_first_and_the_first_one_taken():
    part, cards, chosen = plan(500 * MIB)
    assert 1 <= len(cards) <= 6
    assert all(card.candidate.fits and card.take.button_style == "primary" for card in cards)
    assert [card.candidate.numerics for card in cards] == sorted((c.candidate.numerics for c in cards), key=ORDER.index)
    assert "712 MiB of 500 MiB" in words_of(part)
    cards[0].take.click()
    assert chosen == [cards[0].candidate.recipe]


ORDER = ["exact", "approximate", "different"]


def test_what_fits_already_is_said_without_cards():
    part, cards, _ = plan(712 * MIB)
    assert cards == []
    assert "It fits already" in words_of(part)
    assert "0 B to spare" in words_of(part)


def test_if_nothing_fits_the_closest_is_said_to_be_no_more_than_that():
    part, (card,), _ = plan(201 * MIB)
    assert "Nothing was found that fits" in words_of(part)
    assert card.take.button_style == ""
    assert "does not fit" in card.words.value


def test_below_the_weights_the_planners_words_stand_and_are_escaped():
    part, cards, _ = plan(5 * MIB)
    assert cards == []
    assert "is below the weights of gpt2-tiny alone" in words_of(part)
    part, _, _ = plan(500 * MIB, Machine(raising(ValueError("<script>"))))
    assert "a fault here: ValueError &lt;script&gt;" in words_of(part)


def test_it_counts_its_predictions_and_is_stopped_by_another_recipe():
    def slow(recipe):
        pages.append(words_of(part))
        time.sleep(0.05)

    pages, machine = [], Machine(slow)
    part = made(MakeItFit, machine=machine)
    part.show(RECIPE, "t4", 500 * MIB)
    assert machine.asked == [], "nothing is looked for before the button is pressed"
    part.button.click()
    while len(machine.asked) < 3:
        time.sleep(0.01)
    part.show(RECIPE | GradientCheckpointing(), "t4", 500 * MIB)
    shown(part)
    assert len(machine.asked) <= 4
    assert "Stopped" in words_of(part)
    assert "2 predictions so far" in pages[2]


def test_plans_for_the_recipe_before_are_said_to_be_old_and_none_is_made_without_a_recipe():
    part, _, _ = plan(500 * MIB)
    part.show(replace(RECIPE, steps=3), "t4", 500 * MIB)
    assert "before the last change" in words_of(part)
    part.show(None, "t4", 500 * MIB)
    assert part.button.disabled


def test_a_plan_says_for_what_it_was_predicted():
    for gpu, title in (("t4", "NVIDIA T4"), ("cpu", "this machine&#39;s CPU")):
        part, _, _ = plan(500 * MIB, gpu=gpu)
        assert title in words_of(part)
