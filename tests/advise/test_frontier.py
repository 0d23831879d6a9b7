"""The map of batch × length: its cells, the planner's change beside it, and the command."""

import json

import pytest

from workbench.__main__ import main
from workbench.advise import frontier as module
from workbench.advise.frontier import Frontier, frontier
from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.techniques import GradientAccumulation

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

    found = Frontier(recipe, "t4", limit * MIB, predict, "shadow")
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
    assert found.change.words in str(found)


def test_where_all_fits_or_nothing_helps_there_is_no_second_table():
    found, asked = filled(2**20)
    assert (found.change, found.beside) == (None, [])
    assert "nothing to change" in str(found)
    assert not any(recipe.techniques for recipe in asked)
    found, _ = filled(90)
    assert (found.change, found.beside) == (None, [])
    assert "knows no change" in str(found)


def test_what_is_refused_is_refused_to_larger_batches_and_the_others_are_there():
    found, asked = filled(10**6, refuse=lambda recipe: recipe.effective_batch_size * recipe.sequence_length > 10_000)
    by_length = {row.length: row for row in found.rows}
    assert set(by_length[1024].predicted_bytes) == {8}
    assert by_length[1024].fitting == [1, 2, 4, 8]
    assert by_length[64].fitting == [1, 2, 4, 8, 16, 32, 64]
    assert "refused, 1024 tokens: too large <b>" in str(found)
    assert sum(recipe.sequence_length == 1024 and recipe.effective_batch_size > 8 for recipe in asked) == 2


def test_rows_go_down_to_the_recipes_length_where_a_model_takes_many(monkeypatch):
    monkeypatch.setattr(module, "positions_of", lambda recipe: 2**15)
    assert [row.length for row in module.rows_of(RECIPE, 1)] == [2**n for n in range(8, 16)]


def test_the_text_has_numbers_where_there_are_predictions_and_signs_elsewhere():
    found, _ = filled(700, RECIPE | GradientAccumulation(steps=4))
    lines = str(found).splitlines()
    row = next(line for line in lines if line.split()[:1] == ["256"])
    assert row.split()[1:3] == ["–", "–"], "batches of 1 and 2 are not split in four"
    assert "[✓ 164 MiB]" in row
    assert "by the shadow, not measured" in lines[0]


def test_a_recipe_that_cannot_be_predicted_is_an_error(monkeypatch):
    def refuse(recipe, gpu, engine):
        raise ConfigurationError("no such thing")

    monkeypatch.setattr(module.prediction, "predict", refuse)
    with pytest.raises(ConfigurationError, match="no such thing"):
        frontier(RECIPE, "t4")


def test_the_command_prints_draws_and_gives_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module.prediction, "predict", lambda recipe, gpu, engine: Needed(recipe))
    recipe = ["gpt2-tiny", "--sequence-length", "1024", "--batch-size", "128"]
    arguments = ["plan", *recipe, "--frontier", "--gpu", "t4"]
    assert main([*arguments, "--output", str(tmp_path / "map.png")]) == 0
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert "planner's first for 128 × 1024 tokens" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["fitting"] == [16, 32, 64, 128, 256, 512, 1024]
    assert found["change"]["fits"]
    assert len(found["beside"]) == len(found["rows"])
    assert main([*arguments, "--output", "map.docx"]) == 2
    assert "must end in .png" in capsys.readouterr().err


MISPLACED = (
    (["--frontier", "--budget", "8GiB"], "Drop --budget, --most-changes, --life, --settings."),
    (["--frontier", "--most-changes", "2"], "Drop --budget, --most-changes, --life, --settings."),
    (["--frontier", "--life"], "Drop --budget, --most-changes, --life, --settings."),
    (["--output", "map.png"], "--engine and --output belong to --frontier."),
    (["--engine", "shadow"], "--engine and --output belong to --frontier."),
)


def test_what_belongs_to_the_other_search_is_refused(capsys, subtests):
    for options, message in MISPLACED:
        with subtests.test(options=options):
            assert main(["plan", "gpt2-tiny", *options]) == 2
            assert message in capsys.readouterr().err
