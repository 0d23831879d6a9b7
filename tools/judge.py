"""Judge the shadow's predictions for a GPU by the same runs on that GPU in software (`workbench.gpus.emulator`).

    python tools/judge.py                              # the grid on four cards, what is known there is kept
    python tools/judge.py --gpu t4 --only lora         # configurations whose label has the word
    python tools/judge.py --measure                    # only the runs, no predictions

The runs are those of `workbench run`, three steps, one process a card; weights are not filled, as no value is read.
Truth is exact as far as PyTorch allocates by itself; what closed libraries take is not in it.
Writes `data/reference/emulated/<gpu>/judged.json` with a signed error of every configuration.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.paths import DATA
from workbench.recipe import Recipe
from workbench.techniques import parse_technique

FOLDER = DATA / "reference" / "emulated"
CARDS = ("h100", "a100-80gb", "rtx4090", "t4")
STEPS = 3
PADDED = "padding"  # the technique whose batches hold padding
FIGURES = ("peak_allocated_bytes", "peak_reserved_bytes")


def recipe_of(entry: dict[str, Any]) -> Recipe:
    """The recipe of one configuration of a grid."""
    return Recipe(
        model=entry["model"],
        effective_batch_size=entry["batch"],
        sequence_length=entry["length"],
        steps=STEPS,
        techniques=tuple(parse_technique(text) for text in entry["techniques"]),
    )


def name_of(entry: dict[str, Any]) -> str:
    """One line for a configuration, unique in a grid."""
    return f"{entry['model']} {entry['batch']} × {entry['length']} {' + '.join(entry['techniques']) or 'baseline'}"


# ---- inside the emulated card ----


def prepare() -> None:
    """What makes a run quick, and the question that it answers the one that a prediction answers."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from workbench.models import load
    from workbench.run.trainer import SeamTrainer

    def unfilled(config: Any, arguments: dict[str, Any]) -> Any:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, **{"dtype": "float32", **arguments})
        model.tie_weights()
        return model

    known_sampler, known_evaluate = SeamTrainer._get_train_sampler, SeamTrainer.evaluate

    def longest_in_each(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Where examples have unequal lengths, a prediction takes the longest for granted, in every batch."""
        rows = trainer.train_dataset
        lengths = [len(row) for row in rows["input_ids"]] if PADDED in getattr(trainer, "judged", "") else []
        if len(set(lengths)) < 2:
            return known_sampler(trainer, *args, **kwargs)
        size = trainer.args.per_device_train_batch_size
        longest = lengths.index(max(lengths))
        return [index if index % size else longest for index in range(len(lengths))]

    def evaluate(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Held-out blocks hold no padding, whatever is trained on."""
        told = os.environ.pop("EMULATED_PADDING", None)
        try:
            return known_evaluate(trainer, *args, **kwargs)
        finally:
            os.environ.update({"EMULATED_PADDING": told} if told else {})

    load._new = unfilled
    SeamTrainer._get_train_sampler, SeamTrainer.evaluate = longest_in_each, evaluate


def run_all(entries: list[dict[str, Any]], history: Path | None) -> None:
    """Run each configuration and print one line of JSON; `history` also takes PyTorch's own record of requests."""
    import torch

    from workbench.run.run import run
    from workbench.run.trainer import SeamTrainer

    prepare()
    for entry in entries:
        SeamTrainer.judged = name_of(entry)
        if history:
            torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="python", context="alloc")
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = vars(run(recipe_of(entry), device="cuda", folder=Path(folder)))
            except WorkbenchError as error:
                found = {"remark": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            except Exception as error:
                found = {"remark": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        kept = {name: found[name] for name in (*FIGURES, "by_phase", "before_bytes", "remark") if name in found}
        print(json.dumps({"name": name_of(entry), **kept}), flush=True)
        if history:
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            history.write_text(json.dumps(trace))


def measured(entries: list[dict[str, Any]], gpu: str, history: Path | None = None) -> Iterator[dict[str, Any]]:
    """What runs on an emulated card needed, one after the other."""
    from workbench.gpus.emulator.launch import environment

    for padding in (False, True):
        chosen = [entry for entry in entries if padding is any(t.startswith(PADDED) for t in entry["techniques"])]
        if not chosen:
            continue
        command = [sys.executable, __file__, "--inside", *(["--history", str(history)] if history else [])]
        child = subprocess.Popen(
            command, env=environment(find_gpu(gpu), padding=padding), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert child.stdin
        assert child.stdout
        child.stdin.write(json.dumps(chosen))
        child.stdin.close()
        for line in child.stdout:
            yield json.loads(line)
        child.wait()


# ---- outside ----


def judge(entries: list[dict[str, Any]], gpu: str, predict_too: bool, fresh: bool) -> list[dict[str, Any]]:
    """Measure what is not known yet, predict all, and write both down."""
    path = FOLDER / gpu / "judged.json"
    known = {} if fresh or not path.exists() else {row["name"]: row for row in json.loads(path.read_text())["runs"]}
    missing = [entry for entry in entries if name_of(entry) not in known]
    for done, found in enumerate(measured(missing, gpu), 1):
        name = found.pop("name")
        known[name] = {"name": name, "measured": found}
        write(path, gpu, known)
        print(f"  {gpu}: {done} of {len(missing)}", end="\r", file=sys.stderr, flush=True)
    there = [entry for entry in entries if name_of(entry) in known]
    for entry in there if predict_too else ():
        known[name_of(entry)] |= predicted(entry, gpu, known[name_of(entry)]["measured"])
    write(path, gpu, known)
    return [known[name_of(entry)] for entry in there]


def write(path: Path, gpu: str, known: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in known.values())
    path.write_text(f'{{"gpu": "{gpu}", "runs": [\n{rows}\n]}}\n', encoding="utf-8")


def predicted(entry: dict[str, Any], gpu: str, truth: dict[str, Any]) -> dict[str, Any]:
    """The predicted figures and their signed errors; a recipe that is refused has the reason."""
    from workbench.predict.predict import SHADOW, predict

    try:
        found = predict(recipe_of(entry), gpu, engine=SHADOW)
    except WorkbenchError as error:
        return {"predicted": {"remark": str(error)}, "errors": {}}
    figures = {name: getattr(found, name) for name in FIGURES} | {"fits": found.fits}
    errors = {name: figures[name] / truth[name] - 1 for name in FIGURES if "remark" not in truth}
    return {"predicted": figures, "errors": errors}


def report(gpu: str, rows: list[dict[str, Any]]) -> str:
    """A line for each configuration, then the mean and the worst error."""
    lines = []
    for row in rows:
        errors = row["errors"]
        shown = "  ".join(f"{errors[name]:+9.3%}" for name in FIGURES) if errors else f"{'–':>9}  {'–':>9}"
        lines.append(f"{shown}  {row['name']}  {_remark(row)}".rstrip())
    for name in FIGURES:
        found = [abs(row["errors"][name]) for row in rows if row["errors"]]
        if found:
            lines.append(f"{gpu} {name}: mean {sum(found) / len(found):.4%}, worst {max(found):.4%} of {len(found)}")
    return "\n".join(lines)


def _remark(row: dict[str, Any]) -> str:
    refused, said = row["measured"].get("remark", ""), row["predicted"]
    if refused.startswith("OutOfMemoryError"):
        return "does not fit" if not said.get("fits", True) else "DOES NOT FIT, WAS SAID TO FIT"
    return refused[:60] if refused else "" if said.get("fits", True) else "FITS, WAS SAID NOT TO"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="append", help=f"a card, several times (default {', '.join(CARDS)})")
    parser.add_argument("--grid", type=Path, default=FOLDER / "grid.json")
    parser.add_argument("--only", default="", help="configurations whose line has this text")
    parser.add_argument("--measure", action="store_true", help="run, and predict nothing")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--history", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        run_all(json.loads(sys.stdin.read()), args.history)
        return
    entries = [entry for entry in json.loads(args.grid.read_text()) if args.only in name_of(entry)]
    for gpu in args.gpu or CARDS:
        rows = judge(entries, gpu, not args.measure, args.fresh)
        print(report(gpu, rows) if not args.measure else f"{gpu}: {len(rows)} measured")


if __name__ == "__main__":
    main()
