"""What fits: the table of batch × length, the row of cards, and the button, with a made-up predictor."""

import html
import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from parts import MIB, Machine, words_of

from workbench.advise.frontier import Row, rows_of
from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.techniques import GradientAccumulation, GradientCheckpointing, PrefixTuning
from workbench.widgets.fits import WhatFits

RECIPE = Recipe(model="gpt2-tiny", effective_batch_size=8, sequence_length=256)  # 456 MiB on a GPU
LIMIT = 700 * MIB


def asked(recipe=RECIPE, limit=LIMIT, machine=None, gpu="t4"):
    part = part_with(machine or Machine())
    part.show(recipe, gpu, limit)
    assert part.wait(30)
    return part, part.predictor


def part_with(machine):
    part = WhatFits()
    part.predictor = machine
    part.quiet_s = 0
    return part


@pytest.fixture(autouse=True)
def all_cards(monkeypatch):
    monkeypatch.setattr("workbench.widgets.fits.predict_all", Machine().each)


def cells(part):
    """By length and batch: the sign and the words."""
    table = words_of(part).split("<table")[1]
    batches = re.findall(r'<th scope="col">(\d+)</th>', table)
    rows = re.findall(r'<th scope="row">(\d+)</th>(.*?)</tr>', table, re.S)
    found = {}
    for length, row in rows:
        for batch, cell in zip(batches, re.findall(r"<td[^>]*>(.*?)</td>", row, re.S), strict=True):
            found[int(length), int(batch)] = " ".join(re.sub(r"<[^>]+>", " ", cell).split())
    return found


# ---- one row ----


def test_the_largest_batch_that_fits_is_found_with_three_predictions(subtests):
    """At first the optimizer's step is the peak, which no batch changes; then the backward pass."""

    def bytes_of(batch):
        return max(300, 100 + 50 * batch)

    for limit in range(50, 4000, 37):
        with subtests.test(limit=limit):
            row = Row(replace(RECIPE, sequence_length=128), 128, (1, 2, 4, 8, 16, 32, 64), limit)
            predict = lambda recipe, gpu: SimpleNamespace(need_bytes=bytes_of(recipe.effective_batch_size))  # noqa: E731
            assert len(list(row.fill(predict, "t4"))) == len(row.predicted_bytes) == 3
            fitting = [batch for batch in row.batches if row.sign(batch) == "✓"]
            assert fitting == [batch for batch in row.recipes if bytes_of(batch) <= limit]


def test_a_cell_is_open_until_it_follows_from_what_was_predicted():
    row = Row(RECIPE, 256, (1, 2, 4, 8, 16, 32, 64), 700)
    filling = row.fill(lambda recipe, gpu: SimpleNamespace(need_bytes=100 * recipe.effective_batch_size), "t4")
    assert next(filling) == "8 × 256 tokens", "the recipe's own first"
    assert "".join(map(row.sign, row.batches)) == "…" * 7
    assert next(filling) == "2 × 256 tokens"
    assert "".join(map(row.sign, row.batches)) == "………✗✗✗✗"
    list(filling)
    assert "".join(map(row.sign, row.batches)) == "✓✓✓✗✗✗✗"


def test_a_batch_that_a_technique_cannot_split_is_left_out():
    row = Row(RECIPE | GradientAccumulation(steps=4), 256, (1, 2, 4, 8), LIMIT)
    assert set(row.recipes) == {4, 8}


def test_the_rows_go_up_to_the_models_positions_and_hold_the_recipes_own():
    rows = rows_of(replace(RECIPE, sequence_length=100, effective_batch_size=6), LIMIT)
    assert [row.length for row in rows] == [64, 100, 128, 256, 512, 1024]
    assert [row.recipe_batch for row in rows] == [None, 6, None, None, None, None]
    assert list(rows[0].recipes) == [1, 2, 4, 6, 8, 16, 32]
    assert list(rows_of(replace(RECIPE, effective_batch_size=1), LIMIT)[0].recipes) == [1, 2, 4, 8]


# ---- the part ----


