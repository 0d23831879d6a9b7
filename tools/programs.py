"""Public programs, as their authors wrote them, on an emulated card: tools/programs.py CHECKOUTS [--python P] [NAME …]

`tools/real/programs.toml` has them by repository and commit; CHECKOUTS is a folder with a clone of each, under the
repository's name. A program is copied, given the data that `tools/real/made.py` makes, and started with its command.
What comes of it stands in `data/reference/real/programs.json` and, to be read, in `programs.md` beside it: unchanged
or failed with its cause, the peak, and what weights, gradients and states took at the least, counted by themselves
(`tools/real/counting`). Run before a release. `--python` is the interpreter that has the programs' packages.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from workbench.base.paths import DATA, write_whole
from workbench.gpus.catalogue import MIB

REAL = Path(__file__).resolve().with_name("real")
RESULTS = DATA / "reference" / "real" / "programs.json"
OUTCOMES = ("unchanged", "failed", "wrong", "not run")
TIMED_OUT = 124
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", "TRACKIO_DISABLED": "1"}

Row = dict[str, Any]
Table = dict[str, Row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    table = read_table("programs.toml")
    find_outcome = partial(outcome, checkouts=args.checkouts, python=args.python)
    results = try_all(table, args.names, RESULTS, outcome=find_outcome, in_words=in_words, page=page)
    return any(row["outcome"] == "wrong" for row in results.values())


# ---- shared with plans.py ----


def read_table(name: str) -> Table:
    return tomllib.loads((REAL / name).read_text(encoding="utf-8"))


def try_all(
    table: Table,
    names: list[str],
    file: Path,
    *,
    outcome: Callable[[Row], Row],
    in_words: Callable[[Row], str],
    page: Callable[[Table, Table], str],
) -> Table:
    """Try the programs that are named, or all, and return the results of all.

    What comes of each is printed, and written at once, as JSON and beside it as a page. Both are in the order of the
    table, and keep the earlier results of programs that it still has.
    """
    results: Table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name, program in table.items():
        if names and name not in names:
            continue
        results[name] = outcome(program)
        print(f"{name:28} {in_words(results[name])}", flush=True)
        in_order = {name: results[name] for name in table if name in results}
        write_whole(file, json.dumps(in_order, indent=1) + "\n")
        write_whole(file.with_suffix(".md"), page(table, in_order))
    return results


def checkout_of(program: Row, checkouts: Path) -> Path:
    return checkouts / program["repository"].partition("/")[2]


def lacking_checkout(program: Row, checkouts: Path) -> str:
    """Say why there is no checkout at the program's commit; empty if there is one."""
    checkout = checkout_of(program, checkouts)
    commit = quietly(["git", "-C", str(checkout), "rev-parse", "HEAD"]).stdout.strip()
    if commit == program["commit"]:
        return ""
    return f"no checkout of {program['commit'][:9]} in {checkout.name}"


@contextmanager
def copy_program(program: Row, checkouts: Path) -> Iterator[Path]:
    """Copy the checkout for as long as the context is open, and return the program's folder in the copy."""
    checkout = checkout_of(program, checkouts)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, checkout.name)
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
        yield copy / program.get("folder", "")


def command_of(program: Row, python: str) -> list[str]:
    return [python if word == "python" else word for word in shlex.split(program["command"])]


def emulator(python: str) -> list[str]:
    return [sys.executable, "-m", "workbench.gpus.emulator", "--python", python]


