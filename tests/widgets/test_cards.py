"""Candidates as cards: advice after an out-of-memory, and plans, with a made-up predictor."""

import time
from dataclasses import replace
from types import SimpleNamespace

from parts import MIB, Machine, words_of

from workbench.advise.candidate import Candidate
from workbench.advise.doctor import diagnose
from workbench.base.errors import ConfigurationError
from workbench.journal.record import Record, Status
from workbench.prediction.predict import predict
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, Lora, Numerics
from workbench.widgets.cards import Advice, MakeItFit
from workbench.widgets.controls import RecipeForm
from workbench.widgets.gauge import Limit
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
    (checkpointing,) = [card for card in cards if "Gradient checkpointing" in card.take.description]
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
    savings.predictor = lambda *question: order.append("switch") or Machine()(*question)

    def slow(recipe):
        if not savings.is_working:
            savings.show(RECIPE, Limit("t4"))
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


def button(limit_mib, *, machine=None, recipe=RECIPE, offered=(), gpu="t4"):
    """The button after its search, and what was chosen, or taken home, through it."""
    taken = []
    part = MakeItFit(taken.append, lambda: taken.append("script"))
    part.predictor = machine or Machine()
    limit = Limit(gpu, limit_mib * MIB)
    baseline = Candidate(recipe, (), Machine()(recipe, gpu), limit.have_bytes)
    offers = {}
    for technique in offered:
        changed = recipe | technique
        predicted = Machine()(changed, gpu)
        offers[technique.name] = Candidate(changed, (technique,), predicted, limit.have_bytes, baseline)
    part.look(recipe, limit, offers)
    assert part.wait(30)
    return part, taken


def test_the_button_says_what_it_will_do_and_a_click_does_it():
    """One technique that is enough, and alters no loss, is offered without a search."""
    machine = Machine()
    part, taken = button(400, machine=machine, offered=[GradientCheckpointing(), Lora()])
    assert part.button.description == "Make it fit\nTurn on Gradient checkpointing: 461 MiB less, as fast, same loss"
    assert machine.asked == []
    assert not part.button.disabled
    part.button.click()
    assert taken == [RECIPE | GradientCheckpointing()]


def test_where_none_is_enough_sets_are_searched_the_best_first():
    machine = Machine()
    part, taken = button(500, machine=machine)
    assert len(machine.asked) > 3
    numerics = [candidate.numerics for candidate in part.candidates]
    assert numerics == sorted(numerics, key=[*Numerics].index)
    assert all(candidate.fits for candidate in part.candidates)
    part.button.click()
    assert taken == [part.candidates[0].recipe]


def test_another_way_is_offered_in_turn():
    part, taken = button(500)
    several = len(part.candidates)
    assert several > 1
    assert part.another.description == f"another way (1 of {several})"
    first = part.button.description
    part.another.click()
    assert part.another.description == f"another way (2 of {several})"
    assert part.button.description != first
    part.button.click()
    assert taken == [part.candidates[1].recipe]
    for _ in range(several - 1):
        part.another.click()
    assert part.button.description == first


def test_if_nothing_fits_the_closest_is_said_to_be_no_more_than_that():
    part, taken = button(201)
    assert part.button.description.startswith("Nothing was found that fits\nclosest: ")
    assert "too much" in part.button.description
    part.button.click()
    assert taken == [part.candidates[0].recipe]


def test_below_the_weights_the_planners_words_stand():
    part, taken = button(5)
    assert "is below the weights of gpt2-tiny alone" in part.button.description
    assert part.button.disabled
    part.button.click()
    assert taken == []


def test_a_fault_is_no_verdict():
    part, _ = button(500, machine=Machine(raising(ValueError("broken"))))
    assert part.button.description == "Make it fit\nno answer, a fault here: ValueError broken"
    assert part.button.disabled


def test_sets_are_predicted_by_one_engine():
    """Files that come with the workbench are of an emulated GPU, and a search asks for what has no file."""
    assert MakeItFit(print, print).predictor is predict


def test_it_counts_its_predictions_and_is_stopped_by_another_recipe():
    said = []

    def slow(recipe):
        said.append(part.button.description)
        time.sleep(0.05)

    machine = Machine(slow)
    part = MakeItFit(print, print)
    part.predictor = machine
    part.look(RECIPE, Limit("t4", 500 * MIB), {})
    while len(machine.asked) < 3:
        time.sleep(0.01)
    part.say("Predicting …")
    assert part.wait(30)
    assert len(machine.asked) <= 4
    assert "2 tried" in said[2]
    assert part.button.description == "Make it fit\nPredicting …"
    assert part.button.disabled


def test_what_fits_is_taken_home():
    taken = []
    part = MakeItFit(print, lambda: taken.append("script"))
    part.offer_script()
    assert "Take the script home" in part.button.description
    part.button.click()
    assert taken == ["script"]
    part.say("Predicting …")
    part.button.click()
    assert taken == ["script"], "nothing is taken of a recipe that is not known to fit"
