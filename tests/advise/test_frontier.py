"""The map of batch × length: every cell is what a prediction says of it."""

from types import SimpleNamespace

from workbench.advise.frontier import rows_of
from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe

RECIPE = Recipe(model="gpt2-tiny", effective_batch_size=8, sequence_length=256)


def need_of(recipe):
    return 100 + recipe.effective_batch_size * recipe.sequence_length // 8


def predict(recipe, gpu):
    if recipe.effective_batch_size * recipe.sequence_length > 10_000:
        raise ConfigurationError("too large <b>")
    return SimpleNamespace(need_bytes=need_of(recipe))


def filled(limit):
    rows = rows_of(RECIPE, limit)
    for row in rows:
        assert all(isinstance(looking, str) for looking in row.fill(predict, "t4"))
    return {row.length: row for row in rows}


def fitting(row):
    return [batch for batch in row.batches if row.sign(batch) == "✓"]


def test_every_verdict_is_that_of_a_prediction(subtests):
    for limit in (120, 300, 700):
        with subtests.test(limit=limit):
            for row in filled(limit).values():
                assert fitting(row) == [batch for batch, recipe in row.recipes.items() if need_of(recipe) <= limit]


def test_what_is_refused_is_refused_to_larger_batches_and_the_others_are_there():
    rows = filled(10**6)
    assert set(rows[1024].predicted_bytes) == {8}
    assert fitting(rows[1024]) == [1, 2, 4, 8]
    assert fitting(rows[64]) == [1, 2, 4, 8, 16, 32, 64]
    assert rows[1024].refused == "too large <b>"
