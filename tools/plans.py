"""Public scripts and what to change in them: tools/plans.py CHECKOUTS [--python P] [--cpu-python P] [NAME …]

`tools/real/plans.toml` has them; CHECKOUTS is a folder with a clone of each repository, under its name. A script is
copied, given made data and random weights, and run as it is. Then `workbench plan` is asked for it with a budget of
three quarters of what it reserves, and CUDA's context, and the changed script that it writes is run by itself. Where
that is exact, the script and the changed one take two steps on the CPU, in an interpreter whose packages are made for
it (`--cpu-python`; torchvision's for CUDA cannot be imported there), and their losses are compared. What comes of it
stands in `data/reference/real/plans.json` and, to be read, in `plans.md` beside it.
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
import time
import tomllib
from pathlib import Path
from typing import Any

from programs import OFFLINE, REAL, link

from workbench.base.categories import format_bytes
from workbench.base.errors import WorkbenchError
from workbench.base.paths import DATA
from workbench.fit import search
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.techniques import Numerics

RESULTS = DATA / "reference" / "real" / "plans.json"
BY_ITSELF = "run by itself: "
SECONDS = 240.0
SHARE = 0.75
CPU_STEPS = 2
AS_ROUNDED = 1e-4  # a part of a loss: fp32 sums in another order
CPU_SECONDS = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--cpu-python", default=sys.executable)
    args = parser.parse_intermixed_args()
    programs = tomllib.loads((REAL / "programs.toml").read_text(encoding="utf-8"))
    plans = tomllib.loads((REAL / "plans.toml").read_text(encoding="utf-8"))
    table = {name: programs.get(name, {}) | entry for name, entry in plans.items()}
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    search.ANSWERS = dict.fromkeys(Numerics, 1)
    for name, program in table.items():
        if args.names and name not in args.names:
            continue
        known[name] = outcome(program, args.checkouts.resolve(), args.python, args.cpu_python)
        print(f"{name:28} {json.dumps(known[name])}", flush=True)
        ordered = {name: known[name] for name in table if name in known}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(page(table, ordered), encoding="utf-8")
    return 0


def outcome(program: dict[str, Any], checkouts: Path, python: str, cpu_python: str) -> dict[str, Any]:
    """What became of one script."""
    source = checkouts / program["repository"].partition("/")[2]
    asked = ["git", "-C", str(source), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if commit != program["commit"]:
        return {"refused": f"no checkout of {program['commit'][:9]} in {source.name}"}
    variables = OFFLINE | program.get("environment", {})
    before = dict(os.environ)
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, source.name)
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git"))
        try:
            os.environ.update(variables)
            os.chdir(copy / program.get("folder", ""))
            return planned(program, python, cpu_python)
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)


def planned(program: dict[str, Any], python: str, cpu_python: str) -> dict[str, Any]:
    """The plan for a script in this folder."""
    making = [str(REAL / "made_for_plans.py"), *program.get("made", ())]
    made = subprocess.run([cpu_python, *making], capture_output=True, text=True, check=False)
    is_drawn = made.returncode == 0
    if not is_drawn:
        # torchvision's CUDA build needs a PyTorch with CUDA even to be imported; on a card, large weights are zeros
        emulate = [sys.executable, "-m", "workbench.gpus.emulator", "--python", python, "--no-history", "--"]
        made = subprocess.run([*emulate, python, *making], capture_output=True, text=True, check=False)
    if made.returncode:
        return {"refused": f"its data could not be made: {made.stderr.strip()[-200:]}"}
    for replace in program.get("replace", ()):
        text = Path(replace["file"]).read_text(encoding="utf-8")
        assert replace["old"] in text
        Path(replace["file"]).write_text(text.replace(replace["old"], replace["new"]), encoding="utf-8")
    command = [python if word == "python" else word for word in shlex.split(program["command"])]
    gpu = program.get("gpu", "t4")
    began = time.monotonic()
    try:
        as_it_is = search.fit(command, gpu, time_limit_s=SECONDS)
        reserved = as_it_is.needed_bytes - find_gpu(gpu).context_bytes_estimate
        budget = find_gpu(gpu).context_bytes_estimate + int(SHARE * reserved)
        began = time.monotonic()
        fit = search.fit(command, gpu, budget=budget, time_limit_s=SECONDS, write=True)
    except WorkbenchError as error:
        return {"refused": without_folders(str(error), python), "seconds": round(time.monotonic() - began)}
    answers = [answer.to_dict() for answer in fit.candidates]
    row = {
        "needed_bytes": fit.needed_bytes,
        "budget_bytes": budget,
        "fits": fit.fits,
        "seen": fit.tokens,
        "candidates": [
            {**answer, "edits": [without_folders(edit, python) for edit in answer["edits"]]} for answer in answers
        ],
        "failed": list(fit.failed),
        "skipped": dict(fit.skipped),
        "ended": fit.ended,
        "written": [without_folders(line, python) for line in fit.written],
        "written_reserved_bytes": fit.written_reserved_bytes,
        "seconds": round(time.monotonic() - began),
    }
    print(fit, flush=True)
    if is_drawn and fit.written_reserved_bytes and fit.candidates[0].numerics is Numerics.EXACT:
        (changed,) = [line for line in fit.written if line.startswith(BY_ITSELF)]
        row["losses"] = losses_on_the_cpu(shlex.join(command), cpu_python)
        if isinstance(row["losses"], list):
            row["losses_changed"] = losses_on_the_cpu(changed.removeprefix(BY_ITSELF), cpu_python)
        print(row["losses"], row.get("losses_changed"), flush=True)
    return row


def losses_on_the_cpu(command: str, python: str) -> list[float] | str:
    """Those of the first steps; or why there are none."""
    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    asked = [python, str(REAL / "first_losses.py"), str(CPU_STEPS), *words[1:]]
    try:
        done = subprocess.run(
            asked, env=os.environ | variables, capture_output=True, text=True, timeout=CPU_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not done in {CPU_SECONDS:.0f} s"
    try:
        losses: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
        return losses
    except (IndexError, ValueError):
        return without_folders((done.stderr.strip().splitlines() or ["it ended without steps"])[-1][:120], python)


def without_folders(line: str, python: str) -> str:
    """The folders of this machine are nobody's concern."""
    return re.sub(r"/\S*/site-packages/", "", line.replace(python, "python").replace(f"{Path.cwd()}{os.sep}", ""))


