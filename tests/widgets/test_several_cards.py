"""Several cards: the bar of a rank beside that of one card alone, with a made-up predictor."""

import re

import pytest
from parts import MIB, Machine, words_of

from workbench.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.widgets.several import SeveralCards

RECIPE = Recipe(model="gpt2-tiny", effective_batch_size=16, sequence_length=256)  # 712 MiB on one card


@pytest.fixture
def part():
    made = SeveralCards(None, Machine())
    made.newest.quiet_s = 0
    return made


def asked(part, recipe=RECIPE, limit=500 * MIB, gpu="t4"):
    part.show(recipe, gpu, limit)
    assert part.newest.wait(30)
    return words_of(part)


def bars(words):
    return re.findall(r'role="img" aria-label="(.*?)"', words, re.S)


def test_the_bar_of_a_rank_stands_beside_that_of_one_card(part):
    one, each = bars(asked(part))
    assert one.startswith("One card alone: ✗ does not fit, 212 MiB over. weights 100 MiB, activations 512 MiB,")
    assert each.startswith("Each of 2 cards: ✓ fits. weights 50.0 MiB, activations 256 MiB,")
    assert part.predictor.__wrapped__.shards == ["none", "full"]
    assert "--batch-size 16" in words_of(part)
    assert "--ranks 2 --shard full" in words_of(part)
    assert "not measured (made up)" in words_of(part)


def test_what_is_chosen_here_is_asked_at_once(part):
    asked(part)
    part.count.value, part.shard.value, part.batch.value = 4, "gradients", False
    assert part.newest.wait(30)
    assert bars(words_of(part))[1].startswith(
        "Each of 4 cards: ✗ does not fit, 137 MiB over. weights 25.0 MiB, activations 512"
    )
    assert part.predictor.__wrapped__.asked[-1].effective_batch_size == 64
    assert part.predictor.__wrapped__.shards[-1] == "gradients"


def test_what_cannot_be_shared_is_said_and_the_next_question_is_answered(part):
    def refuse(recipe):
        if recipe.sequence_length == 128:
            raise ConfigurationError("ranks: 2 <b>cannot</b> share it")

    part.predictor.__wrapped__.answer = refuse
    assert "2 &lt;b&gt;cannot" in asked(part, Recipe(model="gpt2-tiny", sequence_length=128))
    assert "mend what its form says" in asked(part, None)
    assert len(bars(asked(part))) == 2
