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

from workbench.base.paths import DATA
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator.interpreter import Python, ask_python, this_python
from workbench.gpus.emulator.launch import environment

REAL = DATA / "reference" / "real"
SCRIPTS = Path(__file__).resolve().with_name("real")
VERSIONS = "from importlib.metadata import version; print(version('torch'), version('transformers'))"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="PART", help="only the rows whose id has this in it")
    parser.add_argument("--python", help="an interpreter with another PyTorch: the rows that were measured with that")
    parser.add_argument("--keep", action="store_true", help="keep what these rows give beside what is there of others")
    asked = parser.parse_args()
    python = ask_python(asked.python) if asked.python else this_python()
    rows = json.loads((REAL / "public.json").read_text(encoding="utf-8"))["rows"]
    if asked.python:
        rows = [row for row in rows if measured_with(row) == python.torch_release]
    if not has_triton(python):
        compiled = [row["id"] for row in rows if row.get("compiled")]
        print(f"left out, since this Python has no Triton to compile them with: {', '.join(compiled) or 'none'}")
        rows = [row for row in rows if not row.get("compiled")]
    chosen = [row for row in rows if not asked.ids or any(part in row["id"] for part in asked.ids)]
    print(f"{'row':50} {'card':10} {'real':>14} {'emulated':>14}     error")
    done = [repeated(row, python) for row in chosen]
    print(told(summary(done)))
    if done and (asked.keep or not asked.ids):
        keep(done, rows, python)
    return any("failed" in row for row in done)


def measured_with(row: dict[str, Any]) -> str | None:
    """The release of PyTorch that the source names: 2.6.0 of `torch 2.6.0+cu124`."""
    named = re.match(r"torch (\d+\.\d+\.\d+)", row["versions"])
    return named[1] if named else None


def has_triton(python: Python) -> bool:
    return subprocess.run([python.executable, "-c", "import triton"], capture_output=True, check=False).returncode == 0


@cache
def ran(python: Python, card: str, ranks: int, script: str, *arguments: str) -> subprocess.CompletedProcess:
    """A script on the emulated card; one that prints a whole sweep is run once for all its rows.

    Args:
        ranks: so many processes by torchrun, each with a card of its own; 0: without torchrun.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [python.executable, *torchrun, str(SCRIPTS / script), *arguments]
    variables = environment(gpu(card), max(ranks, 1), python=python)
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def repeated(row: dict[str, Any], python: Python) -> dict[str, Any]:
    """The row with the emulated bytes and their errors; printed as soon as they are there."""
    done = ran(python, row["gpu"], row.get("ranks", 0), row["script"], *row["arguments"])
    if done.returncode:
        print(f"{row['id']:50} {row['gpu']:10} failed: {done.stderr.strip().splitlines()[-1]}")
        return {"id": row["id"], "failed": done.stderr[-500:]}
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    measured = next(
        (entry for entry in reversed(printed) if entry.get("run") == row.get("run", entry.get("run"))), None
    )
    if measured is None:
        print(f"{row['id']:50} {row['gpu']:10} failed: the script printed nothing of it")
        return {"id": row["id"], "failed": "the script printed nothing of it"}
    found = {"id": row["id"], "gpu": row["gpu"]}
    for kind in ("allocated", "reserved"):
        real = row[f"real_{kind}_bytes"]
        if real is None:
            continue
        emulated = measured[kind]
        error = (emulated - real) / real
        is_equal = abs(emulated - real) <= row["rounding"]
        found |= {
            f"real_{kind}_bytes": real,
            f"emulated_{kind}_bytes": emulated,
            f"{kind}_error": error,
            f"{kind}_equal": is_equal,
        }
        verdict = "equal" if is_equal else "not equal"
        numbers = f"{real:14,} {emulated:14,} {error:+9.4%}"
        print(f"{row['id']:50} {row['gpu']:10} {numbers}  {kind}, {verdict}", flush=True)
    return found | counted(row, measured)


def counted(row: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Segments and requests, where the source tells them; printed too."""
    snapshot = snapshots().get(row["id"], {})
    found: dict[str, Any] = {}
    for kind in ("segments", "requests"):
        there = snapshot.get(kind, row.get(f"real_{kind}"))
        if there is None:
            continue
        here = measured[kind]
        is_equal = here == there
        if isinstance(there, dict):  # of a snapshot: how often each kind of segment is there
            found["same_segments"] = sum((Counter(here) & Counter(there)).values())
            here, there = sum(here.values()), sum(there.values())
        elif snapshot:
            is_equal = is_equal and measured["digest"] == snapshot["digest"]
        found |= {f"real_{kind}": there, f"emulated_{kind}": here, f"{kind}_equal": is_equal}
        verdict = "equal" if is_equal else "not equal"
        print(f"{row['id']:50} {row['gpu']:10} {there:14,} {here:14,}            {kind}, {verdict}", flush=True)
    return found


