"""The front page's numbers: of this grid and these versions, how they are read, and that they are true."""

import json
import random

import front_grid
import front_html
import front_page
import pytest

from workbench.gpus.catalogue import GPUS
from workbench.models.known import PUBLISHED
from workbench.prediction import committed

DATA = json.loads(front_html.DATA.read_text(encoding="utf-8"))
POINTS = {model["name"]: model["points"] for model in DATA["models"]}
T4 = GPUS["t4"]
DRAWN = 3


def choice(batch, length, model="gpt2", switches=(), mode="full"):
    return front_grid.Choice(model, mode, switches, batch, length)


def test_the_numbers_are_of_this_grid_this_generation_and_these_versions():
    assert DATA["made"]["key"] == front_grid.key_of_grid(), "run tools/front_page.py"
    assert DATA["made"]["generation"] == committed.GENERATION
    assert DATA["made"]["predictions"] == len(list(front_grid.grid())) <= 1550
    assert DATA["columns"] == list(front_grid.COLUMNS)
    for curves in POINTS.values():
        for rows in curves.values():
            assert [row[0] for row in rows] == sorted({row[0] for row in rows})
            assert all(
                sum(row[3:]) <= allocated + 3 <= reserved + 6 for row in rows for reserved, allocated in [row[1:3]]
            )


def test_each_choice_of_the_page_has_an_answer():
    for model in PUBLISHED.keys() & POINTS.keys():
        for mode, switches in front_grid.sets_of(model):
            for batch in front_grid.BATCHES:
                for length in front_grid.lengths_of(model):
                    whole = choice(batch, length, model, switches, mode)
                    in_parts = choice(batch, length, model, (front_grid.ACCUMULATED, *switches), mode)
                    assert front_grid.answer(POINTS, whole, T4).need > 512
                    assert front_grid.answer(POINTS, in_parts, T4).need > 512


def test_between_two_points_with_one_verdict_it_interpolates_and_else_it_says_close():
    room = T4.memory_bytes / 2**20 - 512
    points = {"gpt2": {"full": [[256, 1000, 900], [1024, 4000, 3700], [4096, 2 * room, 2 * room]]}}
    between = front_grid.answer(points, choice(2, 256), T4)
    assert (between.verdict, between.need, between.tensors) == ("fits", 2000 + 512, 1833.0 + 1 / 3 + 512)
    assert front_grid.answer(points, choice(2, 1024), T4).verdict == "close"
    assert front_grid.answer(points, choice(4, 1024), T4).verdict == "over"


@pytest.mark.parametrize(
    ("reserved", "allocated", "margin", "verdict"),
    [(0, -9, 0, "fits"), (1, 0, 0, "close"), (9, 1, 0, "over"), (-63, -90, 64, "close"), (90, 65, 64, "over")],
)
def test_what_the_allocator_keeps_decides_between_fits_and_too_much(reserved, allocated, margin, verdict):
    room = T4.memory_bytes / 2**20 - 512
    assert front_grid.verdict(room + reserved, room + allocated, T4, margin) == verdict


def test_the_check_was_of_other_choices_and_no_verdict_was_wrong():
    drawn = front_page.draw_choices()
    assert DATA["check"]["choices"] == len(drawn) == 100
    assert not front_grid.choices_of_grid() & {made for made, _ in drawn}
    assert DATA["check"]["wrong"] == 0


def test_the_page_has_an_address_of_the_repository_only_if_there_is_one():
    page = front_html.fill_page()
    assert "https://github.com" not in page
    assert 'content="front.png"' in page
    address = "https://github.com/someone/somewhere"
    linked = front_html.fill_page(f"{address}.git")
    assert f'<a href="{address}">Repository</a>' in linked
    assert f'content="{address}/raw/main/docs/front/front.png"' in linked


def test_the_page_is_small_and_says_what_it_is():
    page = front_html.fill_page()
    files = [front_html.FRONT / name for name in ("front.css", "front.js")]
    assert len(page.encode()) + sum(file.stat().st_size for file in files) < 300_000
    assert (front_html.FRONT / front_html.PICTURE).stat().st_size < 150_000
    for words in ("Predicted, nothing was run", "source emulated:a100-80gb", "torch 2.", "GPT-2 XL, all 1.5 billion"):
        assert words in page


@pytest.mark.usefixtures("emulator")
def test_some_of_them_made_anew_are_the_same(subtests):
    """Others every time, of small models; a number that has moved means: raise GENERATION, run tools/front_page.py."""
    small = [made for made in front_grid.grid() if made.model in ("gpt2", "HuggingFaceTB/SmolLM2-135M")]
    for made in random.sample(small, DRAWN):
        with subtests.test(choice=made):
            anew = front_page.columns(front_page.ask_emulator(made.recipe(), front_grid.REFERENCE))
            rows = POINTS[made.model][made.curve]
            assert [made.tokens, *(anew[name] for name in front_grid.COLUMNS[1:])] in rows
