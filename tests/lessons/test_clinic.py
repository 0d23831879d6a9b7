"""The clinic of notebook 19: its judge, its form, and its cases."""

import re

import nbformat
import pytest

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.base.paths import NOTEBOOKS
from workbench.gpus.emulator import place
from workbench.lessons import clinic
from workbench.lessons.clinic import CASES, CAUSES, Clinic
from workbench.lessons.exercise import Exercise
from workbench.lessons.trials import TRIALS, Tried, changed, predicted_on
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, Lora

SOURCES = [
    cell.source
    for cell in nbformat.read(str(NOTEBOOKS / "19_clinic.ipynb"), as_version=4).cells
    if cell.cell_type == "code"
]
ASKED = [name for source in SOURCES if "clinic.ask(" in source for name in re.findall(r'"(\w+)"', source)]
EMULATED = "evaluation"  # predict_life knows no other engine
LARGE = ("vocabulary", "states", "xl", "half_copies", "two_gpus")  # seconds each; the notebook judges them as well
DEAR = ("first_step", "attention", "long_batch", EMULATED)


def tried(case):
    marks = [pytest.mark.long] if case.name in LARGE else [pytest.mark.dear] if case.name in DEAR else []
    return pytest.param(case, id=case.name, marks=marks)


def test_every_case_is_asked_once():
    assert list(CASES) == ASKED
    assert 12 <= len(CASES) <= 14


def test_a_case_has_a_recipe_or_a_trial_of_its_own():
    assert {name for name, case in CASES.items() if not case.recipe} == set(TRIALS)


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
    if case.name == EMULATED and not place.is_set_up():
        pytest.skip("the emulated GPU is not set up here: python -m workbench emulate --set-up")
    judged = case.trial
    assert not judged(()).fits
    assert case.judge(case.cause, case.reference, judged).right
    assert not case.judge(case.cause, case.tempting, judged).right
    for one in case.reference:
        assert not judged([one]).fits, f"{one} alone is enough"
    if case.cause in list(Category):
        assert judged(()).largest[0] == case.cause


def test_no_other_cause_is_taken(case):
    verdict = case.judge("logits_and_loss", case.reference, needing(case.reference))
    assert not verdict.right
    assert "The cause is another one." in verdict.text


def needing(*pairs):
    """A trial in which these pairs fit, and nothing else does."""
    return lambda switches: Tried(1 if set(switches) in map(set, pairs) else 3, 2, ("activations", 1))


@pytest.fixture
def case():
    return CASES["first_step"]


def test_more_than_one_pair_can_be_right(case):
    other = ["chunked_cross_entropy", "lora"]
    trial = needing(case.reference, other)
    assert case.judge(case.cause, other, trial).right
    assert not case.judge(case.cause, ["lora", "optimizer=kind:adafactor"], trial).right


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
            case.judge(cause, pair, needing())


def test_an_unknown_case_is_refused():
    with pytest.raises(ConfigurationError, match=r"has no case 'xll'\. Known: .* Did you mean xl\?"):
        Clinic(solve=False, live=False).ask("xll")


def test_switches_that_exclude_each_other_are_wrong_in_words():
    recipe = Recipe(model="gpt2-tiny", effective_batch_size=4)
    states = CASES["states"]
    pair = ["optimizer=kind:adafactor", "optimizer_offloading"]
    verdict = states.judge("optimizer_states", pair, lambda s: Tried(len(changed(recipe, s).techniques), 0))
    assert not verdict.right
    assert "forbids. Drop one of the two." in verdict.text


def missing(switches):
    raise UnavailableError("the emulator is not set up.")


def test_where_nothing_can_be_tried_the_list_decides_and_says_so(subtests):
    case = CASES["evaluation"]
    for pair, is_right in ((case.reference, True), (case.tempting, False)):
        with subtests.test(pair=pair):
            verdict = case.judge("results", pair, missing)
            assert verdict.right == is_right
            assert not verdict.tried
            assert "nothing was tried: the emulator is not set up." in verdict.text


def test_the_score_does_not_count_what_was_not_tried(case, monkeypatch):
    shown = []
    monkeypatch.setattr(clinic, "display", lambda *things: shown.extend(map(html_of, things)))
    made = Clinic(live=False, trials={case.name: needing(case.reference), "evaluation": missing})
    made.ask(case.name, "evaluation")
    made.grade()
    page = "".join(shown)
    assert "The judge tried 1 of 2 reference answers" in page
    assert "nothing here can try: Training fits, evaluation does not" in page
    assert "What it needs is not predicted here: the emulator is not set up." in page


def test_a_case_tells_what_it_needs_and_its_clues_and_not_the_largest_part():
    told = CASES["half_copies"].told(lambda switches: Tried(5 - len(switches), 3, ("weights", 2)))
    assert told == "It needs 5 B of 3 B. In fp32 alone it needs 4 B of 3 B."


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
def asked(case, capsys):
    """A live clinic with one case, and its form."""
    made = Clinic(solve=False, live=True, trials={case.name: needing(case.reference)})
    made.ask(case.name)
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


def html_of(thing):
    """Of what IPython displays, or of an exercise."""
    return thing.shown["text/html"] if isinstance(thing, Exercise) else thing.data


def test_interactive_answers_are_folded(asked, case, monkeypatch):
    shown = []
    monkeypatch.setattr(clinic, "display", lambda *things: shown.extend(things))
    asked[0].ask(case.name)
    for thing in shown[2:]:  # after the report and the form
        assert thing.data.startswith("<details><summary>")


def test_without_a_kernel_the_page_has_choices_hint_and_answer(case, monkeypatch):
    shown = []
    monkeypatch.setattr(clinic, "display", lambda *things: shown.extend(map(html_of, things)))
    made = Clinic(live=False, trials={case.name: needing(case.reference)})
    made.ask(case.name)
    made.grade()
    page = "".join(shown)
    for switch in case.switches:
        assert switch in page
    assert page.count("<details") == 3  # the exercise's answer, the hint, the table
    assert "The judge tried 1 of 1 reference answers" in page


def test_a_reference_that_is_judged_wrong_ends_the_notebook(case):
    made = Clinic(live=False, trials={case.name: needing()})
    made.ask(case.name)
    with pytest.raises(WorkbenchError, match="wrong: first_step"):
        made.grade()
