"""The clinic of notebook 19: its judge, its form, and its cases."""

import re
from dataclasses import replace

import nbformat
import pytest

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.paths import NOTEBOOKS
from workbench.lessons import clinic
from workbench.lessons.clinic import CASES, CAUSES, Clinic
from workbench.lessons.trials import TRIALS, Tried, changed, predicted_on
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, Lora

SOURCES = [
    cell.source
    for cell in nbformat.read(str(NOTEBOOKS / "19_clinic.ipynb"), as_version=4).cells
    if cell.cell_type == "code"
]
ASKED = [name for source in SOURCES if "clinic.ask(" in source for name in re.findall(r'"(\w+)"', source)]
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
    assert case.judge(case.cause, case.reference).right
    assert not case.judge(case.cause, case.tempting).right
    for one in case.reference:
        assert not case.trial([one]).fits, f"{one} alone is enough"
    if case.cause in list(Category):
        assert case.trial(()).largest[0] == case.cause


def test_no_other_cause_is_taken(case):
    verdict = case.judge("logits_and_loss", case.reference)
    assert not verdict.right
    assert "The cause is another one." in verdict.text


def needing(*pairs):
    """A trial in which these pairs fit, and nothing else does."""
    return lambda switches: Tried(1 if set(switches) in map(set, pairs) else 3, 2, ("activations", 1))


@pytest.fixture
def case():
    """One for which its reference alone is enough."""
    first_step = CASES["first_step"]
    return replace(first_step, trial=needing(first_step.reference))


@pytest.fixture
def shown(monkeypatch):
    """What is displayed."""
    things = []
    monkeypatch.setattr(clinic, "display", lambda *displayed: things.extend(displayed))
    return things


def asking(monkeypatch, *cases, solve=True, live=False):
    """A clinic that has asked these cases."""
    monkeypatch.setattr(clinic, "live_page", lambda: live)
    monkeypatch.setattr(clinic, "CASES", {case.name: case for case in cases})
    made = Clinic(solve)
    made.ask(*clinic.CASES)
    return made


def test_more_than_one_pair_can_be_right(case):
    other = ["chunked_cross_entropy", "lora"]
    generous = replace(case, trial=needing(case.reference, other))
    assert generous.judge(case.cause, other).right
    assert not generous.judge(case.cause, ["lora", "optimizer=kind:adafactor"]).right


def test_it_does_not_fit_if_something_else_is_short():
    assert Tried(1, 2).fits
    assert not Tried(1, 2, short="the host is full").fits
    assert "the host is full" in str(Tried(1, 2, short="the host is full"))


def test_what_is_no_answer_is_refused(case, subtests):
    for cause, pair, message in (
        ("moon", ["lora", "gradient_checkpointing"], r"'moon'\. Known: weights"),
        ("activations", ["lorax", "gradient_checkpointing"], r"'lorax'\. Known: .* Did you mean lora\?"),
        ("activations", ["lora", "lora"], "two different switches. Choose another"),
    ):
        with subtests.test(cause=cause, pair=pair), pytest.raises(ConfigurationError, match=message):
            case.judge(cause, pair)


def test_an_unknown_case_is_refused():
    with pytest.raises(ConfigurationError, match=r"has no case 'xll'\. Known: .* Did you mean xl\?"):
        Clinic(solve=False).ask("xll")


def test_switches_that_exclude_each_other_are_wrong_in_words():
    recipe = Recipe(model="gpt2-tiny", effective_batch_size=4)
    states = replace(CASES["states"], trial=lambda s: Tried(len(changed(recipe, s).techniques), 0))
    verdict = states.judge("optimizer_states", ["optimizer=kind:adafactor", "optimizer_offloading"])
    assert not verdict.right
    assert "forbids. Drop one of the two." in verdict.text


def test_a_case_tells_what_it_needs_and_its_clues_and_not_the_largest_part():
    case = replace(CASES["half_copies"], trial=lambda switches: Tried(5 - len(switches), 3, ("weights", 2)))
    assert case.needs == "It needs 5 B of 3 B. In fp32 alone it needs 4 B of 3 B."


def test_switches_change_a_recipe():
    recipe = Recipe(model="gpt2") | Lora(rank=8)
    assert changed(recipe, ["lora=rank:2", "gradient_checkpointing"]).techniques == (
        Lora(rank=2),
        GradientCheckpointing(),
    )
    assert changed(recipe, ["no lora"]) == recipe.baseline
    with pytest.raises(ConfigurationError):
        changed(recipe, ["lorax"])


def test_a_prediction_counts_reserved_memory_and_context():
    tried = predicted_on(Recipe(model="gpt2-tiny"), "t4")(())
    assert 2**29 < tried.needed_bytes < 2**31 < tried.budget_bytes
    assert tried.fits


@pytest.fixture
def asked(case, monkeypatch, shown):
    """A live clinic with one case, and its form."""
    made = asking(monkeypatch, case, solve=False, live=True)
    return made, made.form(case)


def choose(form, *values):
    *boxes, check, verdict = form.children
    for box, value in zip(boxes, values, strict=True):
        box.value = value
    check.click()
    assert not check.disabled
    return verdict.value


def test_the_form_judges_and_counts(asked, case):
    made, form = asked
    assert 'role="status"' in form.children[-1].value
    assert "Choose a cause" in choose(form, "", *case.reference)
    assert "Not yet. That is the cause." in choose(form, case.cause, *case.tempting)
    assert "Solved: 0 of 1." in form.children[-1].value
    assert "two different" in choose(form, case.cause, "lora", "lora")
    assert "Right." in choose(form, case.cause, *reversed(case.reference))
    assert "Solved: 1 of 1." in made.board.value


def test_interactive_answers_are_folded(asked, shown):
    _report, _form, *others = shown
    assert len(others) == 2
    for thing in others:
        assert thing.data.startswith("<details><summary>")


def test_without_a_kernel_the_page_has_choices_hint_and_answer(case, monkeypatch, shown):
    asking(monkeypatch, case).grade()
    page = "".join(thing.data for thing in shown)
    for switch in case.switches:
        assert switch in page
    assert page.count("<details") == 2  # the exercise's answer, and the hint
    assert "is enough: it needs 1 B of 2 B" in page
    assert "where the notebook has a kernel" in page


def test_a_reference_that_is_judged_wrong_ends_the_notebook(case, monkeypatch):
    with pytest.raises(WorkbenchError, match="reference answer of first_step wrong"):
        asking(monkeypatch, replace(case, trial=needing()))
