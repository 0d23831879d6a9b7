"""Every notebook, found by its file, runs under papermill and leaves true records."""

import re
from pathlib import Path

import nbformat
import pytest

from workbench.base.categories import Category
from workbench.base.paths import NOTEBOOKS
from workbench.journal.record import Record, Status, read_all
from workbench.lessons import parameters
from workbench.lessons.notebooks import execute_notebook
from workbench.techniques import REGISTRY

pytestmark = pytest.mark.dear

QUICK = {
    "steps": 4, "seeds": 1, "sequence_length": 64, "sample_tokens": 8, "longest": 256, "large_length": 64, "rungs": 2,
    "budgets": "1", "card_models": "gpt2",
}  # fmt: skip


# sentences that a lesson computes about itself, as regular expressions over what its cells print
CLAIMS = {
    "00_memory_anatomy": [r"gpt2: unattributed [\d.]+ MiB, of it workspaces 16\.\d MiB"],
    "03_gradient_checkpointing": [
        r"with the hook, blocks and last LayerNorm +48 of 48",
        r"without the hook, blocks +an error: element 0 of tensors does not require grad",
        r"without the hook, blocks and last LayerNorm +0 of 48",
        r"full, 1 × +16: peak +(\S+ MiB)(?s:.*)the end of a full backward pass, by hand: \1",
    ],
    "04_mixed_precision": [rf"{name} +by hand for cuda .* ratio (0\.99|1\.00)" for name in ("gpt2", "gpt2-xl")],
    "10_offloading": [r"activations move in a step .* ratio 1\.00", r"states +move in a step .* ratio 1\.00"],
    "11_data_loading": [r"streamed +\S+ \S+, of it the \d+ blocks by hand \S+ \S+"],
    "12_kernels": [
        r"separate segments +with room .* 520 MiB reserved",
        r"separate segments +300 MiB .* 300 MiB reserved",
        r"eager with dropout 0\.1 keeps .*: 3\.\d\d P",
    ],
    "15_out_of_memory": [
        r"losses\.append\(loss\) after backward +16 B",
        r"losses\.append\(loss\.item\(\)\) +0 B",
        r"losses\.append\(loss\), no backward +\d+ MiB",
    ],
    "18_evaluation_and_generation": [
        r"evaluation batch 8: by hand .* ratio 0\.9\d",
        r"compute_metrics .* (0\.99|1\.00)\d  ",
        r"kept by a graph, by hand: .* ratio (0\.99|1\.00)",
        r"kept by use_cache=True: by hand .* ratio 1\.000",
        r"one block around the loop .* of it copies 100%",
        r"4 beams .* 1\.000  ",
        r"one, use_cache=False +by hand .* ratio 1\.000",
        r"out of memory in the evaluation phase",
        r"status ok, evaluation",
    ],
    "20_more_than_one_gpu": [
        r"mean of two half batches beside the whole batch: \d\.\de-0[6-9] of",
        r"AdamW on two shards beside AdamW on the whole: the same",
        *(rf"{shard} +by hand .* ratios (0\.99|1\.00)\d and (0\.99|1\.00)" for shard in ("none", "full")),
        r"gradients +by hand \S+ MiB, predicted \S+ MiB\n",
        r"full +largest difference of a training loss (\d\.\de-0[6-9]|0\.0e\+00), .* (\d\.\de-0[6-9]|0\.0e\+00)\n",
        r"1 card → 8 cards, full: 1\.\d GiB saved, [78]%",
    ],
    "99_compare": [r"optimizer\(kind=adamw_8bit\)", r"attention\(implementation=eager\)"],
}  # fmt: skip

SMOKE = "05_lora"  # the one that runs in the first layer
WITHOUT_A_STEP_TO_DRAG_THROUGH = (
    "14_planner", "15_out_of_memory", "18_evaluation_and_generation", "19_clinic", "playground",
)  # fmt: skip


