"""Make what the lessons take from files: `python tools/lessons.py predictions`, then `python tools/lessons.py times`.

`predictions` executes every notebook, adds what is missing in `data/predictions` and removes what none of them asked
for; the emulated GPU must be set up (`make emulator`). `times` reads the notebooks that `make run` has executed, and
writes to `data/reference/cpu/gpt2-tiny/lessons.csv` how many runs each shows in its tables and how long it took.
"""

import argparse
import csv
import os
import tempfile
import time
from pathlib import Path

import nbformat

from workbench.base.paths import BUILD
from workbench.gpus.emulator import place
from workbench.lessons.notebooks import execute_notebook, find_notebooks
from workbench.lessons.progress import TIMES
from workbench.prediction import committed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predictions", "times"])
    if parser.parse_args().what == "times":
        write_times()
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["WORKBENCH_RUNS"] = str(Path(folder) / "runs")
            make_predictions(Path(folder))


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


def write_times() -> None:
    rows = [("lesson", "runs", "seconds")]
    for notebook in find_notebooks():
        executed = nbformat.read(BUILD / "notebooks" / notebook.name, as_version=4)
        seconds = executed.metadata["papermill"]["duration"]
        rows.append((notebook.stem, str(runs_shown(executed)), f"{seconds:.0f}"))
    with TIMES.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def runs_shown(executed: nbformat.NotebookNode) -> int:
    """Count the rows of a notebook's tables of records."""
    count = 0
    for cell in executed.cells:
        for output in cell.get("outputs", []):
            page = output.get("data", {}).get("text/html", "")
            if "losses differ by" in page:
                count += page.partition("<tbody>")[2].count("<tr")
    return count


if __name__ == "__main__":
    main()