def test_cards_and_cells_can_be_clicked_and_say_what_they_choose():
    part, _ = asked(limit=1000 * MIB)
    choices = [json.loads(html.unescape(found)) for found in re.findall(r'data-choice="([^"]*)"', words_of(part))]
    assert {"gpu": "h100"} in choices
    assert {"effective_batch_size": 2, "sequence_length": 64} in choices


def test_the_table_says_of_each_cell_whether_it_fits_and_how_that_is_known():
    part, machine = asked()
    found = cells(part)
    assert found[256, 8] == "✓ 456 MiB"
    assert found[1024, 64] == "✗"
    assert found[64, 2] == "✓"
    for (length, batch), words in found.items():
        assert ("✓" in words) is (200 + length * batch / 8 <= 700), (length, batch)
    assert len({recipe for recipe in machine.asked if not recipe.techniques}) < len(found) / 1.5
    assert 'class="own fits"' in words_of(part)
    assert "All is predicted" in words_of(part)
    assert 'scope="row"' in words_of(part)
    assert "<caption>" in words_of(part)


def test_the_row_of_cards_is_sorted_by_memory_with_a_word_for_each():
    part, _ = asked(replace(RECIPE, effective_batch_size=512, sequence_length=1024))  # 64.2 GiB
    chips = re.findall(r"<li class[^>]*>(.*?)</li>", words_of(part), re.S)
    assert len(chips) == 21
    assert "GeForce RTX 4060 " in chips[0]
    assert "needs 64.2 GiB of 7.6 GiB" in chips[0]
    signs = [re.sub(r"<[^>]+>", "", chip).strip()[0] for chip in chips]
    assert signs == sorted(signs, key="✗✓".index)
    assert "✗" in signs
    assert "✓" in signs
    (own,) = [chip for chip in chips if "(chosen)" in chip]
    assert "NVIDIA T4" in own


def test_a_card_that_cannot_run_it_says_so_escaped(monkeypatch):
    def each(recipe, gpus, engine):
        return [ConfigurationError("no <b>bf16</b>") if gpus == ["t4"] else Machine()(recipe, gpus[0])]

    monkeypatch.setattr("workbench.widgets.fits.predict_all", each)
    part, _ = asked()
    assert "– NVIDIA T4 (chosen) <small>cannot run it: no &lt;b&gt;bf16" in words_of(part)


def test_it_is_alive_while_switches_are_clicked_and_answers_the_newest_only():
    release, machine = threading.Event(), Machine(lambda recipe: release.wait(20))
    part = part_with(machine)
    part.show(RECIPE, "t4", LIMIT)
    assert "wb-old" in part.view._dom_classes
    part.show(RECIPE | GradientCheckpointing(), "t4", LIMIT)
    release.set()
    assert part.wait(30)
    assert cells(part)[256, 8] == "✓ 226 MiB"
    assert "wb-old" not in part.view._dom_classes
    assert sum(not recipe.techniques for recipe in machine.asked) <= 1


def test_a_length_that_cannot_be_predicted_is_said_and_the_others_are_there():
    def refuse(recipe):
        if recipe.sequence_length == 1024:
            raise ConfigurationError("1024 with 20 <i>virtual</i> tokens is too long")

    part, _ = asked(RECIPE | PrefixTuning(), machine=Machine(refuse))
    assert cells(part)[1024, 1] == "–"
    assert cells(part)[256, 8] == "✓ 456 MiB"
    assert "1024 tokens: 1024 with 20 &lt;i&gt;virtual" in words_of(part)


def test_bad_input_becomes_words_and_the_next_question_is_answered():
    part, _ = asked(recipe=None)
    assert "mend what its form says" in words_of(part)
    part.show(replace(RECIPE, model="random:no/such/model/at all"), "t4", LIMIT)
    assert part.wait(30)
    assert 'role="alert"' in words_of(part)
    part.show(RECIPE, "cpu", LIMIT)
    assert part.wait(30)
    assert cells(part)[256, 8] == "✓ 356 MiB"