def a_group_of_its_own(path):
    smoke = [pytest.mark.smoke] if path.stem == SMOKE else []
    return pytest.param(path, id=path.stem, marks=[pytest.mark.xdist_group(path.stem), *smoke])


@pytest.mark.parametrize("path", [a_group_of_its_own(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))])
def test_a_notebook_runs_and_what_it_leaves_and_says_is_true(
    path, subtests, tmp_path, text_file, model_name, runs_folder, predicted_once
):
    quick = {**QUICK, "corpus": str(text_file), "large_model": model_name}
    executed = nbformat.read(str(execute_notebook(path, tmp_path / path.name, quick)), as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    records = read_all(runs_folder)

    with subtests.test("it has records if it asks for runs"):
        assert bool(records) == ("seeds" in parameters.of(path))
    for record in records:
        with subtests.test("a record is true", label=record.label):
            check_record(record)
    with subtests.test("its technique is on record beside the baseline"):
        check_techniques(path, records)
    for claim in CLAIMS.get(path.stem, []):
        with subtests.test("what it says of itself is so", claim=claim):
            assert re.search(claim, text_of(outputs))
    with subtests.test("it has steps to drag through, and they are small"):
        frames = [page for page in map(html_of, outputs) if "<iframe" in page]
        assert len(frames) == (path.stem not in WITHOUT_A_STEP_TO_DRAG_THROUGH)
        assert all(len(frame) < 300_000 for frame in frames)
    with subtests.test("what it shows needs no kernel, no network and no apology"):
        check_outputs(outputs)


def html_of(output) -> str:
    return output.get("data", {}).get("text/html", "")


def text_of(outputs) -> str:
    return "\n".join(output.get("text", "") or html_of(output) for output in outputs)


def check_record(record: Record) -> None:
    if record.status is Status.UNAVAILABLE:
        assert record.error
        return
    if record.status is Status.OOM:  # a lesson may run out of memory only under a cap that is too small
        assert 0 < record.memory_cap_bytes < record.peak_allocated_bytes == sum(record.by_category.values())
        return
    assert record.status is Status.OK
    asked = record.recipe.training_arguments()
    assert record.steps_done == len(record.losses) == asked["max_steps"]
    tokens = record.tokens_seen + record.padding_tokens
    all_tokens = QUICK["steps"] * 8 * QUICK["sequence_length"]
    assert tokens == all_tokens or (record.padding_tokens and tokens < all_tokens)
    assert sum(record.by_category.values()) == record.peak_allocated_bytes == max(record.by_phase.values())
    sharing_ranks = record.world_size if record.shard == "full" else 1
    assert record.by_category[Category.WEIGHTS] >= least_weights_bytes(record.dtype) // sharing_ranks
    assert record.held_out_loss < record.held_out_loss_before


def least_weights_bytes(dtype: str) -> int:
    """Of the embedded model: 2,762,880 numbers, 12 C² of them in the matrices of each of 4 blocks, C = 192."""
    everything, in_matrices = 2_762_880, 4 * 12 * 192**2
    known = {"bfloat16": 2 * everything, "nf4 + float32": 4 * (everything - in_matrices) + in_matrices // 2}
    return known.get(dtype, 4 * everything)


def check_techniques(path: Path, records: list[Record]) -> None:
    stem = path.stem.split("_", 1)[-1]
    taught = {name for name, technique in REGISTRY.items() if stem in (name, technique.family)}
    if taught:
        labels = {record.label for record in records if record.status in (Status.OK, Status.UNAVAILABLE)}
        assert taught | {"baseline"} <= {label.split("(")[0] for label in labels}


def check_outputs(outputs) -> None:
    """tests/browser/test_site.py has the page around them."""
    for shown in outputs:
        data = shown.get("data", {})
        assert not data or {"text/html", "image/png", "text/markdown", "text/plain"} & set(data), list(data)
        assert "Warning" not in shown.get("text", "") + data.get("text/plain", "")
        for fetched in ("<script src", "<link", 'src="http', "url(http", "@import"):
            assert fetched not in html_of(shown), fetched
