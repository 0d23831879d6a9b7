"""The source of functions and classes, with everything of their own files that they need, and the imports for it."""

import ast
import inspect
import sys
from collections.abc import Iterator
from itertools import chain
from types import ModuleType
from typing import Any

OWN = "workbench"


class Sources:
    """Definitions for a script that imports nothing of the workbench.

    Attributes:
        definitions: source of each, in an order in which every one comes after what it needs.
        imports: (module, name) of what they import from elsewhere; the name is empty for `import module`.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, str] = {}
        self.imports: set[tuple[str, str]] = set()

    def add(self, thing: Any) -> str:
        """Include a function or class; the name by which the script calls it."""
        module = sys.modules[thing.__module__]
        if module.__name__.split(".")[0] == OWN:
            self._add_name(thing.__name__, module)
        else:
            self.imports.add((module.__name__.split(".")[0], thing.__name__))
        return str(thing.__name__)

    def _add_name(self, name: str, module: ModuleType) -> None:
        if name in self.definitions:
            return
        self.definitions[name] = ""  # being made: a function may name itself
        node = _top_level(module)[name]
        for used in _names(node):
            if used != name and used in _top_level(module):
                self._add_used(used, module)
        del self.definitions[name]
        self.definitions[name] = _source(node, getattr(module, name), module)

    def _add_used(self, name: str, module: ModuleType) -> None:
        node = _top_level(module)[name]
        if not isinstance(node, ast.Import | ast.ImportFrom):
            self._add_name(name, module)
        elif isinstance(node, ast.Import):
            self.imports.add((name, ""))
        elif str(node.module).split(".")[0] == OWN:
            self._add_name(name, sys.modules[str(node.module)])
        else:
            self.imports.add((str(node.module), name))


def _source(node: ast.AST, thing: Any, module: ModuleType) -> str:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return inspect.getsource(inspect.unwrap(thing)).rstrip()
    return str(ast.get_source_segment(inspect.getsource(module), node))


def _top_level(module: ModuleType) -> dict[str, ast.stmt]:
    """The statement that makes each name of a module, those for type checkers included."""
    body = ast.parse(inspect.getsource(module)).body
    nodes = chain.from_iterable(node.body if isinstance(node, ast.If) else [node] for node in body)
    return {name: node for node in nodes for name in _made(node)}


def _made(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _names(node: ast.AST) -> Iterator[str]:
    """Names that a definition uses, in their order, those in quoted annotations included."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        for annotation in (getattr(part, "annotation", None), getattr(part, "returns", None)):
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                yield from _names(ast.parse(annotation.value))
