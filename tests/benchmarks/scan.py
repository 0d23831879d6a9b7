"""How fast a scan is: `python tests/benchmarks/scan.py [ROWS] [MEAN_BYTES]`, on a quiet machine. Aim: 100,000 in 20 s.

Rows are pieces of Shakespeare of log-normal length, a hundred of them far longer than the others; all of these have to
be named. The second scan finds the predictions that the first has made.
"""

import json
import math
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from workbench.advise.scan import scan
from workbench.base.paths import CORPORA
from workbench.recipe import Recipe

PLANTED, SIGMA = 100, 0.6


def write(path: Path, rows: int, mean: int) -> set[int]:
    """Returns the numbers of the planted lines."""
    chosen = random.Random(1)
    text = (CORPORA / "shakespeare" / "train.txt").read_text(encoding="utf-8")
    planted = set(chosen.sample(range(rows), PLANTED))
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            size = min(int(chosen.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)), 10 * mean)
            size = 15 * mean + chosen.randrange(5 * mean) if row in planted else size
            start = chosen.randrange(len(text) - size)
            file.write(json.dumps({"text": text[start : start + size]}) + "\n")
    return {row + 1 for row in planted}


def main(rows: int = 100_000, mean: int = 500) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        planted = write(path, rows, mean)
        print(f"{rows:,} rows, {path.stat().st_size / 2**20:,.0f} MiB")
        recipe = Recipe(model="gpt2", corpus=str(path), seed=42)
        for title, longest in (("longest 5", 5), (f"longest {PLANTED}", PLANTED)):
            start, processor = time.perf_counter(), time.process_time()
            found = scan(recipe, "t4", longest=longest)
            seconds, processor = time.perf_counter() - start, time.process_time() - processor
            named = {int(one["place"].removeprefix("line ")) for one in found.longest}
            host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
            print(f"{title}: {seconds:.1f} s, processor {processor:.1f} s, host at most {host:.0f} MiB")
            print(f"  planted and named: {len(named & planted)} of {longest}")
            print(f"  {found.cap}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
