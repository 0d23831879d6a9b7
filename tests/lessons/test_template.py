"""The notebooks are committed without outputs, short, and follow the template, so that who has read one can skim on."""

import ast
import re
from functools import cache

import nbformat
import pytest

from workbench.base.paths import NOTEBOOKS, ROOT
from workbench.lessons import pictures
from workbench.lessons.drawing import Drawing
from workbench.techniques import REGISTRY

ORDER = ["title", "setup", "parameters", "idea", "guess", "switch", "run", "nothing", "cards", "learned"]
EVERY = sorted(NOTEBOOKS.glob("*.ipynb"))
MOST_CELLS, MOST_LINES, MOST_WORDS = 12, 80, 600


def stem(path):
    return path.stem.split("_", 1)[-1]


LESSON_OF = {name: cls.lesson or name for name, cls in REGISTRY.items()}
NUMBERED = [path for path in EVERY if path.stem[0].isdigit()]
LESSONS = [path for path in NUMBERED if stem(path) in LESSON_OF.values()]
APPENDICES = [path for path in NUMBERED if re.match(r"\d\d[a-z]_", path.stem)]
ASKING = "clinic"  # all of it is questions, which its own tests judge
LISTING = ("compare", "pairs")  # to look things up in


@cache
def notebook(path):
    return nbformat.read(str(path), as_version=4)


def cells(path):
    return notebook(path).cells


def code_of(path):
    return [cell for cell in cells(path) if cell.cell_type == "code"]


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


def test_a_lesson_is_short(subtests):
    for path in NUMBERED:
        with subtests.test(notebook=path.stem):
            lines = [line for cell in code_of(path) for line in cell.source.splitlines() if line.strip()]
            words = [word for cell in cells(path) if cell.cell_type == "markdown" for word in cell.source.split()]
            assert len(code_of(path)) <= MOST_CELLS
            assert len(lines) <= MOST_LINES
            assert len(words) <= MOST_WORDS
            assert max(map(len, lines)) <= 100, "the column of JupyterLab is narrow"


def test_a_technique_s_lesson_has_all_slots_in_order(subtests):
    for path in LESSONS:
        with subtests.test(lesson=stem(path)):
            assert [slot for slot in slots(path) if slot in ORDER] == ORDER


def test_every_notebook_opens_and_closes_alike(subtests):
    for path in NUMBERED:
        with subtests.test(notebook=stem(path)):
            tags = slots(path)
            assert tags[:4] == ORDER[:4]
            assert tags[-1] == "learned"
            assert tags.count("parameters") == 1


def test_the_picture_comes_before_all_else(subtests):
    """On the first screen, before the reader has read or anything was trained: the fourth cell draws it."""
    for path in set(NUMBERED) - set(APPENDICES):
        with subtests.test(notebook=stem(path)):
            first = next(cell for cell in cells(path) if "idea" in cell.metadata.tags)
            assert first.cell_type == "code"
            drawn = {*pictures.__all__, "step_on_card", "staircase", "display"}
            assert drawn & set(called(first)), "no picture"
            assert not {"toggle", "run"} & set(called(first))


def test_a_lesson_imports_nothing_of_the_workbench_but_lessons_and_techniques(subtests):
    for path in NUMBERED:
        with subtests.test(notebook=stem(path)):
            source = "\n".join(cell.source for cell in code_of(path))
            homes = set(re.findall(r"^(?:from|import) (workbench\S*)", source, flags=re.MULTILINE))
            assert homes <= {"workbench.lesson", "workbench.techniques"}


def test_the_title_has_a_claim_and_the_card(subtests):
    for path in EVERY:
        with subtests.test(notebook=stem(path)):
            lines = cells(path)[0].source.splitlines()
            number = path.stem.partition("_")[0]
            assert lines[0].startswith(f"# {number} · " if number[0].isdigit() else f"# {path.stem.capitalize()}")
            assert lines[2].startswith("**")
            if path.stem == "playground":  # no lesson: a line that says how to run it, and the panel
                continue
            assert sum(line.startswith("| **") for line in lines) == 3


def test_cells_are_free_of_outputs(subtests):
    for path in EVERY:
        with subtests.test(notebook=stem(path)):
            for cell in code_of(path):
                assert not cell.outputs
                assert cell.execution_count is None


def test_parameters_are_annotated_literals_with_their_meaning(subtests):
    for path in EVERY:
        with subtests.test(notebook=stem(path)):
            (source,) = [cell.source for cell in cells(path) if "parameters" in cell.metadata.tags]
            statements = ast.parse(source).body
            for statement in statements:
                assert isinstance(statement, ast.AnnAssign)
                ast.literal_eval(statement.value)
                assert "  # " in source.splitlines()[statement.end_lineno - 1]


def test_the_kernel_is_everybodys(subtests):
    for path in EVERY:
        with subtests.test(notebook=stem(path)):
            assert notebook(path).metadata.kernelspec.name == "python3"


