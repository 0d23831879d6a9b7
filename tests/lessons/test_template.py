"""The notebooks are committed without outputs and follow the template, so that who has read one can skim the rest."""

import ast
import re
from functools import cache

import nbformat

from workbench.base.paths import NOTEBOOKS, ROOT
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


@cache
def notebook(path):
    return nbformat.read(str(path), as_version=4)


def cells(path):
    return notebook(path).cells


def last_part(path):
    """The cells at the end: what was learned, and the exercises."""
    return [cell for cell in cells(path) if "learned" in cell.metadata.tags]


def slots(path):
    """The tags in the order in which they first appear; every cell has exactly one."""
    tags = [tag for cell in cells(path) for tag in cell.metadata.tags]
    assert len(tags) == len(cells(path))
    return list(dict.fromkeys(tags))


def test_every_technique_has_its_lesson():
    assert {stem(path) for path in LESSONS} == set(LESSON_OF.values())


def test_every_technique_has_tests_of_its_own(subtests):
    """Beside what is asked of all that are registered: relatives may share a file."""
    of_all = ("test_contract", "test_registry", "test_order")
    files = [path for path in (ROOT / "tests" / "techniques").glob("test_*.py") if path.stem not in of_all]
    sources = [path.read_text(encoding="utf-8") for path in files]
    for name, technique in REGISTRY.items():
        with subtests.test(technique=name):
            assert any(re.search(rf"\b{technique.__name__}\b", source) for source in sources)


def test_a_lesson_has_all_slots_in_order(subtests):
    for path in LESSONS:
        with subtests.test(lesson=stem(path)):
            assert slots(path) == ORDER


def test_every_notebook_opens_and_closes_alike(subtests):
    for path in EVERY:
        with subtests.test(notebook=stem(path)):
            tags = slots(path)
            assert tags[:5] == ORDER[:5]
            assert tags[-1] == "learned"
            assert tags.count("parameters") == 1


def test_the_title_has_a_claim_and_the_card(subtests):
    for path in EVERY:
        with subtests.test(notebook=stem(path)):
            lines = cells(path)[0].source.splitlines()
            number = path.stem[:2]
            assert lines[0].startswith(f"# {number} · " if number.isdigit() else f"# {path.stem.capitalize()}")
            assert lines[2].startswith("**")
            assert sum(line.startswith("| **") for line in lines) == 3


def test_cells_are_short_and_free_of_outputs(subtests):
    for path in EVERY:
        with subtests.test(notebook=stem(path)):
            for cell in cells(path):
                if cell.cell_type == "code":
                    assert not cell.outputs
                    assert cell.execution_count is None
                    assert len(cell.source.splitlines()) <= 45, cell.source[:60]


def test_parameters_are_annotated_literals_with_their_meaning(subtests):
    for path in EVERY:
        with subtests.test(notebook=stem(path)):
            (source,) = [cell.source for cell in cells(path) if "parameters" in cell.metadata.tags]
            for line in source.splitlines():
                (statement,) = ast.parse(line).body
                assert isinstance(statement, ast.AnnAssign)
                ast.literal_eval(statement.value)
                assert "  # " in line


def test_the_kernel_is_everybodys(subtests):
    for path in EVERY:
        with subtests.test(notebook=stem(path)):
            assert notebook(path).metadata.kernelspec.name == "python3"


def test_a_lesson_says_when_not_to_use_it_and_where_it_comes_from(subtests):
    for path in LESSONS:
        with subtests.test(lesson=stem(path)):
            text = "\n".join(cell.source for cell in last_part(path))
            for heading in ("**When not to use it.**", "**Exercises.**", "**References.**"):
                assert heading in text


def test_a_lesson_shows_real_cards_and_the_step_to_drag_through(subtests):
    for path in LESSONS:
        with subtests.test(lesson=stem(path)):
            sources = [cell.source for cell in cells(path)]
            (card,) = [index for index, source in enumerate(sources) if "on_real_cards(" in source]
            step = [source.startswith("step_on_card(") for source in sources].index(True)
            assert sources[card - 1].startswith("### On a real card")
            assert card < step
            assert len(sources[card].splitlines()) <= 5
            assert len(sources[step].splitlines()) <= 5


def calls_of(cell):
    """The calls of plain names in a cell: the function's name, and the call."""
    calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
    return [(call.func.id, call) for call in calls if isinstance(call.func, ast.Name)]


def exercises(path):
    """The cells that ask, each with the number that it has at the end of a lesson, or None."""
    for index, cell in enumerate(cells(path)):
        if cell.cell_type == "code":
            calls = [call for name, call in calls_of(cell) if name == "exercise"]
            assert len(calls) <= 1, "one question a cell"
            for call in calls:
                numbers = [keyword.value.value for keyword in call.keywords if keyword.arg == "number"]
                yield index, cell, numbers[0] if numbers else None


def test_the_reader_guesses_before_anything_is_measured(subtests):
    measuring = {"run", "side_by_side", "Meter"}
    for path in TEACHING:
        with subtests.test(lesson=stem(path)):
            code = [(index, cell) for index, cell in enumerate(cells(path)) if cell.cell_type == "code"]
            measured = min(index for index, cell in code if measuring & {name for name, _ in calls_of(cell)})
            assert any(index < measured for index, _, number in exercises(path) if number is None)


def test_the_source_of_a_guess_is_hidden_for_it_tells_the_answer(subtests):
    for path in TEACHING:
        with subtests.test(lesson=stem(path)):
            for _, cell, _ in exercises(path):
                assert cell.metadata.jupyter.source_hidden, cell.source


def test_every_exercise_at_the_end_has_its_check(subtests):
    folded_answer = re.compile(
        r"^\*\*Exercise (\d)\.\*\*[^<]*<details><summary>Answer</summary>\n\n.+", flags=re.MULTILINE
    )
    for path in TEACHING:
        with subtests.test(lesson=stem(path)):
            text = "\n".join(cell.source for cell in last_part(path) if cell.cell_type == "markdown")
            folded = folded_answer.findall(text)
            assert len(folded) == text.count("<details>")
            judged = [number for _, cell, number in exercises(path) if "learned" in cell.metadata.tags]
            numbers = sorted([*map(int, folded), *(number for number in judged if number)])
            assert numbers == list(range(1, len(numbers) + 1))
            asked = text.partition("**Exercises.**")[2].partition("**References.**")[0]
            unchecked = re.findall(r"(?<!\S)\d\. ", asked)
            assert max(2, len(unchecked)) <= len(judged) + len(folded) <= 4
