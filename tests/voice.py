"""How the code reads: `python tests/voice.py` names what cannot be read aloud, and then ends with 1.

ruff has none of these rules.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "workbench"

RIDDLES = {"found", "told", "made", "given", "each", "one", "words", "known", "own", "its", "asked", "said"}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SEVERAL = (ast.Tuple, ast.List)


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Of a file's text, the number of each line that breaks a rule, and the rule with its cure."""
    tree = ast.parse(source)
    fields = public_fields(tree)
    for node in ast.walk(tree):
        inside = {type(inner) for inner in ast.walk(node) if inner is not node}
        if isinstance(node, ast.Assign) and assigns_several_values(node):
            yield node.lineno, "several values are assigned at once: give each its line"
        if isinstance(node, ast.IfExp) and ast.IfExp in inside:
            yield node.lineno, "a conditional expression is inside another: write an if"
        if isinstance(node, COMPREHENSIONS) and ast.NamedExpr in inside:
            yield node.lineno, "a walrus is inside a comprehension: write a loop"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "next" and len(node.args) == 1:
            yield node.lineno, "next has no default: say what holds if there is none"
        if bound_name(node) in RIDDLES and node not in fields:
            yield node.lineno, f"the name {bound_name(node)!r} is a riddle: name the thing"


def assigns_several_values(node: ast.Assign) -> bool:
    """`a, b = x, y`, and not a swap, `a, b = b, a`."""
    for target in node.targets:
        if isinstance(target, SEVERAL) and isinstance(node.value, SEVERAL):
            names = sorted(ast.unparse(name) for name in target.elts)
            if names != sorted(ast.unparse(value) for value in node.value.elts):
                return True
    return False


def bound_name(node: ast.AST) -> str | None:
    """The variable or the parameter that a node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def public_fields(tree: ast.Module) -> set[ast.AST]:
    """The names that public classes give their fields: others use them, so they stay."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return {line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign)}


def main() -> int:
    count = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for line, rule in sorted(faults(path.read_text(encoding="utf-8"))):
            count += 1
            print(f"workbench/{name}:{line}: {rule}")
    print(f"how the code reads: {count} faults")
    return bool(count)


if __name__ == "__main__":
    sys.exit(main())