def quietly(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def link(name: str, program: Row) -> str:
    """Return a link to the program, at its commit."""
    return f"[{name}](https://github.com/{program['repository']}/tree/{program['commit']}/{program.get('folder', '')})"


# ---- one program ----


def outcome(program: Row, checkouts: Path, python: str) -> Row:
    """Run one program in a copy of its checkout, and return what became of it."""
    reason = program.get("not_run") or lacking_checkout(program, checkouts)
    if reason:
        return {"outcome": "not run", "cause": reason}
    with copy_program(program, checkouts) as folder, tempfile.TemporaryDirectory() as aside:
        return run_program(program, folder, Path(aside, "counted"), python)


def run_program(program: Row, folder: Path, counted: Path, python: str) -> Row:
    counted.mkdir()
    variables = os.environ | OFFLINE | program.get("environment", {})
    reason = install_packages(program, counted.with_name("packages"), variables, python)
    reason = reason or make_data(program, folder, variables, python)
    if reason:
        return {"outcome": "not run", "cause": reason}
    put_in_front(variables, REAL / "counting")
    variables["COUNTED_IN"] = str(counted)
    done = quietly(command_on_card(program, python), cwd=folder, env=variables)
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"outcome": "failed", "cause": last_line(done.stderr)}
    return judge(program, report, figures_of(report, counted), done.stderr)


def install_packages(program: Row, folder: Path, variables: dict[str, str], python: str) -> str:
    """Install the packages that a program names, beside the interpreter's. Say why that failed; empty if it did not."""
    if "packages" not in program:
        return ""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    installed = subprocess.run([*pip, "--target", str(folder), *program["packages"]], check=False)
    if installed.returncode:
        return f"pip could not install {', '.join(program['packages'])}"
    put_in_front(variables, folder)
    return ""


def make_data(program: Row, folder: Path, variables: dict[str, str], python: str) -> str:
    """Make the data that a program wants in its folder. Say why that failed; empty if it did not."""
    if not program.get("made"):
        return ""
    # on a card too: torchvision's CUDA build needs a PyTorch with CUDA even to be imported
    command = [*emulator(python), "--no-history", "--", python, str(REAL / "made.py"), *program["made"]]
    done = quietly(command, cwd=folder, env=variables)
    if done.returncode:
        return f"its data could not be made: {last_line(done.stderr)}"
    return ""


def command_on_card(program: Row, python: str) -> list[str]:
    """Return the command that runs a program on its card, until it ends or its time is over."""
    options = ["--gpu", program.get("gpu", "t4"), "--ranks", str(program.get("ranks", 1))]
    options += ["--timeout", str(program.get("seconds", 120)), "--json"]
    return [*emulator(python), *options, "--", *command_of(program, python)]


def put_in_front(variables: dict[str, str], folder: Path) -> None:
    before = filter(None, [variables.get("PYTHONPATH")])
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), *before])


def figures_of(report: Row, counted: Path) -> Row:
    """Return the largest figures of a program's processes.

    The emulator reports the peaks; the least bytes and the steps were counted in the processes themselves.
    """
    processes = report["processes"]
    devices = chain.from_iterable(process["devices"] for process in processes)
    counts = [json.loads(path.read_text()) for path in counted.glob("*.json")]
    return {
        "peak_allocated_bytes": largest(devices, "peak_allocated_bytes"),
        "peak_reserved_bytes": report["peak_reserved_bytes"],
        "least_bytes": largest(counts, "bytes"),
        "steps": largest(counts, "steps"),
        "at_least": report["lower_bound"],
        "torch": processes[0]["torch"] if processes else None,
    }


def largest(rows: Iterable[Row], name: str) -> int:
    return max((row[name] for row in rows), default=0)


def judge(program: Row, report: Row, figures: Row, stderr: str) -> Row:
    """Judge whether a program ran unchanged, failed or has a wrong peak, and give the cause."""
    status = report["exit_status"]
    used_a_gpu = any(process["devices"] for process in report["processes"])
    verdict = {"outcome": "failed"}
    if status == 0 and not used_a_gpu:
        verdict["cause"] = "used no GPU"
    elif status not in (0, TIMED_OUT) or not used_a_gpu:
        verdict["cause"] = last_line(stderr)
    elif not figures["least_bytes"] and not program.get("without_weights"):
        verdict["cause"] = "no weights were seen at work on the card"
    elif figures["peak_allocated_bytes"] < figures["least_bytes"]:
        verdict = {"outcome": "wrong", "cause": "the peak lies under what it held"}
    elif status == TIMED_OUT and figures["steps"] < 2:
        verdict["cause"] = f"no second step when its time was over; {innermost_lines(report['stuck_at'])}"
    else:
        ended_by = "the clock" if status == TIMED_OUT else "itself"
        verdict = {"outcome": "unchanged", "ended_by": ended_by}
    return verdict | figures


