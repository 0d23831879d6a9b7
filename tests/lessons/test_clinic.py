"""The clinic of notebook 19: its judge, its form, and its cases as the notebook has written them out."""

import ast
import re

import nbformat
import pytest

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.base.paths import NOTEBOOKS
from workbench.gpus.emulator import place
from workbench.lessons import clinic
from workbench.lessons.clinic import CASES, CAUSES, Clinic, Tried, changed, predicted_on
from workbench.lessons.exercise import Exercise
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, Lora

SOURCES = [
    cell.source
    for cell in nbformat.read(str(NOTEBOOKS / "19_clinic.ipynb"), as_version=4).cells
    if cell.cell_type == "code"
]
ASKED = {name: source for source in SOURCES for name in re.findall(r'clinic\.ask\("(\w+)"', source)}
EMULATED = "evaluation"  # predict_life knows no other engine
LARGE = ("vocabulary", "states", "xl", "half_copies", "two_gpus")  # seconds each; the notebook judges them as well
DEAR = ("first_step", "attention", "long_batch", EMULATED)


def tried(case):
    marks = [pytest.mark.long] if case.name in LARGE else [pytest.mark.dear] if case.name in DEAR else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.fixture(scope="module")
def common():
    """What the cells that ask nothing define."""
    names = {}
    for source in SOURCES:
        if "clinic." not in source.replace("lessons.clinic", ""):
            exec(source, names)
    return names


@pytest.fixture
def trial(common, predicted_once):
    """The trial of a case, as its cell defines it: without what the cell prints and asks."""

    def of(name):
        names = dict(common)
        wanted = [
            node
            for node in ast.parse(ASKED[name]).body
            if not (isinstance(node, ast.Try) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)))
        ]
        exec(compile(ast.Module(wanted, []), name, "exec"), names)
        (given,) = re.findall(rf'clinic\.ask\("{name}", (\w+)\)', ASKED[name])
        return names[given]

    return of


def test_every_case_is_asked_once():
    assert list(ASKED) == list(CASES)
    assert 12 <= len(CASES) <= 14


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
def test_as_it_is_it_dies_with_the_reference_it_lives_and_the_tempting_pair_is_not_enough(case, trial):
    if case.name == EMULATED and not place.is_set_up():
        pytest.skip("the emulated GPU is not set up here: python -m workbench emulate --set-up")
    judged = trial(case.name)
    assert not judged(()).fits
    assert case.judge(case.cause, case.reference, judged)[0]
    assert not case.judge(case.cause, case.tempting, judged)[0]
    for one in case.reference:
        assert not judged([one]).fits, f"{one} alone is enough"
    if case.cause in list(Category):
        assert judged(()).largest[0] == case.cause


def test_no_other_cause_is_taken(case):
    right, words = case.judge("logits_and_loss", case.reference, needing(case.reference))
    assert not right
    assert "The cause is another one." in words


def needing(*pairs):
    """A trial in which these pairs fit, and nothing else does."""
    return lambda switches: Tried(1 if set(switches) in map(set, pairs) else 3, 2, ("activations", 1))


@pytest.fixture
def case():
    return CASES["first_step"]


def test_more_than_one_pair_can_be_right(case):
    other = ["chunked_cross_entropy", "lora"]
    assert case.judge(case.cause, other, needing(case.reference, other))[0]
    assert not case.judge(case.cause, ["lora", "optimizer=kind:adafactor"], needing(case.reference, other))[0]


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
        Clinic(solve=False, live=False).ask("xll", needing())


def test_switches_that_exclude_each_other_are_wrong_in_words():
    recipe = Recipe(model="gpt2-tiny", effective_batch_size=4)
    states = CASES["states"]
    pair = ["optimizer=kind:adafactor", "optimizer_offloading"]
    right, words = states.judge("optimizer_states", pair, lambda s: Tried(len(changed(recipe, s).techniques), 0))
    assert not right
    assert "forbids. Drop one of the two." in words


def test_where_nothing_can_be_tried_the_list_decides_and_says_so(subtests):
    def missing(switches):
        raise UnavailableError("the emulator is not set up.")

    case = CASES["evaluation"]
    for pair, is_right in ((case.reference, True), (case.tempting, False)):
        with subtests.test(pair=pair):
            right, words = case.judge("results", pair, missing)
            assert right == is_right
            assert "nothing was tried: the emulator is not set up." in words


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
    made = Clinic(solve=False, live=True)
    made.ask(case.name, needing(case.reference))
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
    asked[0].ask(case.name, needing(case.reference))
    for thing in shown[1:]:
        assert thing.data.startswith("<details><summary>")


def test_without_a_kernel_the_page_has_choices_hint_and_answer(case, monkeypatch):
    shown = []
    monkeypatch.setattr(clinic, "display", lambda *things: shown.extend(map(html_of, things)))
    made = Clinic(solve=True, live=False)
    made.ask(case.name, needing(case.reference))
    made.grade()
    page = "".join(shown)
    for switch in case.switches:
        assert switch in page
    assert page.count("<details") == 3  # the exercise's answer, the hint, the table
    assert "1 of 1 reference answers judged right" in page


def test_a_reference_that_is_judged_wrong_ends_the_notebook(case):
    made = Clinic(solve=True, live=False)
    made.ask(case.name, needing())
    with pytest.raises(WorkbenchError, match="wrong: first_step"):
        made.grade()
