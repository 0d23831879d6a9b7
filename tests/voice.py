"""How the code reads: `python tests/voice.py` names what cannot be read aloud, and then ends with 1.

ruff has none of these rules.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READ = ("workbench/**/*.py", "tools/**/*.py")

RIDDLES = {"found", "told", "made", "given", "each", "one", "words", "known", "own", "its", "asked", "said"}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
SEVERAL = (ast.Tuple, ast.List)

# A docstring that opens with one of these leaves out its subject or its verb.
OPENINGS = re.compile(
    r"(Also|And|As|Because|But|By|For|From|How|If|In|It|Its|None|Not|Nothing|Of|On|Once|Only|So|That|The same|Their"
    r"|They|Those|To|Until|What|Whatever|When|Where|Which|While|Who|Whoever|Whose|With)\b"
)
# A comment that opens with one of these goes on with the name or the line before it, which the reader has to look for.
LEANING = re.compile(
    r"#\s*(and|as|but|by|else|from|its|of|or|so|than|that|their|those|until|what|where|which|who|whose|with)\b",
    re.IGNORECASE,
)
NO_PARTICIPLES = {"exceed", "feed", "need", "seed", "speed"}
# Names that notebooks, records or people's own code use: they stay.
PUBLIC = {
    "checkpointed_blocks",
    "given",
    "measured_on_h100",
    "offloaded_step",
    "padded_rows",
    "planned_sets",
    "refused_pairs",
    "words",
}


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield the number of each line that breaks a rule, and the rule with its cure."""
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


def faults_of_words(source: str) -> Iterator[tuple[int, str]]:
    """Yield the same for words: docstrings, comments, and the names of functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            opening = OPENINGS.match(ast.get_docstring(node) or "")
            if opening:
                line = getattr(node, "lineno", 1)
                yield line, f"a docstring opens with {opening[1]!r}: give its sentence a subject and a verb"
        if isinstance(node, FUNCTIONS) and is_participle(node):
            yield node.lineno, f"the function {node.name!r} is a participle: name it by a verb"
        name = attribute_name(node)
        if name.strip("_") in RIDDLES - PUBLIC:
            yield node.lineno, f"the name {name!r} is a riddle: name the thing"
    for line, comment in comments(source):
        opening = LEANING.match(comment)
        if opening:
            yield line, f"a comment opens with {opening[1]!r}: let it stand without the line before it"


def assigns_several_values(node: ast.Assign) -> bool:
    """Whether it is `a, b = x, y`, and not a swap, `a, b = b, a`."""
    for target in node.targets:
        if isinstance(target, SEVERAL) and isinstance(node.value, SEVERAL):
            names = sorted(ast.unparse(name) for name in target.elts)
            if names != sorted(ast.unparse(value) for value in node.value.elts):
                return True
    return False


def bound_name(node: ast.AST) -> str | None:
    """Return the name of the variable or the parameter that a node binds."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def attribute_name(node: ast.AST) -> str:
    """Return the name of the function that a node defines, or of the attribute that it sets; empty: neither."""
    if isinstance(node, FUNCTIONS):
        return node.name
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return ""


def is_participle(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is called like `joined` or `joined_rows`; a property may be."""
    if node.name in PUBLIC or any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return False
    first = node.name.strip("_").split("_")[0]
    return first.endswith("ed") and first not in NO_PARTICIPLES


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment; of a comment of several lines, the first."""
    lines = source.splitlines()
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        is_alone = lines[line - 1].lstrip().startswith("#")
        goes_on = is_alone and last_line == line - 1
        last_line = line if is_alone else -1
        if not goes_on:
            yield line, token.string


def public_fields(tree: ast.Module) -> set[ast.AST]:
    """Return the names that public classes give their fields: others use them, so they stay."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return {line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign)}


def main() -> int:
    count = 0
    for pattern in READ:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            source = path.read_text(encoding="utf-8")
            for line, rule in sorted([*faults(source), *faults_of_words(source)]):
                count += 1
                print(f"{name}:{line}: {rule}")
    print(f"how the code reads: {count} faults")
    return bool(count)


if __name__ == "__main__":
    sys.exit(main())
