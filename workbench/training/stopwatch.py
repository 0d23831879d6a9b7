"""The time of the steps after the warm-up, and whether other programs took processors from them meanwhile."""

import os
import time
from typing import Any

import numpy as np
import psutil

WARM_UP_STEPS = 3


class Stopwatch:
    """Laps of a training: what lies between two steps, as an evaluation, is no part of their time."""

    def __init__(self) -> None:
        self.laps: list[tuple[np.ndarray, int]] = []  # the clocks without pauses, and tokens seen until then
        self.paused = np.zeros(3)

    def lap(self, tokens: int) -> None:
        """A step has ended, and so many tokens have been seen."""
        self.laps.append((clocks() - self.paused, tokens))

    def pause(self) -> None:
        """What came since the last lap does not count."""
        if self.laps:
            self.paused = clocks() - self.laps[-1][0]

    def speed(self) -> dict[str, Any]:
        """Of the steps after the warm-up, fields of a record; none if there are none."""
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
            # While one processor is idle, nobody has to wait for another: so an idle second excuses a busy one, too.
            "contended_share": max(0.0, available_s - processor_s - 2 * idle_s) / available_s,
        }


def processors() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(psutil.cpu_count() or 1)]


def clocks() -> np.ndarray:
    """Seconds: of the clock, of processor time of this process, and in which these processors were idle, added up."""
    times = psutil.cpu_times(percpu=True)
    idle_s = 0.0
    for number in processors():
        idle_s += times[number].idle + getattr(times[number], "iowait", 0.0)
    return np.array([time.perf_counter(), time.process_time(), idle_s])
