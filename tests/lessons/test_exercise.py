"""A guess before a measurement: what the notebook holds. `tests/browser/test_guesses.py` is the reader."""

import html
import json
import re

import numpy as np
import pytest

from workbench.base.errors import ConfigurationError
from workbench.lessons.exercise import exercise

MIB = 2**20


def form(*asked, **options):
    return exercise(*asked, **options).data


def told(page):
    return json.loads(html.unescape(re.search(r'data-exercise="([^"]*)"', page)[1]))


def test_numbers_of_numpy_and_large_ones_are_told_and_shown_as_people_write_them():
    assert told(form("How many?", np.int64(24_576), "", unit="parameters"))["answer"] == 24_576
    for number, shown in ((24_576, "24,576 kg"), (491.43, "491 kg"), (2.0, "2 kg"), (0.0078, "0.0078 kg")):
        assert f"<b>{shown}.</b> why<" in form("How much?", number, "why", unit="kg")
    assert "<b>4.2 MiB.</b> why<" in form("How many bytes?", 4.2 * MIB, "why")


def test_an_answer_that_nobody_could_give_is_refused():
    with pytest.raises(ConfigurationError, match="'c' is none of the choices: a, b. Add it"):
        exercise("Which?", "c", "", choices=["a", "b"])
    with pytest.raises(ConfigurationError, match="'weights' is none of the choices: there are none"):
        exercise("Which?", "weights", "")


def test_without_scripts_the_answer_is_there_and_nothing_to_fill_in():
    unscripted = form("How many?", 3, "why", unit="times").split("<script>")[0]
    assert '<div class="asked" hidden>' in unscripted
    assert (
        "style" not in re.search("<div class=.asked.[^>]*>", unscripted)[0]
    )  # a display of its own would undo `hidden`
    assert "<details" in unscripted


def test_no_example_is_an_answer():
    page = form("How many bytes?", 42 * MIB, "")
    script = page.partition("<script>")[2]
    assert "placeholder" in script
    assert not re.search(r"\d [kMG]iB", script)