def page(table: dict[str, Any], known: dict[str, Any]) -> str:
    """The table as people read it."""
    changed = [row for row in known.values() if row.get("candidates")]
    equal = [row for row in changed if row["written_reserved_bytes"] == row["candidates"][0]["reserved_bytes"]]
    compared = [row for row in changed if isinstance(row.get("losses_changed"), list)]
    alike = [row for row in compared if difference(row) < AS_ROUNDED]
    lines = [
        "# Scripts of others, made to fit",
        "",
        f"{len(known)} public scripts, each as its authors wrote it, on made data and random weights. `workbench plan` "
        "was asked to bring them under three quarters of what they reserve, and CUDA's context, with one answer of "
        f"each kind of loss: {len(changed)} have an answer. The changed script was written and run by itself where "
        f"that can be: {len(equal)} reserve what was planned, to the byte. Where the change is exact, both took "
        f"{CPU_STEPS} steps on the CPU, without dropout and autocast: {len(alike)} of the {len(compared)} that run "
        "there find the same losses up to rounding. Written by `tools/plans.py`; "
        "[plans.toml](../../../tools/real/plans.toml) and [programs.toml](../../../tools/real/programs.toml) have the "
        "commits and commands. Nothing was measured on a GPU. Back to [your script](../../../docs/your_script.md).",
        "",
        "| script | what it is | as it is | plan | written, and run by itself | losses on the CPU | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in known.items():
        program = table[name]
        cells = [link(name, program), program["kind"], *cells_of(row), str(row.get("seconds", ""))]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def cells_of(row: dict[str, Any]) -> list[str]:
    """As it is, the plan, what was written, and the losses."""
    if "refused" in row:
        return ["", row["refused"], "", ""]
    need = f"{format_bytes(row['needed_bytes'])}, of {format_bytes(row['budget_bytes'])}"
    found = [f"{a['numerics']}: {a['label']}, {format_bytes(a['needed_bytes'])}" for a in row["candidates"]]
    if not found:
        found = [row["ended"] or f"none: {len(row['failed'])} sets ran out of memory too"]
    written = row["written"][-1].strip() if row["written"] else ""  # above it stands the patch
    if row["written_reserved_bytes"]:
        planned_bytes = row["candidates"][0]["reserved_bytes"]
        written = f"{row['written_reserved_bytes']:,} bytes, "
        written += "as planned" if row["written_reserved_bytes"] == planned_bytes else f"the plan had {planned_bytes:,}"
    return [need, "; ".join(found), written, losses_in_words(row)]


def losses_in_words(row: dict[str, Any]) -> str:
    losses = row.get("losses_changed", "")
    if isinstance(row.get("losses"), str):
        return f"not compared: {row['losses']}"
    if isinstance(losses, str):
        return f"not compared: {losses}" if losses else ""
    alike = "the same" if difference(row) < AS_ROUNDED else "NOT the same"
    return f"{alike}: {', '.join(f'{loss:.6g}' for loss in losses)}; they differ by {difference(row):.1e}"


def difference(row: dict[str, Any]) -> float:
    """Of the losses, at most, as a part of them."""
    pairs = zip(row["losses"], row["losses_changed"], strict=True)
    return max(abs(changed - loss) / max(abs(loss), 1e-12) for loss, changed in pairs)


if __name__ == "__main__":
    sys.exit(main())
