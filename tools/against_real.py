"""Published measurements on real GPUs, each repeated on the emulated one: tools/against_real.py [PART OF AN ID …]

`data/reference/real/public.json` has the rows, with source, versions and what is not known of each; the scripts in
`tools/real` do the same work anew, in our own words. Printed are the emulated bytes, their signed errors, and whether
they are equal: closer than what the source has rounded away. Nothing is fitted, nothing is fetched.

Some sources tell more than bytes: how many segments and requests there were, or all of them, in a memory snapshot.
Those of snapshots stand in `segments.json`, by the row's id; they are equal if they agree block by block, and request
by request.

All rows are run with our own PyTorch; with `--python P` those that were measured with the PyTorch that P has. What
whole runs gave is kept in `data/reference/real/emulated.json`, by the release of PyTorch; with `--keep` that of a few
rows too, among what the same versions gave for the others before.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from workbench.base.paths import DATA, write_whole
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator.interpreter import Python, ask_python, this_python
from workbench.gpus.emulator.launch import environment

REAL = DATA / "reference" / "real"
SCRIPTS = Path(__file__).resolve().with_name("real")
VERSIONS = "from importlib.metadata import version; print(version('torch'), version('transformers'))"
BYTES = ("allocated", "reserved")
COUNTS = ("segments", "requests")

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="PART", help="only the rows whose id has this in it")
    parser.add_argument("--python", help="an interpreter with another PyTorch: the rows that were measured with that")
    parser.add_argument("--keep", action="store_true", help="keep what these rows give beside what is there of others")
    args = parser.parse_args()
    python = ask_python(args.python) if args.python else this_python()
    rows = json.loads((REAL / "public.json").read_text(encoding="utf-8"))["rows"]
    if args.python:
        rows = [row for row in rows if release_of(row) == python.torch_release]
    if not has_triton(python):
        rows = without_compiled(rows)
    print(f"{'row':50} {'card':10} {'real':>14} {'emulated':>14}     error")
    results = []
    for row in rows:
        if not args.ids or any(part in row["id"] for part in args.ids):
            results.append(repeat(row, python))
    print(in_words(summary(results)))
    if results and (args.keep or not args.ids):
        keep(results, rows, python)
    return bool(values(results, "failed"))


def release_of(row: Row) -> str | None:
    """Return the release of PyTorch that the source names, 2.6.0 of `torch 2.6.0+cu124`; None: it names none."""
    match = re.match(r"torch (\d+\.\d+\.\d+)", row["versions"])
    return match[1] if match else None


def has_triton(python: Python) -> bool:
    command = [python.executable, "-c", "import triton"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def without_compiled(rows: list[Row]) -> list[Row]:
    kept = []
    names = []
    for row in rows:
        if row.get("compiled"):
            names.append(row["id"])
        else:
            kept.append(row)
    print(f"left out, since this Python has no Triton to compile them with: {', '.join(names) or 'none'}")
    return kept


# ---- a row, repeated ----


def repeat(row: Row, python: Python) -> Row:
    """Run a row's script on the emulated card, and return the row with its bytes and their errors, which it prints."""
    done = run_script(python, row["gpu"], row.get("ranks", 0), row["script"], *row["arguments"])
    if done.returncode:
        last_line = done.stderr.strip().splitlines()[-1]
        return report_failure(row, last_line, done.stderr[-500:])
    measured = measurement(row, done.stdout)
    if measured is None:
        reason = "the script printed nothing of it"
        return report_failure(row, reason, reason)
    result = {"id": row["id"], "gpu": row["gpu"]}
    for measure in BYTES:
        if row[f"real_{measure}_bytes"] is not None:
            result |= compare_bytes(row, measured, measure)
    return result | compare_counts(row, measured)


@cache
def run_script(
    python: Python,
    card: str,
    ranks: int,
    script: str,
    *arguments: str,
) -> subprocess.CompletedProcess:
    """Run a script on the emulated card; one that prints a whole sweep is run once for all its rows.

    Args:
        ranks: so many processes by torchrun, each with a card of its own; 0: without torchrun.
    """
    command = [python.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(SCRIPTS / script), *arguments]
    variables = environment(gpu(card), max(ranks, 1), python=python)
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def report_failure(row: Row, reason: str, kept_reason: str) -> Row:
    print(f"{row['id']:50} {row['gpu']:10} failed: {reason}")
    return {"id": row["id"], "failed": kept_reason}


def measurement(row: Row, printed: str) -> Row | None:
    """Return the last line of JSON that the script printed for this row; in a sweep such a line names its run.

    None: there is no such line.
    """
    for line in reversed(printed.splitlines()):
        if line.startswith("{"):
            entry: Row = json.loads(line)
            if "run" not in row or row["run"] == entry.get("run"):
                return entry
    return None


