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
import subprocess
import sys
import time
from collections import Counter
from contextlib import chdir
from functools import partial
from pathlib import Path

from programs import (
    OFFLINE,
    REAL,
    Row,
    Table,
    command_of,
    copy_program,
    emulator,
    lacking_checkout,
    link,
    quietly,
    read_table,
    try_all,
)

from workbench.base.categories import format_bytes
from workbench.base.errors import WorkbenchError
from workbench.base.patches import change_environment
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
    checkouts = args.checkouts.resolve()
    programs = read_table("programs.toml")
    table = {name: programs.get(name, {}) | entry for name, entry in read_table("plans.toml").items()}
    search.ANSWERS = dict.fromkeys(Numerics, 1)
    find_outcome = partial(outcome, checkouts=checkouts, python=args.python, cpu_python=args.cpu_python)
    try_all(table, args.names, RESULTS, outcome=find_outcome, in_words=json.dumps, page=page)
    return 0


# ---- one script ----


def outcome(program: Row, checkouts: Path, python: str, cpu_python: str) -> Row:
    """Plan for one script in a copy of its checkout, and return what became of it."""
    reason = lacking_checkout(program, checkouts)
    if reason:
        return {"refused": reason}
    variables = OFFLINE | program.get("environment", {})
    with copy_program(program, checkouts) as folder, change_environment(variables), chdir(folder):
        return make_plan(program, python, cpu_python)


def make_plan(program: Row, python: str, cpu_python: str) -> Row:
    """Plan for the script in this folder, and compare its losses with the changed one's where both can be run."""
    making = [str(REAL / "made_for_plans.py"), *program.get("made", ())]
    data = quietly([cpu_python, *making])
    is_drawn = data.returncode == 0
    if not is_drawn:
        # torchvision's CUDA build needs a PyTorch with CUDA even to be imported; on a card, large weights are zeros
        data = quietly([*emulator(python), "--no-history", "--", python, *making])
    if data.returncode:
        return {"refused": f"its data could not be made: {data.stderr.strip()[-200:]}"}
    for replacement in program.get("replace", ()):
        replace_text(Path(replacement["file"]), replacement["old"], replacement["new"])
    command = command_of(program, python)
    gpu = program.get("gpu", "t4")
    began_at = time.monotonic()
    try:
        budget = smaller_budget(command, gpu)
        began_at = time.monotonic()
        fit = search.fit(command, gpu, budget=budget, time_limit_s=SECONDS, write=True)
    except WorkbenchError as error:
        return {"refused": without_folders(str(error), python), "seconds": round(time.monotonic() - began_at)}
    row = row_of(fit, budget, python) | {"seconds": round(time.monotonic() - began_at)}
    print(fit, flush=True)
    # zeros would have equal losses whatever was changed
    if is_drawn and fit.written_reserved_bytes and fit.candidates[0].numerics is Numerics.EXACT:
        row |= losses_of_both(command, fit.written, cpu_python)
    return row


