"""The map of batch × length: its cells, and the planner's change beside it."""

from workbench.advise import frontier as module
from workbench.advise.frontier import Frontier
from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe

MIB = 2**20
RECIPE = Recipe(model="gpt2-tiny", effective_batch_size=8, sequence_length=256)


class Needed:
    """100 MiB, and 1 MiB for 8 tokens at once, a tenth of that with checkpointing."""

    gpu, context_bytes, flops, capacity_bytes = "t4", 0, 1000, None

    def __init__(self, recipe):
        names = {technique.name for technique in recipe.techniques}
        tokens = recipe.training_arguments()["per_device_train_batch_size"] * recipe.sequence_length
        activations = tokens * MIB // (80 if "gradient_checkpointing" in names else 8)
        self.by_category, self.work = {"weights": 100 * MIB, "activations": activations}, {"fp32_flops": 1000}
        self.peak_allocated_bytes = self.peak_reserved_bytes = self.need_bytes = 100 * MIB + activations


def filled(limit, recipe=RECIPE, refuse=lambda recipe: False):
    asked = []

    def predict(recipe, gpu):
        asked.append(recipe)
        if refuse(recipe):
            raise ConfigurationError("too large <b>")
        return Needed(recipe)

    found = Frontier(recipe, "t4", limit * MIB, predict)
    assert all(isinstance(looking, str) for looking in found.fill())
    return found, asked


def test_every_verdict_is_that_of_a_prediction(subtests):
    for limit in (120, 300, 700, 5000):
        with subtests.test(limit=limit):
            table, _ = filled(limit)
            for row in (*table.rows, *table.beside):
                needed = {batch: Needed(recipe).peak_reserved_bytes for batch, recipe in row.recipes.items()}
                assert row.fitting == [batch for batch, size in needed.items() if size <= limit * MIB]


def test_beside_it_stands_the_planners_change_for_the_recipe_if_it_does_not_fit():
    found, _ = filled(300)
    assert found.change.recipe.sequence_length == 256
    assert found.change.recipe.effective_batch_size == 8
    assert found.change.fits
    assert found.rows[2].own not in found.rows[2].fitting
    assert found.beside[2].own in found.beside[2].fitting
    assert [row.batches for row in found.beside] == [row.batches for row in found.rows]


def test_where_the_recipe_fits_the_change_is_for_the_fewest_tokens_that_do_not():
    found, _ = filled(700)
    shape = found.change.recipe.effective_batch_size, found.change.recipe.sequence_length
    assert shape == (8, 1024), "8 MiB each; of equal products the smallest batch"
    assert found.change.words in found.change_words


def test_where_all_fits_or_nothing_helps_there_is_no_second_table():
    found, asked = filled(2**20)
    assert (found.change, found.beside) == (None, [])
    assert "nothing to change" in found.change_words
    assert not any(recipe.techniques for recipe in asked)
    found, _ = filled(90)
    assert (found.change, found.beside) == (None, [])
    assert "knows no change" in found.change_words


def test_what_is_refused_is_refused_to_larger_batches_and_the_others_are_there():
    found, asked = filled(10**6, refuse=lambda recipe: recipe.effective_batch_size * recipe.sequence_length > 10_000)
    by_length = {row.length: row for row in found.rows}
    assert set(by_length[1024].predicted_bytes) == {8}
    assert by_length[1024].fitting == [1, 2, 4, 8]
    assert by_length[64].fitting == [1, 2, 4, 8, 16, 32, 64]
    assert by_length[1024].refused == "too large <b>"
    assert sum(recipe.sequence_length == 1024 and recipe.effective_batch_size > 8 for recipe in asked) == 2


def test_rows_go_down_to_the_recipes_length_where_a_model_takes_many(monkeypatch):
    monkeypatch.setattr(module, "positions_of", lambda recipe: 2**15)
    assert [row.length for row in module.rows_of(RECIPE, 1)] == [2**n for n in range(8, 16)]
