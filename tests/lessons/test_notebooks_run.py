"""Every notebook, found by its file, runs under papermill, leaves true records, and says what its cells show."""

import html
import re
from pathlib import Path

import nbformat
import pytest

from workbench.base.categories import Category
from workbench.base.paths import NOTEBOOKS
from workbench.journal.record import Record, Status, read_all
from workbench.lessons.notebooks import execute_notebook
from workbench.techniques import REGISTRY

pytestmark = pytest.mark.dear

SMOKE = "05_lora"  # the one that runs in the first layer
# a number with its unit, as prose and outputs write it: 84.1 MiB, 49 %, 1.10×; the product 8 × 1,024 is none
NUMBER = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)(\s?MiB|\s?GiB|\s?KiB|\s?%|×)(?!\w)")
# numbers of the prose that no cell of the lesson prints: arithmetic, or somebody else's, each with where it is from
FROM_ELSEWHERE: dict[str, dict[str, str]] = {}
# what a lesson predicts live: ranks and whole searches are no card of a table
LIVE = ("14_planner", "15_out_of_memory", "18_evaluation_and_generation", "20_more_than_one_gpu", "playground")


def a_group_of_its_own(path):
    smoke = [pytest.mark.smoke] if path.stem == SMOKE else []
    return pytest.param(path, id=path.stem, marks=[pytest.mark.xdist_group(path.stem), *smoke])


@pytest.mark.parametrize("path", [a_group_of_its_own(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))])
def test_a_notebook_runs_and_what_it_leaves_and_says_is_true(path, subtests, tmp_path, runs_folder, monkeypatch):
    monkeypatch.delenv("WORKBENCH_ENGINE")  # what comes with the workbench is taken, as a reader has it
    executed = nbformat.read(str(execute_notebook(path, tmp_path / path.name)), as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    records = read_all(runs_folder)

    for record in records:
        with subtests.test("a record is true", label=record.label):
            check_record(record)
    with subtests.test("its technique is on record beside the baseline"):
        check_techniques(path, records)
    with subtests.test("a number of the prose is one that a cell shows"):
        assert unsupported_numbers(executed) - set(FROM_ELSEWHERE.get(path.stem, {})) == set()
    with subtests.test("several seeds are those of a committed table"):
        check_seeds(executed)
    with subtests.test("nothing that comes with the workbench is predicted again"):
        assert path.stem in LIVE or not list(runs_folder.glob("predictions/*"))
    with subtests.test("what it shows is small, and needs no kernel, no network and no apology"):
        check_outputs(outputs)


def html_of(output) -> str:
    return output.get("data", {}).get("text/html", "")


def words_of(output) -> str:
    """What a reader sees of an output: without the markup, and without what is in the frame of a step."""
    page = re.sub(r"<iframe.*?</iframe>", " ", html_of(output), flags=re.DOTALL)
    texts = [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
    texts += [output.get("data", {}).get("text/markdown", ""), html.unescape(re.sub(r"<[^>]+>", " ", page))]
    return "\n".join(texts + re.findall(r'(?:alt|aria-label)="([^"]*)"', page))


def numbers_in(text: str) -> set[tuple[str, str]]:
    return {(number.replace(",", ""), unit.strip()) for number, unit in NUMBER.findall(text)}


def unsupported_numbers(executed) -> set[str]:
    """Numbers with a unit in the prose which no output and no title says. A column may have the unit in its head."""
    prose = "\n".join(cell.source for cell in executed.cells if cell.cell_type == "markdown")
    shown = "\n".join(words_of(output) for cell in executed.cells for output in cell.get("outputs", []))
    plain = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)", shown.replace(",", "")))
    missing = set()
    for number, unit in numbers_in(prose):
        if (number, unit) not in numbers_in(shown) and not (
            number in plain and unit in ("MiB", "GiB") and unit in shown
        ):
            missing.add(f"{number} {unit}")
    return missing


def check_seeds(executed) -> None:
    code = "\n".join(cell.source for cell in executed.cells if cell.cell_type == "code")
    prose = "\n".join(cell.source for cell in executed.cells if cell.cell_type == "markdown")
    if re.search(r"\b(two|three|[2-9]) seeds\b", prose, flags=re.IGNORECASE):
        assert "verdicts(" in code or "headline_losses" in code


def check_record(record: Record) -> None:
    if record.status is Status.UNAVAILABLE:
        assert record.error
        return
    if record.status is Status.OOM:  # a lesson may run out of memory only under a cap that is too small
        assert 0 < record.memory_cap_bytes < record.peak_allocated_bytes == sum(record.by_category.values())
        return
    assert record.status is Status.OK
    arguments = record.recipe.training_arguments()
    shape = record.recipe.shape
    assert record.steps_done == len(record.losses) == arguments["max_steps"]
    tokens = record.tokens_seen + record.padding_tokens
    all_tokens = shape.steps * record.recipe.shape.sequences * shape.tokens
    assert tokens == all_tokens or (record.padding_tokens and tokens < all_tokens)
    assert sum(record.by_category.values()) == record.peak_allocated_bytes == max(record.by_phase.values())
    sharing_ranks = record.world_size if record.shard == "full" else 1
    assert record.by_category[Category.WEIGHTS] >= least_weights_bytes(record.dtype) // sharing_ranks
    assert record.held_out_loss < record.held_out_loss_before


def least_weights_bytes(dtype: str) -> int:
    """Of the embedded model: 2,762,880 numbers, 12 C² of them in the matrices of each of 4 blocks, C = 192."""
    everything, in_matrices = 2_762_880, 4 * 12 * 192**2
    stored = {"bfloat16": 2 * everything, "nf4 + float32": 4 * (everything - in_matrices) + in_matrices // 2}
    return stored.get(dtype, 4 * everything)


def check_techniques(path: Path, records: list[Record]) -> None:
    stem = path.stem.split("_", 1)[-1]
    taught = {name for name, technique in REGISTRY.items() if stem in (name, technique.family)}
    if taught:
        labels = {record.label for record in records if record.status in (Status.OK, Status.UNAVAILABLE)}
        # a compiled step takes a minute: its run is a committed one, which the lesson's parameter `compile` makes anew
        assert {*taught, "baseline"} - {"torch_compile"} <= {label.split("(")[0] for label in labels}


def check_outputs(outputs) -> None:
    """tests/browser/test_site.py has the page around them."""
    for shown in outputs:
        data = shown.get("data", {})
        assert not data or {"text/html", "text/markdown", "text/plain"} & set(data), list(data)
        assert "Warning" not in shown.get("text", "") + data.get("text/plain", "")
        assert shown.get("name") != "stderr", shown["text"]
        assert len(html_of(shown)) < 300_000
        for fetched in ("<script src", "<link", 'src="http', "url(http", "@import"):
            assert fetched not in html_of(shown), fetched