def replace_text(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def smaller_budget(command: list[str], gpu: str) -> int:
    """Return CUDA's context and a part of what the script reserves as it is, in bytes."""
    context = find_gpu(gpu).context_bytes_estimate
    as_it_is = search.fit(command, gpu, time_limit_s=SECONDS)
    return context + int(SHARE * (as_it_is.needed_bytes - context))


def row_of(fit: search.Fit, budget: int, python: str) -> Row:
    candidates = []
    for candidate in fit.candidates:
        facts = candidate.to_dict()
        facts["edits"] = [without_folders(edit, python) for edit in facts["edits"]]
        candidates.append(facts)
    return {
        "needed_bytes": fit.needed_bytes,
        "budget_bytes": budget,
        "fits": fit.fits,
        "seen": fit.tokens,
        "candidates": candidates,
        "failed": list(fit.failed),
        "skipped": dict(fit.skipped),
        "ended": fit.ended,
        "written": [without_folders(line, python) for line in fit.written],
        "written_reserved_bytes": fit.written_reserved_bytes,
    }


# ---- its losses ----


def losses_of_both(command: list[str], written: tuple[str, ...], python: str) -> Row:
    """Return the losses of the script, and of the changed one, whose command is in the plan."""
    row: Row = {"losses": losses_on_the_cpu(shlex.join(command), python)}
    (changed,) = [line for line in written if line.startswith(BY_ITSELF)]
    if isinstance(row["losses"], list):
        row["losses_changed"] = losses_on_the_cpu(changed.removeprefix(BY_ITSELF), python)
    print(row["losses"], row.get("losses_changed"), flush=True)
    return row


def losses_on_the_cpu(command: str, python: str) -> list[float] | str:
    """Return the losses of the first steps, or why there are none."""
    parts = shlex.split(command)
    variables = dict(os.environ)
    while "=" in parts[0]:
        name, _, value = parts.pop(0).partition("=")
        variables[name] = value
    first_losses = [python, str(REAL / "first_losses.py"), str(CPU_STEPS), *parts[1:]]
    try:
        done = quietly(first_losses, env=variables, timeout=CPU_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not done in {CPU_SECONDS:.0f} s"
    try:
        losses: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
        return losses
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines() or ["it ended without steps"]
        return without_folders(lines[-1][:120], python)


def without_folders(line: str, python: str) -> str:
    """Leave out the folders of this machine, which are nobody's concern."""
    line = line.replace(python, "python")
    line = line.replace(f"{Path.cwd()}{os.sep}", "")
    return re.sub(r"/\S*/site-packages/", "", line)


# ---- the page ----


def page(table: Table, results: Table) -> str:
    """Return the table as people read it, in Markdown."""
    counts: Counter[str] = Counter()
    for row in results.values():
        if row.get("candidates"):
            counts["changed"] += 1
            counts["equal"] += row["written_reserved_bytes"] == bytes_of_plan(row)
        if isinstance(row.get("losses_changed"), list):
            counts["compared"] += 1
            counts["alike"] += difference(row) < AS_ROUNDED
    lines = [
        "# Scripts of others, made to fit",
        "",
        f"{len(results)} public scripts, each as its authors wrote it, on made data and random weights. `workbench "
        "plan` was asked to bring them under three quarters of what they reserve, and CUDA's context, with one answer "
        f"of each kind of loss: {counts['changed']} have an answer. The changed script was written and run by itself "
        f"where that can be: {counts['equal']} reserve what was planned, to the byte. Where the change is exact, both "
        f"took {CPU_STEPS} steps on the CPU, without dropout and autocast: {counts['alike']} of the "
        f"{counts['compared']} that run there find the same losses up to rounding. Written by `tools/plans.py`; "
        "[plans.toml](../../../tools/real/plans.toml) and [programs.toml](../../../tools/real/programs.toml) have the "
        "commits and commands. Nothing was measured on a GPU. Back to [your script](../../../docs/your_script.md).",
        "",
        "| script | what it is | as it is | plan | written, and run by itself | losses on the CPU | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        program = table[name]
        cells = [link(name, program), program["kind"], *cells_of(row), str(row.get("seconds", ""))]
        cells = [cell.replace("|", "/") for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cells_of(row: Row) -> list[str]:
    """Return four cells: the script as it is, the plan, what was written, and the losses."""
    if "refused" in row:
        return ["", row["refused"], "", ""]
    need = f"{format_bytes(row['needed_bytes'])}, of {format_bytes(row['budget_bytes'])}"
    return [need, plan_in_words(row), written_in_words(row), losses_in_words(row)]


def plan_in_words(row: Row) -> str:
    answers = []
    for candidate in row["candidates"]:
        need = format_bytes(candidate["needed_bytes"])
        answers.append(f"{candidate['numerics']}: {candidate['label']}, {need}")
    if answers:
        return "; ".join(answers)
    return row["ended"] or f"none: {len(row['failed'])} sets ran out of memory too"


def written_in_words(row: Row) -> str:
    reserved = row["written_reserved_bytes"]
    if not reserved:
        return row["written"][-1].strip() if row["written"] else ""  # the patch stands above
    if reserved == bytes_of_plan(row):
        return f"{reserved:,} bytes, as planned"
    return f"{reserved:,} bytes, the plan had {bytes_of_plan(row):,}"


def bytes_of_plan(row: Row) -> int:
    """Return what the plan's first answer reserves; that answer is the one that is written."""
    reserved: int = row["candidates"][0]["reserved_bytes"]
    return reserved


def losses_in_words(row: Row) -> str:
    losses = row.get("losses_changed", "")
    if isinstance(row.get("losses"), str):
        return f"not compared: {row['losses']}"
    if isinstance(losses, str):
        return f"not compared: {losses}" if losses else ""
    alike = "the same" if difference(row) < AS_ROUNDED else "NOT the same"
    shown_losses = ", ".join(f"{loss:.6g}" for loss in losses)
    return f"{alike}: {shown_losses}; they differ by {difference(row):.1e}"


def difference(row: Row) -> float:
    """Return the largest difference of two losses, as a part of the script's loss."""
    pairs = zip(row["losses"], row["losses_changed"], strict=True)
    return max(abs(changed - loss) / max(abs(loss), 1e-12) for loss, changed in pairs)


if __name__ == "__main__":
    sys.exit(main())
