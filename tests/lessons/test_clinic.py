"""The clinic of notebook 19: its cases, and what is shown of them."""

import re
from dataclasses import replace

import ipywidgets as w
import nbformat
import pytest

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.base.paths import NOTEBOOKS
from workbench.lessons import clinic
from workbench.lessons.clinic import CASES, CAUSES, ask, form
from workbench.lessons.trials import TRIALS, Outcome, apply_switches, prediction_trial
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, Lora

SOURCES = [
    cell.source
    for cell in nbformat.read(str(NOTEBOOKS / "19_clinic.ipynb"), as_version=4).cells
    if cell.cell_type == "code"
]
ASKED = [name for source in SOURCES if "ask(" in source for name in re.findall(r'"(\w+)"', source)]
LARGE = ("vocabulary", "states", "xl", "half_copies")  # seconds each; the notebook judges them as well
DEAR = ("first_step", "attention", "long_batch")


def tried(case):
    marks = [pytest.mark.long] if case.name in LARGE else [pytest.mark.dear] if case.name in DEAR else []
    return pytest.param(case, id=case.name, marks=marks)


def test_every_case_is_asked_once():
    assert list(CASES) == ASKED
    assert len(CASES) == 10


def test_a_case_has_a_recipe_or_a_trial_of_its_own():
    assert {name for name, texts in clinic.TEXTS["cases"].items() if "recipe" not in texts} == set(TRIALS)


def test_a_case_has_its_answers_among_its_choices(subtests):
    for name, case in CASES.items():
        with subtests.test(case=name):
            assert case.cause in CAUSES
            assert {*case.reference, *case.tempting} <= set(case.switches)
            assert len(set(case.reference)) == len(set(case.tempting)) == 2
            assert set(case.reference) != set(case.tempting)
            assert case.hint
            assert case.answer


@pytest.mark.parametrize("case", [tried(case) for case in CASES.values()])
def test_as_it_is_it_dies_with_the_reference_it_lives_and_the_tempting_pair_is_not_enough(case, predicted_once):
    assert not case.trial(()).fits
    assert case.trial(case.reference).fits
    assert not case.trial(case.tempting).fits
    for one in case.reference:
        assert not case.trial([one]).fits, f"{one} alone is enough"
    if case.cause in list(Category):
        assert case.trial(()).largest == case.cause


@pytest.fixture
def case():
    """One for which its reference alone is enough."""
    first_step = CASES["first_step"]

    def trial(switches):
        return Outcome(1 if set(switches) == set(first_step.reference) else 3, 2, "activations", 1)

    return replace(first_step, trial=trial)


@pytest.fixture
def shown(monkeypatch):
    """What is displayed."""
    things = []
    monkeypatch.setattr(clinic, "display", lambda *displayed: things.extend(displayed))
    return things


def test_it_does_not_fit_if_something_else_is_short():
    assert Outcome(1, 2).fits
    assert not Outcome(1, 2, short="the host is full").fits
    assert "the host is full" in str(Outcome(1, 2, short="the host is full"))


def test_an_unknown_case_is_refused():
    with pytest.raises(ConfigurationError, match=r"has no case 'xll'\. Known: .* Did you mean xl\?"):
        ask("xll")


def test_switches_that_exclude_each_other_are_refused_in_words():
    recipe = Recipe(model="gpt2-tiny", effective_batch_size=4)
    states = replace(CASES["states"], trial=lambda s: Outcome(len(apply_switches(recipe, s).techniques), 0))
    assert "forbids. Drop one of the two." in states.judge(["optimizer=kind:adafactor", "optimizer_offloading"])


def test_a_case_tells_what_it_needs_and_its_clues_and_not_the_largest_part():
    case = replace(CASES["half_copies"], trial=lambda switches: Outcome(5 - len(switches), 3, "weights", 2))
    assert case.needs == "It needs 5 B of 3 B. In fp32 alone it needs 4 B of 3 B."


def test_switches_change_a_recipe():
    recipe = Recipe(model="gpt2") | Lora(rank=8)
    assert apply_switches(recipe, ["lora=rank:2", "gradient_checkpointing"]).techniques == (
        Lora(rank=2),
        GradientCheckpointing(),
    )
    assert apply_switches(recipe, ["no lora"]) == recipe.baseline
    with pytest.raises(ConfigurationError):
        apply_switches(recipe, ["lorax"])


def test_a_prediction_counts_reserved_memory_and_context():
    tried = prediction_trial(Recipe(model="gpt2-tiny"), "t4")(())
    assert 2**29 < tried.needed_bytes < 2**31 < tried.budget_bytes
    assert tried.fits


def test_the_form_tries_two_switches(case):
    choices = form(case)
    *boxes, check, _output = choices.children

    def verdict(*pair):
        for box, switch in zip(boxes, pair, strict=True):
            box.value = switch
        check.click()
        return choices.result.data

    first = case.switches[0]
    assert verdict(first, first) == '<div role="status">Choose two different switches.</div>'
    assert "is not enough: it needs 3 B of 2 B, most of it activations: 1 B." in verdict(*case.tempting)
    assert "is enough: it needs 1 B of 2 B" in verdict(*reversed(case.reference))


@pytest.mark.parametrize("is_live", [True, False])
def test_a_page_has_the_cause_to_choose_hint_and_answer_and_with_a_kernel_the_form(case, monkeypatch, shown, is_live):
    monkeypatch.setattr(clinic, "live_page", lambda: is_live)
    monkeypatch.setattr(clinic, "CASES", {case.name: case})
    ask(case.name)
    forms = [thing for thing in shown if isinstance(thing, w.interactive)]
    assert len(forms) == is_live
    page = "".join(thing.data for thing in shown if thing not in forms)
    for text in (*CAUSES.values(), *case.switches):
        assert text in page
    assert page.count("<details") == 3  # the answer for the cause, the hint, and the switches
    assert "is enough: it needs 1 B of 2 B" in page
