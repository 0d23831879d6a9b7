"""A and B side by side, with a made-up predictor."""

import re
from dataclasses import replace

import pytest
from parts import MIB, Machine, words_of

from workbench.errors import UnavailableError
from workbench.recipe import Recipe
from workbench.techniques import GradientAccumulation, GradientCheckpointing, Lora
from workbench.widgets.pinned import Pinned

A = Recipe(model="gpt2-tiny", effective_batch_size=16, sequence_length=256)
B = replace(A, steps=3) | GradientCheckpointing()


@pytest.fixture
def part():
    made = Pinned(None, Machine())
    made.newest.quiet_s = 0
    made.choose = lambda recipe: made.show(recipe, "t4", 500 * MIB)
    return made


def compare(part, a=A, b=B, gpu="t4"):
    part.show(a, gpu, 500 * MIB)
    part.pin.click()
    part.show(b, gpu, 500 * MIB)
    assert part.newest.wait(30)
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', words_of(part), re.S)
    return {name: [" ".join(c.split()) for c in re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)] for name, row in rows}


def mib(text):
    return float(text.replace("−", "-").replace("±0", "0 MiB").removesuffix(" MiB").replace("0 B", "0"))


def test_the_rows_sum_to_the_total_and_the_difference_has_a_sign(part):
    rows = compare(part)
    assert rows["activations"] == ["512 MiB", "51.2 MiB", "−461 MiB"]
    assert rows["context"] == ["72.0 MiB", "72.0 MiB", "±0"]
    total = rows.pop("needed in all")
    assert total == ["712 MiB", "251 MiB", "−461 MiB"]
    parts = ("weights", "activations", "reserved, not in use", "context")
    for column in range(3):
        assert sum(mib(rows[name][column]) for name in parts) == pytest.approx(mib(total[column]), abs=1)


def test_both_verdicts_are_words(part):
    assert compare(part)["verdict"][:2] == ["✗ does not fit, 212 MiB over", "✓ fits, 249 MiB to spare"]


def test_what_differs_is_said_by_name(part):
    rows = compare(part, A | Lora(rank=4), B | GradientAccumulation(steps=2))
    assert rows["steps"] == ["12", "3", ""]
    assert rows["lora"][0].startswith("rank 4, ")
    assert rows["lora"][1] == "–"
    assert rows["gradient accumulation"][:2] == ["–", "steps 2"]
    assert "sequence length" not in rows


def test_on_a_cpu_nothing_is_reserved_beside(part):
    rows = compare(part, gpu="cpu")
    assert rows["needed in all"][0] == "612 MiB"
    assert rows["reserved, not in use"] == ["0 B", "0 B", "±0"]


def test_swapping_takes_the_pinned_one_and_pins_the_other(part):
    compare(part)
    part.swap.click()
    assert part.newest.wait(30)
    assert part.pinned == B
    assert part._now[0] == A
    assert "+461 MiB" in words_of(part)


def test_buttons_are_off_where_they_mean_nothing(part):
    assert [part.pin.disabled, part.swap.disabled, part.clear.disabled] == [True, True, True]
    part.show(A, "t4", 500 * MIB)
    assert [part.pin.disabled, part.swap.disabled, part.clear.disabled] == [False, True, True]
    part.pin.click()
    assert [part.pin.disabled, part.swap.disabled, part.clear.disabled] == [False, True, False]
    assert part.newest.wait(30)
    assert "still the same as A" in words_of(part)
    part.show(B, "t4", 500 * MIB)
    assert not part.swap.disabled
    part.clear.click()
    assert part.newest.wait(30)
    assert part.pinned is None
    assert "Pin the recipe as A" in words_of(part)


def test_bad_input_becomes_words(part):
    compare(part)
    part.show(None, "t4", 500 * MIB)
    assert part.newest.wait(30)
    assert "mend what its form says" in words_of(part)

    def fail(recipe):
        raise UnavailableError("model: <b>hub</b> is away. Try again.")

    part.predictor = Machine(fail)
    part.show(A, "t4", 500 * MIB)
    assert part.newest.wait(30)
    assert "&lt;b&gt;hub&lt;/b&gt; is away" in words_of(part)
