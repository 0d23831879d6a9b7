"""Make what the lessons take from files: `python tools/lessons.py predictions`, then `python tools/lessons.py times`.

`predictions` executes every notebook, adds what is missing in `data/predictions` and removes what none of them asked
for; the emulated GPU must be set up (`make emulator`). `times` executes them once more, in their order and from an
empty folder of runs, and writes how many runs and seconds each takes to `data/reference/cpu/gpt2-tiny/lessons.csv`.
"""

import argparse
import csv
import os
import tempfile
import time
from pathlib import Path

from workbench.gpus.emulator import place
from workbench.lessons.notebooks import execute_notebook, find_notebooks
from workbench.lessons.progress import TIMES
from workbench.prediction import committed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predictions", "times"])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WORKBENCH_RUNS"] = str(Path(folder) / "runs")
        if parser.parse_args().what == "predictions":
            make_predictions(Path(folder))
        else:
            write_times(Path(folder))


def make_predictions(folder: Path) -> None:
    place.stub_folder()  # raises where there is no emulated GPU: the shadow's answers are not for keeping
    os.environ[committed.CHOICE] = committed.KEEP
    began_at = time.time()
    for notebook in find_notebooks():
        execute_notebook(notebook, folder / notebook.name)
        print(f"{notebook.stem}: {len(list(committed.FOLDER.iterdir()))} predictions", flush=True)
    for file in committed.FOLDER.iterdir():
        if file.stat().st_mtime < began_at:
            print(f"nobody asked for {file.name}")
            file.unlink()


def write_times(folder: Path) -> None:
    rows = [("lesson", "runs", "seconds")]
    records = 0
    for notebook in find_notebooks():
        began_at_s = time.monotonic()
        execute_notebook(notebook, folder / notebook.name)
        seconds = round(time.monotonic() - began_at_s)
        total = len(list((folder / "runs").glob("*.json")))
        rows.append((notebook.stem, str(total - records), str(seconds)))
        records = total
        print(*rows[-1], flush=True)
    with TIMES.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