def innermost_lines(stack: str) -> str:
    lines = [line.strip() for line in stack.splitlines() if " in " in line]
    return without_folders("; ".join(lines[:3]))


def last_line(text: str) -> str:
    """Return the last error of what was written, without the paths of this machine."""
    last = "nothing was written"
    last_error = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        last = line
        if "Error" in line.partition(":")[0] or "error:" in line:
            last_error = line
    return without_folders(last_error or last)[:300]


def without_folders(text: str) -> str:
    return re.sub(r"/\S*/", "", text)


def in_words(row: Row) -> str:
    if "peak_allocated_bytes" not in row:
        return f"{row['outcome']}: {row['cause']}"
    peak = row["peak_allocated_bytes"] / MIB
    least = row["least_bytes"] / MIB
    text = f"{row['outcome']:10} peak {peak:8,.0f} MiB, at the least {least:8,.1f} MiB, {row['steps']} steps"
    return f"{text}  {row.get('cause', '')}"


# ---- the page ----


def page(table: Table, results: Table) -> str:
    """Return the table as people read it, in Markdown."""
    outcomes = Counter(row["outcome"] for row in results.values())
    counts = ", ".join(f"{outcomes[name]} {name}" for name in OUTCOMES if name in outcomes)
    lines = [
        "# Programs of others on an emulated card",
        "",
        f"{len(results)} public programs, each as its authors wrote it: {counts}. Written by `tools/programs.py`; "
        "[programs.toml](../../../tools/real/programs.toml) has the commits and commands. That a program ran does not "
        "say that its peak is right; beside it stands what weights, gradients and states held at the least, counted "
        "apart from any allocator. Back to [the emulated GPU](../emulator.md#programs-of-others).",
        "",
        "| program | what it is | card | outcome | peak, MiB | at the least, MiB | steps | its authors measured, GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        program = table[name]
        verdict = row["outcome"]
        if "cause" in row:
            verdict += f": {row['cause']}".replace("|", "/")
        cells = [link(name, program), program["kind"], program.get("gpu", "t4"), verdict]
        cells += cells_of_figures(row)
        cells.append(compare_with_authors(program, row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cells_of_figures(row: Row) -> list[str]:
    """Return the peak, what was held at the least, and the steps; empty unless the program ran."""
    if row["outcome"] != "unchanged":
        return ["", "", ""]
    bound = "≥ " if row["at_least"] else ""
    peak = f"{bound}{row['peak_allocated_bytes'] / MIB:,.0f}"
    return [peak, f"{row['least_bytes'] / MIB:,.1f}", str(row["steps"])]


def compare_with_authors(program: Row, row: Row) -> str:
    """Return the peak that the authors published, and how far off ours is; equal: it is so when rounded as theirs."""
    if "published" not in program or row["outcome"] != "unchanged":
        return ""
    theirs = program["published"]["gigabytes"]
    decimals = len(theirs.partition(".")[2])
    gigabytes = row["peak_allocated_bytes"] / 1e9
    is_equal = f"{gigabytes:.{decimals}f}" == theirs
    verdict = "equal"
    if not is_equal:
        verdict = f"here {gigabytes:.{decimals}f}, {gigabytes / float(theirs) - 1:+.1%}"
    return f"[{theirs}]({program['published']['source']}), {verdict}"


if __name__ == "__main__":
    sys.exit(main())
