"""The shadow against PyTorch's own allocator: peaks of runs on an emulated GPU, as `tools/judge.py` has measured them.

The sizes stand in `data/reference/emulated/golden.json`; no GPU, no emulator and no CUDA build is needed to compare.
"""

import json
from typing import Any

import pytest

from workbench.paths import DATA
from workbench.predict.predict import predict_all
from workbench.recipe import Recipe
from workbench.techniques import parse_technique

GOLDEN = json.loads((DATA / "reference" / "emulated" / "golden.json").read_text(encoding="utf-8"))
ALLOCATED, RESERVED = 0.005, 0.02
QUICK = 8  # of the configurations, spread over all of them


def chosen() -> list[dict[str, Any]]:
    step = -(-len(GOLDEN["configurations"]) // QUICK)
    found: list[dict[str, Any]] = GOLDEN["configurations"][::step]
    return found


@pytest.mark.parametrize("entry", chosen(), ids=lambda entry: entry["name"])
def test_the_prediction_is_what_pytorch_allocates(entry: dict[str, Any]) -> None:
    recipe = Recipe(
        model=entry["model"], effective_batch_size=entry["batch"], sequence_length=entry["length"], steps=3,
        techniques=tuple(parse_technique(text) for text in entry["techniques"]),
    )  # fmt: skip
    truth = entry["peaks"]
    for gpu, found in zip(truth, predict_all(recipe, truth), strict=True):
        allocated, reserved = truth[gpu]
        assert found.peak_allocated_bytes == pytest.approx(allocated, rel=ALLOCATED), gpu
        assert found.peak_reserved_bytes == pytest.approx(reserved, rel=RESERVED), gpu