def compare_bytes(row: Row, measured: Row, measure: str) -> Row:
    """Return and print the real and the emulated bytes, allocated or reserved, and how far they are apart."""
    real = row[f"real_{measure}_bytes"]
    emulated = measured[measure]
    error = (emulated - real) / real
    is_equal = abs(emulated - real) <= row["rounding"]
    print_comparison(row, measure, real, emulated, is_equal, f"{error:+.4%}")
    return {
        f"real_{measure}_bytes": real,
        f"emulated_{measure}_bytes": emulated,
        f"{measure}_error": error,
        f"{measure}_equal": is_equal,
    }


def compare_counts(row: Row, measured: Row) -> Row:
    """Return and print how many segments and requests there were, where the source tells them."""
    snapshot = snapshots().get(row["id"], {})
    result: Row = {}
    for measure in COUNTS:
        real = snapshot.get(measure, row.get(f"real_{measure}"))
        if real is None:
            continue
        emulated = measured[measure]
        is_equal = emulated == real
        if isinstance(real, dict):  # a snapshot tells how often each kind of segment is there
            result["same_segments"] = sum((Counter(emulated) & Counter(real)).values())
            real = sum(real.values())
            emulated = sum(emulated.values())
        elif snapshot:
            is_equal = is_equal and measured["digest"] == snapshot["digest"]
        print_comparison(row, measure, real, emulated, is_equal)
        result[f"real_{measure}"] = real
        result[f"emulated_{measure}"] = emulated
        result[f"{measure}_equal"] = is_equal
    return result


@cache
def snapshots() -> dict[str, Any]:
    return json.loads((REAL / "segments.json").read_text(encoding="utf-8"))


def print_comparison(row: Row, measure: str, real: int, emulated: int, is_equal: bool, error: str = "") -> None:
    verdict = "equal" if is_equal else "not equal"
    numbers = f"{real:14,} {emulated:14,} {error:>9}"
    print(f"{row['id']:50} {row['gpu']:10} {numbers}  {measure}, {verdict}", flush=True)


# ---- all rows together ----


def summary(results: list[Row]) -> dict[str, float]:
    """Count the figures that are equal, and take the mean and the worst of their absolute errors."""
    figures: dict[str, float] = {"rows": len(results), "failed": len(values(results, "failed"))}
    for measure in (*BYTES, *COUNTS):
        equal = values(results, f"{measure}_equal")
        errors = [abs(error) for error in values(results, f"{measure}_error")]
        if equal:
            figures[f"{measure}_rows"] = len(equal)
            figures[f"{measure}_equal"] = sum(equal)
        if errors:
            figures[f"{measure}_mean"] = sum(errors) / len(errors)
            figures[f"{measure}_worst"] = max(errors)
    with_blocks = [row for row in results if "same_segments" in row]
    if with_blocks:
        figures["segments_of_snapshots"] = sum(values(with_blocks, "real_segments"))
        figures["same_segments"] = sum(values(with_blocks, "same_segments"))
    return figures


def values(results: list[Row], name: str) -> list[Any]:
    """Return a field's values, from the rows that have it."""
    return [row[name] for row in results if name in row]


def in_words(figures: dict[str, float]) -> str:
    lines = [f"{figures['rows']} rows, {figures['failed']} failed"]
    for measure in (*BYTES, *COUNTS):
        if f"{measure}_rows" not in figures:
            continue
        line = f"{measure}: {figures[f'{measure}_equal']} of {figures[f'{measure}_rows']} equal"
        if measure in BYTES:
            mean = figures[f"{measure}_mean"]
            worst = figures[f"{measure}_worst"]
            line += f", {mean:.3%} off on average, {worst:.2%} at worst"
        lines.append(line)
    if "same_segments" in figures:
        same = figures["same_segments"]
        lines.append(f"of snapshots, {same} of {figures['segments_of_snapshots']} segments are equal")
    return "\n".join(lines)


def keep(results: list[Row], rows: list[Row], python: Python) -> None:
    """Write the results into `emulated.json`.

    What other releases gave stays there, and what the same versions gave for rows that were not run now.
    """
    file = REAL / "emulated.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    command = [python.executable, "-c", VERSIONS]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    torch, transformers = answer.stdout.split()
    versions = {"torch": torch, "transformers": transformers}
    by_id = {}
    before = kept.get(python.torch_release, {})
    if before.get("versions") == versions:
        by_id = {row["id"]: row for row in before["rows"]}
    by_id |= {row["id"]: row for row in results}
    in_order = [by_id[row["id"]] for row in rows if row["id"] in by_id]
    kept[python.torch_release] = {"versions": versions, "summary": summary(in_order), "rows": in_order}
    write_whole(file, json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
