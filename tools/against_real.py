"""Published measurements on real GPUs, each repeated on the emulated one: tools/against_real.py [PART OF AN ID …]

`data/reference/real/public.json` has the rows, with source, versions and what is not known of each; the scripts in
`tools/real` do the same work anew, in our own words. Printed are the signed errors of the emulated bytes; nothing is
fitted. The results of a whole run are kept in `data/reference/real/emulated.json`.
"""

import argparse
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

from workbench.base.paths import DATA, versions
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator.launch import environment

REAL = DATA / "reference" / "real"
SCRIPTS = Path(__file__).resolve().with_name("real")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="PART", help="only the rows whose id has this in it")
    asked = parser.parse_args().ids
    rows = json.loads((REAL / "public.json").read_text(encoding="utf-8"))["rows"]
    chosen = [row for row in rows if not asked or any(part in row["id"] for part in asked)]
    print(f"{'row':34} {'card':10} {'real':>12} {'emulated':>12}   error      within the source's rounding")
    done = [repeated(row) for row in chosen]
    print(summary(done))
    if not asked:
        found = {"versions": versions(), "summary": summary(done), "rows": done}
        (REAL / "emulated.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return any("failed" in row for row in done)


@cache
def ran(card: str, script: str, *arguments: str) -> subprocess.CompletedProcess:
    """A script on the emulated card; one that prints a whole sweep is run once for all its rows."""
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, env=environment(gpu(card)), capture_output=True, text=True, check=False)


def repeated(row: dict) -> dict:
    """The row with the emulated bytes and their errors; printed as soon as they are there."""
    done = ran(row["gpu"], row["script"], *row["arguments"])
    if done.returncode:
        print(f"{row['id']:34} {row['gpu']:10} failed: {done.stderr.strip().splitlines()[-1]}")
        return {"id": row["id"], "failed": done.stderr[-500:]}
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    measured = next(entry for entry in reversed(printed) if entry.get("run") == row.get("run", entry.get("run")))
    found = {"id": row["id"], "gpu": row["gpu"]}
    for kind in ("allocated", "reserved"):
        if (real := row[f"real_{kind}_bytes"]) is not None:
            error = measured[kind] - real
            close = abs(error) <= row["rounding"]
            found |= {
                f"real_{kind}_bytes": real,
                f"emulated_{kind}_bytes": measured[kind],
                f"{kind}_error": error / real,
            }
            shown = f"{real:12,} {measured[kind]:12,} {error / real:+9.4%}  {'yes' if close else 'no':3} {kind}"
            print(f"{row['id']:34} {row['gpu']:10} {shown}", flush=True)
    return found


def summary(done: list[dict]) -> dict[str, float]:
    """Mean and worst absolute errors."""
    figures: dict[str, float] = {"rows": len(done)}
    for kind in ("allocated", "reserved"):
        errors = [abs(row[f"{kind}_error"]) for row in done if f"{kind}_error" in row]
        if errors:
            figures |= {
                f"{kind}_rows": len(errors),
                f"{kind}_mean": sum(errors) / len(errors),
                f"{kind}_worst": max(errors),
            }
    return figures


if __name__ == "__main__":
    sys.exit(main())
