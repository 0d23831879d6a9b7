"""The shadow against PyTorch's own allocator: peaks of runs on emulated GPUs, as `tools/verify.py --device
emulated:GPU` has written them down. No GPU, no emulator and no CUDA build is needed to compare.
"""

import json
from dataclasses import replace

import pytest
from verify import EMULATED_GRID, Check, recipes, verify

from workbench.base.paths import DATA
from workbench.gpus.catalogue import GPUS
from workbench.prediction.predict import EMULATOR, SHADOW, predict, predict_all
from workbench.recipe import Recipe
from workbench.techniques import Lora, MixedPrecision

ALLOCATED, RESERVED, MIB = 0.005, 0.02, 2**20
CARDS = ("t4", "h100")
QUICK = 8  # of the configurations, spread over all of them
CHOSEN = recipes(EMULATED_GRID)[:: -(-len(recipes(EMULATED_GRID)) // QUICK)]


def measured(gpu):
    """The checks that have a measurement, by the recipe's id."""
    path = DATA / "reference" / "emulated" / gpu / "verification.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["checks"]
    checks = [Check(**{name: value for name, value in row.items() if "error" not in name}) for row in rows]
    return {check.recipe_id: check for check in checks if check.measured_allocated_bytes}


def compared(recipe, subtests):
    """A prediction for each card, and what was measured on it."""
    by_card = {gpu: measured(gpu) for gpu in CARDS}
    truth = {gpu: checks[recipe.id] for gpu, checks in by_card.items() if recipe.id in checks}
    assert truth
    for gpu, predicted in zip(truth, predict_all(recipe, truth), strict=True):
        with subtests.test(model=recipe.model, recipe=recipe.label, gpu=gpu):
            allocated, reserved = truth[gpu].measured_allocated_bytes, truth[gpu].measured_reserved_bytes
            assert predicted.peak_allocated_bytes == pytest.approx(allocated, rel=ALLOCATED)
            assert predicted.peak_reserved_bytes == pytest.approx(reserved, rel=RESERVED)


def test_the_prediction_is_what_pytorch_allocates(subtests):
    compared(CHOSEN[0], subtests)


@pytest.mark.dear
def test_the_predictions_of_other_recipes_are_too(subtests):
    for recipe in CHOSEN[1:]:
        compared(recipe, subtests)


@pytest.mark.dear
@pytest.mark.xdist_group("emulated")
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("gpu", CARDS)
def test_a_part_of_the_grid_measures_what_is_written_down(gpu, tmp_path):
    """With the pinned versions to the byte; a newer one may allocate a little otherwise."""
    checks = verify(CHOSEN[::3], gpu=gpu, device=f"emulated:{gpu}", output=tmp_path / "verification.json")
    written = measured(gpu)
    for check in checks:
        known = written.get(check.recipe_id, check)
        assert (check.measured_allocated_bytes is None) is (check.recipe_id not in written)
        assert check.measured_allocated_bytes == pytest.approx(known.measured_allocated_bytes, rel=1e-3)
        assert check.measured_reserved_bytes == pytest.approx(known.measured_reserved_bytes, rel=5e-3)


@pytest.mark.dear
@pytest.mark.xdist_group("emulated")
@pytest.mark.usefixtures("emulator")
def test_the_shadow_of_every_kind_of_model_is_what_pytorch_allocates(kinds, subtests):
    adapted = Recipe(techniques=(MixedPrecision(dtype="bf16"), Lora(targets="all-linear")))
    chosen = [(folder, Recipe()) for folder in kinds.iterdir()]
    chosen += [(kinds / kind, adapted) for kind in ("falcon", "gemma2", "llama", "mixtral", "opt")]
    for folder, recipe in chosen:
        recipe = replace(recipe, model=f"random:{folder}", sequence_length=16)
        with subtests.test(kind=folder.name, recipe=recipe.label):
            shadow, emulator = (predict(recipe, "h100", engine=engine) for engine in (SHADOW, EMULATOR))
            assert shadow.peak_allocated_bytes == pytest.approx(emulator.peak_allocated_bytes, rel=ALLOCATED)
            segment = 2 * MIB  # in models so small that one is more than the band
            reserved = pytest.approx(emulator.peak_reserved_bytes, rel=RESERVED, abs=segment)
            assert shadow.peak_reserved_bytes == reserved


@pytest.mark.dear
@pytest.mark.xdist_group("emulated")
@pytest.mark.usefixtures("emulator")
def test_label_smoothing_and_noise_on_embeddings_are_what_pytorch_allocates():
    recipe = Recipe(model="random:gpt2-tiny")
    plain_bytes = predict(recipe, "t4", engine=EMULATOR).peak_allocated_bytes
    for arguments in ({"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 5}):
        asked = replace(recipe, arguments=arguments)
        emulated, shadow = (predict(asked, "t4", engine=engine) for engine in (EMULATOR, SHADOW))
        assert shadow.peak_allocated_bytes == emulated.peak_allocated_bytes
        assert shadow.peak_reserved_bytes == emulated.peak_reserved_bytes
        assert (emulated.peak_allocated_bytes > plain_bytes) is ("label_smoothing_factor" in arguments)


def test_what_is_written_down_is_the_whole_grid_and_says_so(subtests):
    paths = sorted((DATA / "reference" / "emulated").glob("*/verification.json"))
    assert {path.parent.name for path in paths} >= set(CARDS)
    grid = [recipe.id for recipe in recipes(EMULATED_GRID)]
    for path in paths:
        with subtests.test(path=str(path)):
            written = json.loads(path.read_text(encoding="utf-8"))
            assert written["gpu"] == path.parent.name
            assert written["gpu"] in GPUS
            assert [row["recipe_id"] for row in written["checks"]] == grid
