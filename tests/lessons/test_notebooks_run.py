"""Every notebook, found by its file, runs under papermill and leaves true records."""

import re
from pathlib import Path

import nbformat
import pytest

from workbench.lessons import parameters
from workbench.lessons.notebooks import execute_notebook
from workbench.measure.categories import Category
from workbench.paths import NOTEBOOKS
from workbench.recipe import Recipe
from workbench.records.record import Record, Status, read_all
from workbench.techniques import REGISTRY

QUICK = {
    "steps": 4, "seeds": 1, "sequence_length": 64, "sample_tokens": 8, "longest": 256, "large_length": 64, "rungs": 2,
    "budgets": "1",
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

EVERY = [pytest.param(p, id=p.stem, marks=pytest.mark.xdist_group(p.stem)) for p in sorted(NOTEBOOKS.glob("*.ipynb"))]


@pytest.fixture(scope="module", params=EVERY)
def executed(request, tmp_path_factory, text_file, model_name, predictions) -> tuple[Path, Path, list[Record]]:
    folder = tmp_path_factory.mktemp(request.param.stem)
    (folder / "runs").mkdir()
    (folder / "runs" / "predictions").symlink_to(predictions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(folder / "runs"))
        quick = {**QUICK, "corpus": str(text_file), "large_model": model_name}
        output = execute_notebook(request.param, folder / request.param.name, quick)
    return request.param, output, read_all(folder / "runs")


def test_it_runs_and_its_records_are_true(executed):
    path, _, records = executed
    asks_for_runs = "seeds" in parameters.of(path)
    assert bool(records) == asks_for_runs
    for record in records:
        if record.status is Status.UNAVAILABLE:
            assert record.error
            continue
        if record.status is Status.OOM:  # a lesson may run out of memory only under a cap that is too small
            assert 0 < record.memory_cap_bytes < record.peak_allocated_bytes == sum(record.by_category.values())
            continue
        assert record.status is Status.OK
        asked = Recipe.from_dict(record.recipe).training_arguments()
        assert record.steps_done == len(record.losses) == asked["max_steps"]
        tokens, full = record.tokens_seen + record.padding_tokens, QUICK["steps"] * 8 * QUICK["sequence_length"]
        assert tokens < full if record.padding_tokens and tokens != full else tokens == full
        assert sum(record.by_category.values()) == record.peak_allocated_bytes == max(record.by_phase.values())
        ranks = record.world_size if record.shard == "full" else 1  # that share them
        assert record.by_category[Category.WEIGHTS] >= least_weights_bytes(record.dtype) // ranks
        assert record.held_out_loss < record.held_out_loss_before


def least_weights_bytes(dtype: str) -> int:
    """Of the embedded model: 2,762,880 numbers, 12 C² of them in the matrices of each of 4 blocks, C = 192."""
    everything, in_matrices = 2_762_880, 4 * 12 * 192**2
    known = {"bfloat16": 2 * everything, "nf4 + float32": 4 * (everything - in_matrices) + in_matrices // 2}
    return known.get(dtype, 4 * everything)


def test_its_technique_is_on_record_beside_the_baseline(executed):
    path, _, records = executed
    stem = path.stem.split("_", 1)[-1]
    taught = {name for name, technique in REGISTRY.items() if stem in (name, technique.family)}
    if taught:
        labels = {record.label for record in records if record.status in (Status.OK, Status.UNAVAILABLE)}
        assert taught | {"baseline"} <= {label.split("(")[0] for label in labels}


def test_what_it_says_of_itself_is_so(executed):
    path, output, _ = executed
    outputs = [o for cell in nbformat.read(str(output), as_version=4).cells for o in cell.get("outputs", [])]
    told = "\n".join(o.get("text", "") or o.get("data", {}).get("text/html", "") for o in outputs)
    for claim in CLAIMS.get(path.stem, []):
        assert re.search(claim, told), claim


def test_it_has_steps_to_drag_through_and_they_are_small(executed):
    path, output, _ = executed
    outputs = [o for cell in nbformat.read(str(output), as_version=4).cells for o in cell.get("outputs", [])]
    frames = [page for o in outputs if "<iframe" in (page := o.get("data", {}).get("text/html", ""))]
    without = ("14_planner", "15_out_of_memory", "18_evaluation_and_generation", "19_clinic", "playground")
    assert len(frames) == (path.stem not in without)
    assert all(len(frame) < 300_000 for frame in frames)


def test_what_it_shows_needs_no_kernel_no_network_and_no_apology(executed):
    """tests/test_site.py has the page around it."""
    _, output, _ = executed
    outputs = [o for cell in nbformat.read(str(output), as_version=4).cells for o in cell.get("outputs", [])]
    for shown in outputs:
        data = shown.get("data", {})
        assert not data or {"text/html", "image/png", "text/markdown", "text/plain"} & set(data), list(data)
        assert "Warning" not in shown.get("text", "") + data.get("text/plain", "")
        page = data.get("text/html", "")
        for fetched in ("<script src", "<link", 'src="http', "url(http", "@import"):
            assert fetched not in page, fetched


def test_it_runs_alone_from_its_own_folder(tmp_path, monkeypatch):
    """As in JupyterLab: the kernel's folder is the notebook's, wherever that is."""
    (tmp_path / "beside.txt").write_text("read from the notebook's folder")
    lesson = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(open('beside.txt').read())")])
    lesson.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    nbformat.write(lesson, tmp_path / "own.ipynb")
    execute_notebook(tmp_path / "own.ipynb", tmp_path / "out" / "executed.ipynb")
    (cell,) = nbformat.read(str(tmp_path / "out" / "executed.ipynb"), as_version=4).cells
    assert cell.outputs[0].text == "read from the notebook's folder\n"
