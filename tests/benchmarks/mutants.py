"""How strong the tests are: forty small faults, drawn by a seed over all rooms, and how many of them a layer notices.

    python tests/benchmarks/mutants.py                          # against what `make test` runs
    python tests/benchmarks/mutants.py --layer dear --only 3 7  # survivors of it, against the rest

A fault is a statement dropped, a comparison turned, a number changed or a function left at once. Where each could be,
a probe is put into a copy of the checkout, and one run of the layer notes which tests come by. Then each fault is made
alone, and those tests are asked, the quickest first, until one fails: a test that does not come by cannot notice it.
Faults lie in functions; what is executed on import has no test of its own. One line of JSON a fault goes to --output.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {"first": "(smoke or not dear) and not long", "dear": "dear and not smoke and not long"}
KINDS = ("drop", "compare", "constant", "return")
TURNED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
PROBE = """import os
seen = set()
def reached(number):
    visit = number, os.environ.get("PYTEST_CURRENT_TEST", "")
    if visit not in seen:
        seen.add(visit)
        with open({file!r}, "a") as file:
            print(*visit, sep="\\t", file=file)
"""
SECONDS_FOR_ONE = 600


@dataclass(frozen=True)
class Fault:
    """Where one could be made. Lines count from 1, columns in bytes from 0, as `ast` counts them."""

    file: str
    kind: str
    line: int
    column: int
    end_line: int
    end_column: int
    probe_line: int
    probe_column: int

    @property
    def room(self) -> str:
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else "(top)"

    def made_in(self, source: str) -> str:
        start = position(source, self.line, self.column)
        end = position(source, self.end_line, self.end_column)
        code = source[start:end]
        match self.kind:
            case "drop":
                changed = "pass"
            case "return":
                changed = f"return None\n{' ' * self.column}{code}"
            case "constant":
                value = ast.literal_eval(code)
                changed = repr(not value if isinstance(value, bool) else value + 1)
            case "compare":
                comparison = ast.parse(f"({code})", mode="eval").body
                assert isinstance(comparison, ast.Compare)
                left = ast.get_source_segment(f"({code})", comparison.left)
                right = ast.get_source_segment(f"({code})", comparison.comparators[0])
                changed = f"({left}) {TURNED[type(comparison.ops[0])]} ({right})"
        return source[:start] + changed + source[end:]


def position(source: str, line: int, column: int) -> int:
    """The index in `source` of a column that is counted in bytes."""
    lines = source.split("\n")
    return sum(len(before) + 1 for before in lines[: line - 1]) + len(lines[line - 1].encode()[:column].decode())


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class FaultFinder(ast.NodeVisitor):
    """Every place in the functions of one file where a fault could be made."""

    def __init__(self, file: str, source: str) -> None:
        self.file = file
        self.lines = source.split("\n")
        self.statement: ast.stmt | None = None  # before which a probe can stand
        self.depth = 0  # of functions
        self.faults: list[Fault] = []
        self.visit(ast.parse(source))

    def add(self, kind: str, node: ast.stmt | ast.expr) -> None:
        probe = self.statement
        if self.depth and probe is not None and node.end_lineno is not None and node.end_col_offset is not None:
            place = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
            self.faults.append(Fault(self.file, kind, *place, probe.lineno, probe.col_offset))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.arguments) or is_docstring(node):
            return
        outer = self.statement
        if isinstance(node, ast.stmt) and not self.lines[node.lineno - 1].lstrip().startswith("elif"):
            self.statement = node
        if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign):
            self.add("drop", node)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
            self.add("compare", node)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            self.add("constant", node)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        self.depth += function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = next((statement for statement in node.body if not is_docstring(statement)), None)
            if first is not None and not isinstance(first, ast.Pass | ast.Raise):
                self.statement = first
                self.add("return", first)
        self.generic_visit(node)
        self.depth -= function
        self.statement = outer


def draw(seed: int, count: int) -> list[Fault]:
    """As many faults of each room as it has places for one, and at least one; the four kinds in turn."""
    chance = random.Random(seed)
    rooms: dict[str, list[Fault]] = defaultdict(list)
    for path in sorted((ROOT / "workbench").rglob("*.py")):
        for fault in FaultFinder(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")).faults:
            rooms[fault.room].append(fault)
    places = sum(map(len, rooms.values()))
    shares = {room: max(1, round(count * len(faults) / places)) for room, faults in rooms.items()}
    while sum(shares.values()) > count:
        shares[max(shares, key=shares.__getitem__)] -= 1
    while sum(shares.values()) < count:
        shares[max(shares, key=lambda room: len(rooms[room]) / shares[room])] += 1
    drawn: list[Fault] = []
    for room in sorted(rooms):
        for _ in range(shares[room]):
            kind = KINDS[len(drawn) % len(KINDS)]
            unused = [fault for fault in rooms[room] if fault not in drawn]
            drawn.append(chance.choice([fault for fault in unused if fault.kind == kind] or unused))
    return drawn


def put_probes(checkout: Path, faults: list[Fault]) -> None:
    by_file: dict[str, list[tuple[int, Fault]]] = defaultdict(list)
    for number, fault in enumerate(faults):
        by_file[fault.file].append((number, fault))
    for file, numbered in by_file.items():
        path = checkout / file
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, fault in sorted(numbered, key=lambda pair: -pair[1].probe_line):
            probe = f'{" " * fault.probe_column}__import__("mutation_probe").reached({number})'
            lines.insert(fault.probe_line - 1, probe)
        path.write_text("\n".join(lines), encoding="utf-8")


@dataclass
class Layer:
    """A copy of the checkout, and what a run of the layer in it has told."""

    checkout: Path
    expression: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": f"{self.checkout}{os.pathsep}{self.checkout.parent}"}

    def visits(self, faults: list[Fault]) -> tuple[dict[int, list[str]], dict[str, float]]:
        """By fault the tests that come by, and the seconds of each test that passed."""
        visited = self.checkout.parent / "visits.tsv"
        visited.touch()
        (self.checkout.parent / "mutation_probe.py").write_text(PROBE.format(file=str(visited)), encoding="utf-8")
        put_probes(self.checkout, faults)
        results = self.checkout.parent / "results.xml"
        options = ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", f"--junit-xml={results}"]
        options += ["-o", "junit_family=xunit1", "-m", self.expression]
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=self.checkout, env=self.environment, check=False)
        seconds = dict(passed(results))
        tests: dict[int, set[str]] = defaultdict(set)
        for line in visited.read_text(encoding="utf-8").splitlines():
            number, _, visit = line.partition("\t")
            test, _, phase = visit.rpartition(" (")
            test = test.partition("@")[0]
            tests[int(number)].add(test)
            if phase.startswith("setup"):  # a fixture, of which others of the file may have the use
                file = test.partition("::")[0]
                tests[int(number)] |= {other for other in seconds if other.startswith(f"{file}::")}
        subprocess.run(["git", "checkout", "--quiet", "--", "workbench"], cwd=self.checkout, check=True)
        return {number: sorted(names & seconds.keys(), key=seconds.get) for number, names in tests.items()}, seconds

    def killer(self, fault: Fault, tests: list[str]) -> str:
        """The first of the tests that notices the fault, or nothing."""
        path = self.checkout / fault.file
        source = path.read_text(encoding="utf-8")
        path.write_text(fault.made_in(source), encoding="utf-8")
        arguments = self.checkout.parent / "tests.txt"
        arguments.write_text("\n".join(tests), encoding="utf-8")
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", self.expression, f"@{arguments}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options],
            cwd=self.checkout,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS_FOR_ONE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"a time-out of {SECONDS_FOR_ONE} s"
        finally:
            path.write_text(source, encoding="utf-8")
        if process.returncode == 0:
            return ""
        if process.returncode != pytest.ExitCode.TESTS_FAILED:
            raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-3000:]}")
        failed = re.search(r"^(?:FAILED|ERROR|SUBFAILED\S*) (tests\S+)", output, flags=re.MULTILINE)
        return failed[1] if failed else output[-300:]


def passed(results: Path) -> Iterator[tuple[str, float]]:
    """Each test that passed, by the id that pytest takes, with its seconds."""
    from xml.etree import ElementTree

    for case in ElementTree.parse(results).iter("testcase"):
        if not {"failure", "error", "skipped"} & {child.tag for child in case}:
            file = case.get("file", "")
            inner = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
            name = "::".join(part for part in (file, inner, case.get("name", "")) if part)
            yield name.rpartition("@")[0] or name, float(case.get("time", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--layer", choices=LAYERS, default="first")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of faults; all of them are drawn first")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "mutants.jsonl")
    options = parser.parse_args()
    faults = draw(options.seed, options.count)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        layer = Layer(checkout, LAYERS[options.layer])
        tests, _ = layer.visits(faults)
        options.output.parent.mkdir(exist_ok=True)
        for number in options.only or range(len(faults)):
            began = time.monotonic()
            killer = layer.killer(faults[number], tests[number]) if tests.get(number) else ""
            row = {
                "number": number,
                **asdict(faults[number]),
                "tests": len(tests.get(number, [])),
                "killer": killer,
                "seconds": round(time.monotonic() - began),
            }
            print(json.dumps(row), flush=True)
            with options.output.open("a", encoding="utf-8") as file:
                print(json.dumps(row), file=file)
        shutil.rmtree(checkout)


if __name__ == "__main__":
    main()
