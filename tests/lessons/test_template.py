"""The notebooks are committed without outputs and follow the template, so that who has read one can skim the rest."""

import ast
import re

import nbformat
import pytest

from workbench.paths import NOTEBOOKS, ROOT
from workbench.techniques import REGISTRY

ORDER = [
    "title", "goals", "setup", "parameters", "idea", "predict", "baseline", "technique", "changes", "run", "result",
    "curves", "record", "widget", "learned",
]  # fmt: skip
EVERY = sorted(NOTEBOOKS.glob("*.ipynb"))


def stem(path):
    return path.stem.split("_", 1)[-1]


LESSON_OF = {name: cls.family or name for name, cls in REGISTRY.items()}
LESSONS = [path for path in EVERY if stem(path) in LESSON_OF.values()]
ASKING, LISTING = "clinic", "compare"  # all of the one are questions, which its own tests judge
TEACHING = [path for path in EVERY if path.stem[0].isdigit() and stem(path) not in (ASKING, LISTING)]


def cells(path):
    return nbformat.read(str(path), as_version=4).cells


def slots(path):
    """The tags in the order in which they first appear; every cell has exactly one."""
    tags = [tag for cell in cells(path) for tag in cell.metadata.tags]
    assert len(tags) == len(cells(path))
    return list(dict.fromkeys(tags))


def test_every_technique_has_its_notebook_and_its_test():
    assert {stem(path) for path in LESSONS} == set(LESSON_OF.values())
    for name in REGISTRY:
        assert (ROOT / "tests" / "techniques" / f"test_{name}.py").exists()


@pytest.mark.parametrize("path", LESSONS, ids=stem)
def test_a_lesson_has_all_slots_in_order(path):
    assert slots(path) == ORDER


@pytest.mark.parametrize("path", EVERY, ids=stem)
def test_every_notebook_opens_and_closes_alike(path):
    found = slots(path)
    assert found[:5] == ORDER[:5]
    assert found[-1] == "learned"
    assert found.count("parameters") == 1


@pytest.mark.parametrize("path", EVERY, ids=stem)
def test_the_title_has_a_claim_and_the_card(path):
    lines = cells(path)[0].source.splitlines()
    assert lines[0].startswith(f"# {path.stem[:2]} · " if path.stem[0].isdigit() else f"# {path.stem.capitalize()}")
    assert lines[2].startswith("**")
    assert sum(line.startswith("| **") for line in lines) == 3


@pytest.mark.parametrize("path", EVERY, ids=stem)
def test_cells_are_short_and_free_of_outputs(path):
    for cell in cells(path):
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
            assert len(cell.source.splitlines()) <= 45, cell.source[:60]


@pytest.mark.parametrize("path", EVERY, ids=stem)
def test_parameters_are_annotated_literals_with_their_meaning(path):
    source = next(cell.source for cell in cells(path) if "parameters" in cell.metadata.tags)
    for line in source.splitlines():
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.AnnAssign)
        ast.literal_eval(statement.value)
        assert "  # " in line


@pytest.mark.parametrize("path", EVERY, ids=stem)
def test_the_kernel_is_everybodys(path):
    assert nbformat.read(str(path), as_version=4).metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("path", LESSONS, ids=stem)
def test_a_lesson_says_when_not_to_use_it_and_where_it_comes_from(path):
    last = "\n".join(cell.source for cell in cells(path) if "learned" in cell.metadata.tags)
    for part in ("**When not to use it.**", "**Exercises.**", "**References.**"):
        assert part in last


@pytest.mark.parametrize("path", LESSONS, ids=stem)
def test_a_lesson_shows_real_cards_and_the_step_to_drag_through(path):
    (card,) = [i for i, cell in enumerate(cells(path)) if "on_real_cards(" in cell.source]
    step = next(i for i, cell in enumerate(cells(path)) if cell.source.startswith("step_on_card("))
    assert cells(path)[card - 1].source.startswith("### On a real card")
    assert card < step
    assert all(len(cells(path)[i].source.splitlines()) <= 5 for i in (card, step))


def called(cell):
    """The names of the functions that a cell calls."""
    calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def exercises(path):
    """The cells that ask, each with the number that it has at the end of a lesson, or None."""
    for index, cell in enumerate(cells(path)):
        if cell.cell_type == "code" and "exercise" in called(cell):
            (call,) = (
                node
                for node in ast.walk(ast.parse(cell.source))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "exercise"
            )
            yield index, cell, next((word.value.value for word in call.keywords if word.arg == "number"), None)


@pytest.mark.parametrize("path", TEACHING, ids=stem)
def test_the_reader_guesses_before_anything_is_measured(path):
    code = [(index, cell) for index, cell in enumerate(cells(path)) if cell.cell_type == "code"]
    measured = next(index for index, cell in code if called(cell) & {"run", "side_by_side", "Meter"})
    assert any(index < measured for index, _, number in exercises(path) if number is None)


@pytest.mark.parametrize("path", TEACHING, ids=stem)
def test_the_source_of_a_guess_is_hidden_for_it_tells_the_answer(path):
    for _, cell, _ in exercises(path):
        assert cell.metadata.jupyter.source_hidden, cell.source


@pytest.mark.parametrize("path", TEACHING, ids=stem)
def test_every_exercise_at_the_end_has_its_check(path):
    last = [cell for cell in cells(path) if "learned" in cell.metadata.tags]
    words = "\n".join(cell.source for cell in last if cell.cell_type == "markdown")
    folded = re.findall(r"^\*\*Exercise (\d)\.\*\*[^<]*<details><summary>Answer</summary>\n\n.+", words, re.MULTILINE)
    assert len(folded) == words.count("<details>")
    judged = [number for _, cell, number in exercises(path) if "learned" in cell.metadata.tags]
    numbers = sorted([*map(int, folded), *(number for number in judged if number)])
    assert numbers == list(range(1, len(numbers) + 1))
    unchecked = re.findall(r"(?<!\S)\d\. ", words.partition("**Exercises.**")[2].partition("**References.**")[0])
    assert max(2, len(unchecked)) <= len(judged) + len(folded) <= 4