@cache
def snapshots() -> dict[str, Any]:
    return json.loads((REAL / "segments.json").read_text(encoding="utf-8"))


def summary(done: list[dict[str, Any]]) -> dict[str, float]:
    """How many figures are equal, and the mean and worst of their absolute errors."""
    figures: dict[str, float] = {"rows": len(done), "failed": sum("failed" in row for row in done)}
    for kind in ("allocated", "reserved"):
        of_kind = [row for row in done if f"{kind}_error" in row]
        errors = [abs(row[f"{kind}_error"]) for row in of_kind]
        if errors:
            figures |= {
                f"{kind}_rows": len(errors),
                f"{kind}_equal": sum(row[f"{kind}_equal"] for row in of_kind),
                f"{kind}_mean": sum(errors) / len(errors),
                f"{kind}_worst": max(errors),
            }
    for kind in ("segments", "requests"):
        of_kind = [row for row in done if f"{kind}_equal" in row]
        if of_kind:
            figures |= {f"{kind}_rows": len(of_kind), f"{kind}_equal": sum(row[f"{kind}_equal"] for row in of_kind)}
    with_blocks = [row for row in done if "same_segments" in row]
    if with_blocks:
        figures |= {
            "segments_of_snapshots": sum(row["real_segments"] for row in with_blocks),
            "same_segments": sum(row["same_segments"] for row in with_blocks),
        }
    return figures


def told(figures: dict[str, float]) -> str:
    lines = [f"{figures['rows']} rows, {figures['failed']} failed"]
    for kind in ("allocated", "reserved"):
        if f"{kind}_rows" in figures:
            equal = f"{figures[f'{kind}_equal']} of {figures[f'{kind}_rows']} equal"
            errors = f"{figures[f'{kind}_mean']:.3%} off on average, {figures[f'{kind}_worst']:.2%} at worst"
            lines.append(f"{kind}: {equal}, {errors}")
    for kind in ("segments", "requests"):
        if f"{kind}_rows" in figures:
            lines.append(f"{kind}: {figures[f'{kind}_equal']} of {figures[f'{kind}_rows']} equal")
    if "same_segments" in figures:
        of_all = f"{figures['same_segments']} of {figures['segments_of_snapshots']}"
        lines.append(f"of snapshots, {of_all} segments are equal")
    return "\n".join(lines)


def keep(done: list[dict[str, Any]], rows: list[dict[str, Any]], python: Python) -> None:
    """In the file, beside what other releases gave, and what the same versions gave for rows that were not run now."""
    file = REAL / "emulated.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    asked = subprocess.run([python.executable, "-c", VERSIONS], capture_output=True, text=True, check=True)
    torch, transformers = asked.stdout.split()
    versions = {"torch": torch, "transformers": transformers}
    results = {}
    before = kept.get(python.torch_release, {})
    if before.get("versions") == versions:
        results = {row["id"]: row for row in before["rows"]}
    results |= {row["id"]: row for row in done}
    in_order = [results[row["id"]] for row in rows if row["id"] in results]
    kept[python.torch_release] = {"versions": versions, "summary": summary(in_order), "rows": in_order}
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
