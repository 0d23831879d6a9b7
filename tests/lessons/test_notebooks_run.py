"""Every notebook, found by its file, runs under papermill, leaves true records, and says what its cells show."""

import html
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

SMOKE = "05_lora"  # the one that runs in the first layer
# a number with its unit, as prose and outputs write it: 84.1 MiB, 49 %, 1.10×; the product 8 × 1,024 is none
NUMBER = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)(\s?MiB|\s?GiB|\s?KiB|\s?%|×)(?!\w)")
# what a lesson computes about itself, as regular expressions over what its cells show
CLAIMS = {
    "00_memory_anatomy": [
        r"peak MiB +165\.3 +165\.1",
        r"activations MiB +85\.7 +85\.5",
        r"in nvidia-smi about 1\d\.\d GiB",
    ],
    "02_gradient_accumulation": [
        r"gradient accumulation \(steps=2\) +51\.2",
        r"gradient accumulation(?s:.*) \de-0[67]\s",
    ],
    "03_gradient_checkpointing": [r"gradient checkpointing +84\.1", r"selective checkpointing +4\.6831 +0\s"],
    "03b_checkpointing_by_hand": [
        r"none +128 MiB .* (34\.53\d+) (?s:.*)every_block .* \1 (?s:.*)not_set_back .* 34\.62\d+ ",  # digits by the CPU
        r"none +84\.9 MiB .* (57\.37\d+) +50\s(?s:.*)not_reentrant .* \1 +50\s(?s:.*)cured .* \1 +50\s",
        r"reentrant +785 KiB .* 2\s",
    ],
    "04_mixed_precision": [r"LoRA \+ mixed precision +18\.2", r"LoRA +14\.5"],
    "04b_precision_by_hand": [
        r"gpt2 +6\.3 GiB .* 6\.3 GiB",
        r"gpt2-xl +53\.4 GiB .* 53\.4 GiB",
        r"rate 5e-05 +0\.0% +7[12]\.\d% +7[12]\.\d%",
    ],
    "05_lora": [r"gradient checkpointing: peak 6\.3 GiB, reserved 6\.9", r"\+ LoRA: peak 5\.4 GiB, reserved 7\.0 GiB"],
    "07_prefix_tuning": [
        r"prefix_tuning brings a key-value cache during training, which gradient_checkpointing forbids"
    ],
    "10_offloading": [r"optimizer offloading \(to=disk\) +21\.1 +40\.4"],
    "13_chunked_cross_entropy": [r"all_at_once +32\.2\s+obvious_chunks +34\.0\s+one_gradient +31\.1"],
    "18_evaluation_and_generation": [
        r"compute_metrics +128\.0",
        r"prediction_loss_only=True +32\.8",
        r"model\.eval\(\) +117\.7",
    ],
    "18b_generation": [r"4 beams +1\.10", r"one, use_cache=False +0\.00"],
    "19_clinic": [r"(?s)(Answer.*){10}", r"(?s)( is enough: it needs.*){10}"],
    "20_more_than_one_gpu": [
        r"the same numbers in two halves: True",
        r"2 ranks, full +4\.\d+ +(0|\de-0[67])\s",
    ],
}
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
    before = {entry.name for entry in NOTEBOOKS.iterdir()}
    executed = nbformat.read(str(execute_notebook(path, tmp_path / path.name)), as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    records = read_all(runs_folder)

    for record in records:
        with subtests.test("a record is true", label=record.label):
            check_record(record)
    with subtests.test("its technique is on record beside the baseline"):
        check_techniques(path, records)
    shown = "\n".join(map(words_of, outputs))
    for claim in CLAIMS.get(path.stem, []):
        with subtests.test("what it says of itself is so", claim=claim):
            assert re.search(claim, shown)
    with subtests.test("it has records if it asks for runs"):
        assert records or "seeds" not in parameters.parameter_types(path)
    with subtests.test("a step to drag through is there, once for each time that it is asked for"):
        asked = sum(cell.source.count("step_on_card(") for cell in executed.cells if cell.cell_type == "code")
        assert sum("<iframe" in html_of(output) for output in outputs) == asked
    with subtests.test("it leaves nothing where the notebooks are"):
        assert {entry.name for entry in NOTEBOOKS.iterdir()} == before
    with subtests.test("a number of the prose is one that a cell shows"):
        assert unsupported_numbers(executed) - set(FROM_ELSEWHERE.get(path.stem, {})) == set()
    with subtests.test("where a card's fit is told, what is reserved stands beside it"):
        tables = re.findall(r"<table.*?</table>", "".join(map(html_of, outputs)), flags=re.DOTALL)
        fits = [table for table in tables if re.search("<td>[✓✗]", table)] if path.stem[0].isdigit() else []
        assert all("<th>reserved</th>" in table for table in fits)
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
    """Numbers with a unit in the prose that no output says, by itself or in a column whose head has the unit."""
    prose = "\n".join(cell.source for cell in executed.cells if cell.cell_type == "markdown")
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    shown = numbers_in("\n".join(map(words_of, outputs)))
    for output in outputs:
        shown |= numbers_in_columns(html_of(output))
    return {f"{number} {unit}" for number, unit in numbers_in(prose) - shown}


def numbers_in_columns(page: str) -> set[tuple[str, str]]:
    """Of a table whose heads name their units, as `peak MiB` does."""
    found = set()
    for table in re.findall(r"<table.*?</table>", page, flags=re.DOTALL):
        head, _, body = table.partition("<tbody>")
        heads = re.findall(r"<th[^>]*>(.*?)</th>", head, flags=re.DOTALL)
        for row in re.findall(r"<tr.*?</tr>", body, flags=re.DOTALL):
            values = re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.DOTALL)
            for title, value in zip(heads[-len(values) :], values, strict=False):
                unit = re.search(r"\b(KiB|MiB|GiB)\b", title)
                if unit:
                    found.add((value.strip(), unit[1]))
    return found


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
    taught = {name for name, technique in REGISTRY.items() if stem in (name, technique.lesson)}
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