def test_a_lesson_says_when_not_to_use_it_and_where_it_comes_from(subtests):
    for path in LESSONS:
        with subtests.test(lesson=stem(path)):
            text = "\n".join(cell.source for cell in cells(path) if "learned" in cell.metadata.tags)
            for heading in ("**When not to use it.**", "**Next:**", "**References.**"):
                assert heading in text


def test_a_lesson_shows_real_cards_and_the_step_to_drag_through(subtests):
    for path in LESSONS:
        with subtests.test(lesson=stem(path)):
            names = [name for cell in code_of(path) for name in called(cell)]
            assert "cards" in names
            assert "step_on_card" in names


def test_what_a_card_gains_is_told_in_reserved_bytes(subtests):
    """A card must hold what the allocator reserves: fewer tensors at the peak alone leave it no more room."""
    gain = re.compile(r"\b(sav(e|es|ed|ing|ings)|gains?|(more|less) room)\b", flags=re.IGNORECASE)
    card = re.compile(r"\b(T4|(RTX|GTX) \d+|[AH]100|the card has)\b")
    for path in NUMBERED:
        prose = "\n".join(cell.source for cell in cells(path) if cell.cell_type == "markdown")
        sentences = re.split(r"(?<=[.?!])\s+|\n", prose)
        for sentence in sentences:
            if gain.search(sentence) and card.search(sentence):
                with subtests.test(lesson=stem(path), sentence=sentence):
                    assert "reserve" in sentence


def called(cell):
    """The plain names that a cell calls, in the order of the source."""
    calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
    return [call.func.id for call in calls if isinstance(call.func, ast.Name)]


def questions(path):
    """The cells that ask, once for each question, with the number that it has at the end of a lesson, or None."""
    for cell in code_of(path):
        calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
        asking = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "check"]
        for call in sorted(asking, key=lambda call: call.lineno):
            numbers = [keyword.value.value for keyword in call.keywords if keyword.arg == "number"]
            yield cell, numbers[0] if numbers else None


def test_the_reader_guesses_before_anything_is_run(subtests):
    running = {"toggle", "run", "evaluated", "Meter"}
    for path in NUMBERED:
        if stem(path) in (ASKING, *LISTING):
            continue
        with subtests.test(lesson=stem(path)):
            code = code_of(path)
            (guess,) = [cell for cell, number in questions(path) if number is None]
            runs = [cell for cell in code if running & set(called(cell))]
            assert runs or path not in LESSONS
            assert all(code.index(guess) < code.index(cell) for cell in runs)


def test_the_source_of_a_question_is_hidden_for_it_tells_the_answer(subtests):
    for path in NUMBERED:
        with subtests.test(lesson=stem(path)):
            for cell, _ in questions(path):
                assert cell.metadata.jupyter.source_hidden, cell.source


def test_a_lesson_ends_with_questions_numbered_from_one(subtests):
    for path in NUMBERED:
        if stem(path) == ASKING:
            continue
        with subtests.test(lesson=stem(path)):
            numbers = [number for _, number in questions(path) if number is not None]
            assert numbers == list(range(1, len(numbers) + 1))
            assert len(numbers) in ((2, 3) if path in LESSONS else (1, 2, 3))


@pytest.mark.parametrize("name", pictures.__all__)
def test_a_picture_is_a_drawing_of_its_name_that_says_what_is_seen(name):
    draw = getattr(pictures, name)
    assert draw.__name__ == name
    assert draw.__annotations__["return"] in (Drawing, "Drawing")
    assert draw.__doc__


# The pictures that a config and numbers are enough for.
DRAWN = {
    "batch_rectangle": ((8, 512), (1, 512)),
    "block_adapters": (8, 16),
    "checkpointed_blocks": (),
    "hill_of_a_step": (8, 128),
    "kept_logits": (8, 128, 4),
    "key_value_cache": (16, 8),
    "logits_in_chunks": (1024, 256),
    "low_rank_update": (8,),
    "offloaded_step": (8, 128),
    "optimizer_bytes": (),
    "prefix_in_front": (16, 128),
    "shards": (4,),
    "step_in_parts": (8, 128, 4),
    "written_out_and_fused": (128,),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_drawn_of_gpt2(name):
    from transformers import GPT2Config

    picture = getattr(pictures, name)(GPT2Config(), *DRAWN[name])
    assert len(picture.shapes) > 3
    assert "<svg" in picture._repr_html_()


def test_arrows_lead_to_the_host_in_the_forward_pass_and_back_in_the_backward_pass():
    from transformers import GPT2Config

    layers = 5
    picture = pictures.offloaded_step(GPT2Config(n_layer=layers), 8, 128)
    arrows = [shape for shape in picture.shapes if "marker-end" in shape]
    to_the_host = layers + 2  # AdamW's states pass in the last two instants, to the card and back
    assert len(arrows) == to_the_host + layers + 2
