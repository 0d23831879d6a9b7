"""Both engines against runs on a real H100, `data/reference/h100/runs.csv`.

It had PyTorch 2.11, whose allocator orders free blocks otherwise than that of today (`gpus/caching_allocator.py`), so
reserved bytes are not compared.
"""

import csv

import pytest
from against_speeds import KINDS, ON_AN_H100, REFERENCE, apply_label, candidate
from verify import EMULATED_GRID, recipes

from workbench.base.paths import DATA
from workbench.prediction.predict import EMULATOR, SHADOW, predict

CLOSE = 0.005  # as for the emulated cards; versions differ
SOME = 6  # spread over the configurations


def measured():
    """Allocated bytes, by what was run."""
    with (DATA / "reference" / "h100" / "runs.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not row["dropout"]]
    names = ("model", "micro_batch_size", "sequence_length", "techniques")
    return {tuple(row[name] for name in names): int(row["allocated_bytes"]) for row in rows}


def run_as(recipe):
    size = recipe.training_arguments()["per_device_train_batch_size"]
    return recipe.model, str(size), str(recipe.sequence_length), recipe.label


REAL = measured()
DONE = [recipe for recipe in recipes(EMULATED_GRID) if run_as(recipe) in REAL and recipe.model == "random:gpt2"]
CHOSEN = DONE[:: len(DONE) // SOME]


def compared(recipe, engine, subtests):
    with subtests.test(recipe=recipe.label):
        predicted = predict(recipe, "h100", engine=engine)
        assert predicted.peak_allocated_bytes == pytest.approx(REAL[run_as(recipe)], rel=CLOSE)


def test_the_shadow_predicts_what_was_allocated(subtests):
    compared(CHOSEN[0], SHADOW, subtests)


@pytest.mark.dear
def test_the_shadow_predicts_what_other_recipes_allocated(subtests):
    for recipe in CHOSEN[1:]:
        compared(recipe, SHADOW, subtests)


@pytest.mark.dear
@pytest.mark.xdist_group("emulated")
@pytest.mark.usefixtures("emulator")
def test_the_emulator_predicts_what_was_allocated(subtests):
    for recipe in CHOSEN:
        compared(recipe, EMULATOR, subtests)


@pytest.mark.dear
def test_the_work_of_a_step_is_what_the_estimates_on_record_were_made_of(subtests):
    """Which are held against the speeds of that card in `tests/gpus/test_roofline.py`."""
    with (REFERENCE / "h100" / "gpt2-124m" / "time.csv").open(encoding="utf-8") as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    for label in ("baseline", "activation_offloading", "optimizer_offloading", "mixed_precision"):
        with subtests.test(label=label):
            work = candidate(apply_label(ON_AN_H100, label), "h100").predicted.work
            recorded = [int(rows[label][kind]) for kind in KINDS]
            assert [work.get(kind, 0) for kind in KINDS] == pytest.approx(recorded, rel=0.02)
