"""The time of the steps after the warm-up, and whether other programs took processors from them meanwhile."""

import os
import time
from typing import Any

import numpy as np
import psutil

# Steps at the beginning that are not timed, but tracked: the first makes the optimizer's states, so the second is the
# first that needs all memory, and only after it has the allocator found its form. With `longest_first` these same
# steps get the longest example.
WARM_UP_STEPS = 3


class Stopwatch:
    """A clock for the steps of a training. Time between two steps, as of an evaluation, is left out."""

    def __init__(self) -> None:
        # After each step: the three `clocks` without the time of pauses, and the tokens seen until then.
        self.laps: list[tuple[np.ndarray, int]] = []
        self.paused = np.zeros(3)

    def lap(self, tokens: int) -> None:
        """Note that a step has ended, until which so many tokens have been seen."""
        self.laps.append((clocks() - self.paused, tokens))

    def pause(self) -> None:
        """Leave out the time since the last lap."""
        if self.laps:
            self.paused = clocks() - self.laps[-1][0]

    def speed(self) -> dict[str, Any]:
        """Return fields of a record: the mean over the steps after the warm-up. Only `timed_steps`, 0, if there are
        none."""
        timed = len(self.laps) - WARM_UP_STEPS
        if timed < 1:
            return {"timed_steps": 0}
        start, tokens_before = self.laps[WARM_UP_STEPS - 1]
        end, tokens_after = self.laps[-1]
        seconds, processor_s, idle_s = (end - start).tolist()
        available_s = seconds * len(processors())
        return {
            "timed_steps": timed,
            "step_time_s": seconds / timed,
            "tokens_per_s": (tokens_after - tokens_before) / seconds,
            "step_processor_s": processor_s / timed,
            # Other programs had the time that was neither ours nor idle. Nobody had to wait for them while another
            # processor was idle, so a second of theirs is excused for every idle second: one `idle_s` is the idle
            # time itself, and one the time of others beside it.
            "contended_share": max(0.0, available_s - processor_s - 2 * idle_s) / available_s,
        }


def processors() -> list[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(psutil.cpu_count() or 1)]


def clocks() -> np.ndarray:
    """Return three readings in seconds, (3,): the clock, this process's processor time, and the time for which its
    processors were idle, added up over them."""
    times = psutil.cpu_times(percpu=True)
    idle_s = 0.0
    for number in processors():
        idle_s += times[number].idle + getattr(times[number], "iowait", 0.0)
    return np.array([time.perf_counter(), time.process_time(), idle_s])
