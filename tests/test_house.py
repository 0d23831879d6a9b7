"""The plan of the house: what a folder listing promises. The layers themselves are import-linter's (`make lint`)."""

import ast
import io
import tokenize
from collections import defaultdict

import pytest

from workbench.paths import PACKAGE

CORE = ("recipe.py", "models", "texts", "techniques", "measure", "run", "records")
ROOMS = {
    "models", "texts", "techniques", "measure", "run", "records", "ranks", "gpus", "predict", "advise", "export",
    "lessons", "widgets",
}  # fmt: skip
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def files(*names):
    paths = [PACKAGE / name for name in names]
    return [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def code_lines(path):
    """Lines with code on them: no blank ones, comments or docstrings."""
    source, lines = path.read_text(encoding="utf-8"), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_the_core_stays_thin():
    assert sum(map(code_lines, files(*CORE))) <= 4000


def test_the_whole_package_can_be_held_in_mind():
    """The plan of the house says 10,000, and this is beyond it: the life of a run, scan, frontier, budgets, exercises
    and the clinic came on top of what filled that; then conversations, data sets of the hub and packed files (270),
    recipe files, arguments and trackers (130), scripts for TRL (45) and forks of a process (47), less a cache of fake
    tensors (61); then searched rates, runs in turn and what a comparison makes of them (145), pairs on an emulated card
    (35), Muon (23), selective checkpointing (27), copies beside the computation (32) and torch.compile (57), less 130
    that went; then several ranks: their runs (500), predictions of one of them and whether another card helps
    (178), their scripts (61), and sweeps on Ray (237); then DeepSpeed as their engine (244), the bar of a rank in the
    playground (37), and what the headline asks of other programs (8), and ZeRO on a disk (48); then what a message on
    its way keeps (23), the compiler loaded late and cards compared beside a prediction (16), scripts of conversations
    and of the hub's data sets (30), what libraries keep on the host, run and predicted (51), and what a step leaves to
    the next, to the byte (20); then conversations in techniques that make rows of them (26) and in scans (13), and what
    is not loaded before it is needed (16), a training that is stopped once and that no panel ends (11), and widgets
    that share their looks (38), and scripts of fewer lines (15), and replays that cards share (6), and imports that are
    quick in every process (19), and options told by the nearest (11). The way back is to hand more to libraries, not to
    write lines closer together; whoever adds says here what."""
    assert sum(map(code_lines, files(""))) <= 13_511


def test_the_rooms_are_those_of_the_plan():
    found = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert found == ROOMS
    assert {path.stem for path in PACKAGE.glob("*.py")} == {
        "__init__", "__main__", "errors", "hub", "imports", "settings", "recipe", "paths",
    }  # fmt: skip


def test_a_public_name_occurs_once():
    homes = defaultdict(list)
    for path in files(""):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", files(""), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_hides_in_a_string(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert "__import__" not in node.value
