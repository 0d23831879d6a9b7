"""The progress of a build of the notebooks: those that are done, the runs that are left, and about their time.

`tools/lessons.py` writes `lessons.csv`: the seconds of each notebook in one `make run`, and the runs that it shows.
"""

import threading
from collections.abc import Sequence

import pandas as pd

from workbench.base.paths import DATA

TIMES = DATA / "reference" / "cpu" / "gpt2-tiny" / "lessons.csv"


def duration(seconds: float) -> str:
    """Write a time as people say it: `40 s`, `12 minutes`, `2 h 50 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} minutes"
    return f"{minutes // 60} h {minutes % 60} min"


class Progress:
    """The progress of a build, which prints a line for every notebook that is done.

    Args:
        names: the stems of all notebooks that will be executed.
        at_once: the number of notebooks that run at a time.
    """

    def __init__(self, names: Sequence[str], at_once: int) -> None:
        times = pd.read_csv(TIMES, index_col="lesson").reindex(names)
        self.expected = times.fillna(times.mean()).fillna(0)
        self.at_once = at_once
        self.left = list(names)
        self.taken_s = 0.0
        self.lock = threading.Lock()

    def report(self, name: str, seconds: float) -> None:
        """Print that a notebook has been executed to its end, in so many seconds, and what is left."""
        with self.lock:
            self.left.remove(name)
            self.taken_s += seconds
            print(f"{name:32} {seconds:4.0f} s   {self.remaining()}", flush=True)

    def remaining(self) -> str:
        """Say what is left, if this machine's times go on in proportion to those of the table."""
        count = len(self.expected)
        if not self.left:
            return f"{count} of {count}"
        left = self.expected.loc[self.left]
        expected_s = self.expected["seconds"].sum() - left["seconds"].sum()
        pace = self.taken_s / expected_s if expected_s else 1.0
        time_left = duration(left["seconds"].sum() * pace / self.at_once)
        runs = left["runs"].sum()
        return f"{count - len(self.left)} of {count}; left: about {runs:.0f} runs and {time_left}"
