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
from pathlib import Path
from typing import Any

from workbench.base.paths import DATA

REAL = Path(__file__).resolve().with_name("real")
RESULTS = DATA / "reference" / "real" / "programs.json"
OUTCOMES = ("unchanged", "failed", "wrong", "not run")
TIMED_OUT = 124
MIB = 2**20
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", "TRACKIO_DISABLED": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    table = tomllib.loads((REAL / "programs.toml").read_text(encoding="utf-8"))
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    for name, program in table.items():
        if args.names and name not in args.names:
            continue
        known[name] = outcome(program, args.checkouts, args.python)
        print(f"{name:28} {told(known[name])}", flush=True)
        ordered = {name: known[name] for name in table if name in known}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(page(table, ordered), encoding="utf-8")
    return any(row["outcome"] == "wrong" for row in known.values())


def outcome(program: dict[str, Any], checkouts: Path, python: str) -> dict[str, Any]:
    """What became of one program."""
    if "not_run" in program:
        return {"outcome": "not run", "cause": program["not_run"]}
    source = checkouts / program["repository"].partition("/")[2]
    asked = ["git", "-C", str(source), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if commit != program["commit"]:
        return {"outcome": "not run", "cause": f"no checkout of {program['commit'][:9]} in {source.name}"}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, source.name)
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git"))
        return ran(program, copy / program.get("folder", ""), Path(folder, "counted"), python)


def ran(program: dict[str, Any], folder: Path, counted: Path, python: str) -> dict[str, Any]:
    counted.mkdir()
    variables = os.environ | OFFLINE | program.get("environment", {})
    if "packages" in program:
        packages = counted.with_name("packages")
        installing = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--target"]
        installed = subprocess.run([*installing, str(packages), *program["packages"]], check=False)
        if installed.returncode:
            return {"outcome": "not run", "cause": f"pip could not install {', '.join(program['packages'])}"}
        put_in_front(variables, packages)
    emulate = [sys.executable, "-m", "workbench.gpus.emulator", "--python", python]
    if program.get("made"):  # on a card too: torchvision's CUDA build needs a PyTorch with CUDA even to be imported
        making = [*emulate, "--no-history", "--", python, str(REAL / "made.py"), *program["made"]]
        made = subprocess.run(making, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        if made.returncode:
            return {"outcome": "not run", "cause": f"its data could not be made: {last_line(made.stderr)}"}
    command = [python if word == "python" else word for word in shlex.split(program["command"])]
    options = ["--gpu", program.get("gpu", "t4"), "--ranks", str(program.get("ranks", 1)), "--json"]
    options += ["--timeout", str(program.get("seconds", 120))]
    put_in_front(variables, REAL / "counting")
    variables["COUNTED_IN"] = str(counted)
    done = subprocess.run(
        [*emulate, *options, "--", *command], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"outcome": "failed", "cause": last_line(done.stderr)}
    counts = [json.loads(path.read_text()) for path in counted.glob("*.json")]
    devices = [device for process in report["processes"] for device in process["devices"]]
    found = {
        "peak_allocated_bytes": max((device["peak_allocated_bytes"] for device in devices), default=0),
        "peak_reserved_bytes": report["peak_reserved_bytes"],
        "least_bytes": max((count["bytes"] for count in counts), default=0),
        "steps": max((count["steps"] for count in counts), default=0),
        "at_least": report["lower_bound"],
        "torch": next((process["torch"] for process in report["processes"]), None),
    }
    status = report["exit_status"]
    if status not in (0, TIMED_OUT) or not devices:
        cause = "used no GPU" if status == 0 else last_line(done.stderr)
        return {"outcome": "failed", "cause": cause, **found}
    if not found["least_bytes"] and not program.get("without_weights"):
        return {"outcome": "failed", "cause": "no weights were seen at work on the card", **found}
    if found["peak_allocated_bytes"] < found["least_bytes"]:
        return {"outcome": "wrong", "cause": "the peak lies under what it held", **found}
    if status == TIMED_OUT and found["steps"] < 2:
        lines = [line.strip() for line in report["stuck_at"].splitlines() if " in " in line]
        innermost = re.sub(r"/\S*/", "", "; ".join(lines[:3]))
        return {"outcome": "failed", "cause": f"no second step when its time was over; {innermost}", **found}
    return {"outcome": "unchanged", "ended_by": "the clock" if status == TIMED_OUT else "itself", **found}


def put_in_front(variables: dict[str, str], folder: Path) -> None:
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [variables.get("PYTHONPATH")])])


def last_line(text: str) -> str:
    """The innermost error of what was written, without the paths of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "error:" in line]
    last = (errors or lines or ["nothing was written"])[-1]
    return re.sub(r"/\S*/", "", last)[:300]


def link(name: str, program: dict[str, Any]) -> str:
    """To the program, at its commit."""
    return f"[{name}](https://github.com/{program['repository']}/tree/{program['commit']}/{program.get('folder', '')})"


def page(table: dict[str, Any], known: dict[str, Any]) -> str:
    """The table as people read it."""
    outcomes = [row["outcome"] for row in known.values()]
    counted = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in OUTCOMES if outcome in outcomes)
    lines = [
        "# Programs of others on an emulated card",
        "",
        f"{len(known)} public programs, each as its authors wrote it: {counted}. Written by `tools/programs.py`; "
        "[programs.toml](../../../tools/real/programs.toml) has the commits and commands. That a program ran does not "
        "say that its peak is right; beside it stands what weights, gradients and states held at the least, counted "
        "apart from any allocator. Back to [the emulated GPU](../emulator.md#programs-of-others).",
        "",
        "| program | what it is | card | outcome | peak, MiB | at the least, MiB | steps | its authors measured, GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in known.items():
        program = table[name]
        peak = least = steps = ""
        if row["outcome"] == "unchanged":
            bound = "≥ " if row["at_least"] else ""
            peak = f"{bound}{row['peak_allocated_bytes'] / MIB:,.0f}"
            least = f"{row['least_bytes'] / MIB:,.1f}"
            steps = str(row["steps"])
        cause = f": {row['cause']}".replace("|", "/") if "cause" in row else ""
        cells = [link(name, program), program["kind"], program.get("gpu", "t4"), row["outcome"] + cause]
        lines.append(f"| {' | '.join([*cells, peak, least, steps, published(program, row)])} |")
    return "\n".join(lines) + "\n"


def published(program: dict[str, Any], row: dict[str, Any]) -> str:
    """What the authors say of the peak, and how far off ours is: equal if it is so when it is rounded as theirs."""
    if "published" not in program or row["outcome"] != "unchanged":
        return ""
    theirs = program["published"]["gigabytes"]
    decimals = len(theirs.partition(".")[2])
    gigabytes = row["peak_allocated_bytes"] / 1e9
    is_equal = f"{gigabytes:.{decimals}f}" == theirs
    verdict = "equal" if is_equal else f"here {gigabytes:.{decimals}f}, {gigabytes / float(theirs) - 1:+.1%}"
    return f"[{theirs}]({program['published']['source']}), {verdict}"


def told(row: dict[str, Any]) -> str:
    if "peak_allocated_bytes" not in row:
        return f"{row['outcome']}: {row['cause']}"
    peak = row["peak_allocated_bytes"] / MIB
    least = row["least_bytes"] / MIB
    words = f"{row['outcome']:10} peak {peak:8,.0f} MiB, at the least {least:8,.1f} MiB, {row['steps']} steps"
    return f"{words}  {row.get('cause', '')}"


if __name__ == "__main__":
    sys.exit(main())
