"""The one button, with a made-up predictor."""

import time

from parts import MIB, Machine

from workbench.advise.candidate import Candidate
from workbench.prediction.predict import predict
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, Lora, Numerics
from workbench.widgets.gauge import Limit
from workbench.widgets.make_it_fit import MakeItFit

RECIPE = Recipe(model="gpt2-tiny", effective_batch_size=16, sequence_length=256)  # 612 MiB, 712 with a GPU's own


def raising(error):
    def answer(recipe):
        raise error

    return answer


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
    part.search(recipe, limit, offers)
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
    part.search(RECIPE, Limit("t4", 500 * MIB), {})
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
