"""What each test costs in CPU-seconds, with all processes that it starts; and a budget that the first layer keeps.

`make test` passes `--cpu-budget`, which is a multiple of what the tests cost on average, so that a slow machine keeps
to it as well. A test, or a fixture that several tests share, that uses more is named, unless the test is marked `dear`:
then it belongs to `make test-dear`. What uses half as much again fails the run: the same test takes a quarter more
seconds where neighbours share the processors' caches, and that is nobody's mistake. A shared fixture's cost is its own,
and not that of the test which happened to ask for it first. The seconds are the processors' and not the clock's, so
that waiting costs nothing. They travel in each report's `user_properties`, which is how pytest-xdist brings them home.
"""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

PROPERTY = "cpu seconds"
SHOWN = 10
TOLERANCE = 1.5  # times the budget, from which on a test fails
NOBODYS = "paid_before_the_first_test"  # the fixture with what a test process does once; no test asked for it
LEFT_OUT = "left out"


def child_processes(process_id: int) -> Iterator[int]:
    """The children that a process has now. Only Linux tells; elsewhere those count that have ended."""
    for tasks in Path(f"/proc/{process_id}/task").glob("*/children"):
        try:
            yield from map(int, tasks.read_text().split())
        except OSError:  # that thread has ended
            continue


def seconds_of_children(process_id: int) -> float:
    """CPU-seconds of the processes below one, and of those which they have waited for."""
    seconds = 0.0
    for child in child_processes(process_id):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
        seconds += ticks / os.sysconf("SC_CLK_TCK") + seconds_of_children(child)
    return seconds


def seconds_so_far() -> float:
    times = os.times()
    ended = times.children_user + times.children_system
    return times.user + times.system + ended + seconds_of_children(os.getpid())


class CpuBudget:
    """A plugin of pytest, in each test process and in the one that shows the results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.times_the_mean: float | None = config.getoption("cpu_budget")
        self.fixture_seconds = 0.0  # of shared fixtures, in the phase that is running
        self.shared: list[tuple[str, float]] = []
        self.costs: dict[str, float] = {}
        self.dear: set[str] = set()
        self.left_out = 0

    # ---- in the process that runs the tests ----

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = seconds_so_far()
        within = self.fixture_seconds
        try:
            return (yield)
        finally:
            seconds = seconds_so_far() - before - (self.fixture_seconds - within)
            self.fixture_seconds += seconds
            if fixturedef.argname != NOBODYS:
                self.shared.append((f"fixture {fixturedef.argname} of {fixturedef.baseid or 'tests'}", seconds))

    def measured(self, item: pytest.Item) -> Generator[None, object, object]:
        before = seconds_so_far()
        self.fixture_seconds = 0.0
        try:
            return (yield)
        finally:
            seconds = seconds_so_far() - before - self.fixture_seconds
            item.user_properties.append((PROPERTY, [item.nodeid, seconds]))
            item.user_properties += [(PROPERTY, list(cost)) for cost in self.shared]
            self.shared.clear()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self.measured(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self.measured(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self.measured(item))

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out += sum(item.get_closest_marker("dear") is not None for item in items)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[LEFT_OUT] = self.left_out
        elif self.failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    # ---- in the process that shows the results ----

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_testnodedown(self, node: object) -> None:
        """A process of pytest-xdist has ended; each has collected, and left out, the same."""
        self.left_out = getattr(node, "workeroutput", {}).get(LEFT_OUT, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":  # the last one has the properties of all three
            return
        for name, cost in report.user_properties:
            if name == PROPERTY:
                what, seconds = cost
                self.costs[what] = self.costs.get(what, 0.0) + seconds
                if "dear" in report.keywords:
                    self.dear.add(what)

    @property
    def budget(self) -> float | None:
        """The CPU-seconds that a test may use."""
        if self.times_the_mean is None or not self.costs:
            return None
        return self.times_the_mean * sum(self.costs.values()) / len(self.costs)

    @property
    def over(self) -> list[str]:
        """What uses more than the budget and is not marked as dear."""
        budget = self.budget
        if budget is None:
            return []
        return [what for what, seconds in self.costs.items() if seconds > budget and what not in self.dear]

    @property
    def failed(self) -> list[str]:
        """What uses so much more that no busy machine explains it."""
        budget = self.budget
        if budget is None:
            return []
        return [what for what in self.over if self.costs[what] > TOLERANCE * budget]

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.budget is None:
            return
        total = sum(self.costs.values())
        terminalreporter.section(f"CPU-seconds: {total:.0f} in all, the {SHOWN} dearest")
        for what in sorted(self.costs, key=self.costs.__getitem__, reverse=True)[:SHOWN]:
            terminalreporter.write_line(f"{self.costs[what]:6.1f}  {what}{'  (dear)' if what in self.dear else ''}")
        for what in self.over:
            is_failed = what in self.failed
            terminalreporter.write_line(
                f"{'FAILED' if is_failed else 'WARNING'} {what}: {self.costs[what]:.1f} CPU-seconds, more than the "
                f"{self.budget:.1f} of the first layer. Make it cheaper, or mark it pytest.mark.dear.",
                red=is_failed,
                yellow=not is_failed,
            )

    def pytest_unconfigure(self) -> None:
        if self.times_the_mean is not None and not hasattr(self.config, "workeroutput"):
            print(f"Left out: {self.left_out} dear tests. `make test-dear` runs them, `make test-all` runs everything.")
