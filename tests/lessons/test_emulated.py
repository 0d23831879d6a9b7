"""Lessons on a GPU in software: they run from top to bottom, and claim nothing of values, which do not exist there."""

import re
from dataclasses import replace

import nbformat
import pytest

from tests.advise.test_compare import record
from workbench.advise.compare import WITHOUT_VALUES, caption, compare, comparison_text
from workbench.advise.frame import to_frame
from workbench.journal.record import Status, read_all
from workbench.lessons import plots
from workbench.lessons.notebooks import execute_notebook, find_notebooks
from workbench.lessons.staircase import draw_staircase

CARD = "emulated:t4"
QUICK = {"device": CARD, "model": "gpt2-tiny", "steps": 3, "seeds": 1, "sequence_length": 64, "longest": 256}


@pytest.mark.usefixtures("emulator")
def test_a_lesson_runs_there_and_says_that_no_values_are_computed(tmp_path, runs_folder):
    (path,) = find_notebooks(["12_kernels"])
    executed = nbformat.read(str(execute_notebook(path, tmp_path / path.name, QUICK)), as_version=4)
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    words = "".join(output.get("text", "") + output.get("data", {}).get("text/html", "") for output in outputs)
    assert "no values" in words
    assert not re.search(r"\bnan\b|loss 0\.0", words)
    for made in read_all(runs_folder):
        if made.status is Status.UNAVAILABLE:
            assert "torch_compile needs" in made.error, "the kernels of a compiled step there are Triton's"
            continue
        assert (made.status, made.memory_source, made.losses) == (Status.OK, CARD, [])


def without_values(*arguments, **more):
    made = record(*arguments, **more, loss=None, speed=None, memory_source=CARD)
    return replace(made, losses=[])


@pytest.fixture
def runs():
    return [without_values(seed=seed) for seed in range(2)] + [without_values("lora", peak=60, seed=0)]


def test_a_comparison_has_the_memory_and_says_why_nothing_else(runs):
    table = compare(to_frame(runs))
    assert table.loc["lora", "saved_bytes"] == 40
    assert WITHOUT_VALUES in caption(table)
    assert "nan" not in comparison_text(table)


def test_a_picture_of_values_says_why_it_is_empty(runs):
    for picture in (plots.loss_curves(runs), draw_staircase(compare(to_frame(runs)))):
        axes = picture.axes[0]
        assert [text.get_text() for text in axes.texts if WITHOUT_VALUES in text.get_text()]
        assert not axes.lines


def test_on_other_devices_an_empty_picture_does_not_speak_of_emulation():
    figure = plots.loss_curves([record(losses=[])])
    (text,) = figure.axes[0].texts
    assert text.get_text() == "no losses on record"
    words, picture = text.get_window_extent(), figure.bbox
    assert picture.x0 <= words.x0 < words.x1 <= picture.x1
    assert picture.y0 <= words.y0 < words.y1 <= picture.y1, "the words stand outside of the picture"
