"""The source of functions and classes, with everything of their own files that they need, and the imports for it."""

import ast
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

OWN = "workbench"


class Sources:
    """Definitions for a script that imports nothing of the workbench.

    Attributes:
        definitions: their source by name; each comes after those that it needs.
        imports: (module, name) of what they import from elsewhere; the name is "" for `import module`.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, str] = {}
        self.imports: set[tuple[str, str]] = set()

    def add(self, thing: Any) -> str:
        """Include a function or class; return the name by which the script calls it."""
        name = str(thing.__name__)
        top, _, _ = thing.__module__.partition(".")
        if top == OWN:
            self._define(name, sys.modules[thing.__module__])
        else:
            self.imports.add((top, name))
        return name

    def _define(self, name: str, module: ModuleType) -> None:
        """Include what a name of a module of ours stands for, after all that it needs."""
        if name in self.definitions:
            return
        self.definitions[name] = ""  # A mark for names that lead back to this one.
        statements = _top_level(module)
        for used in _names(statements[name]):
            if used != name and used in statements:
                self._need(used, statements[used], module)
        del self.definitions[name]  # Inserted anew, it comes after all that it needs.
        self.definitions[name] = _source(statements[name], getattr(module, name), module)

    def _need(self, name: str, statement: ast.stmt, module: ModuleType) -> None:
        """Include a name by the statement that makes it: an import, or a definition of the module's own."""
        if isinstance(statement, ast.Import):
            self.imports.add((name, ""))
        elif not isinstance(statement, ast.ImportFrom):
            self._define(name, module)
        elif str(statement.module).partition(".")[0] == OWN:
            self._define(name, sys.modules[str(statement.module)])
        else:
            self.imports.add((str(statement.module), name))


def _source(statement: ast.stmt, thing: Any, module: ModuleType) -> str:
    """Return the source of a function or class without its decorators' wrappers, or of another statement as it is."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return inspect.getsource(inspect.unwrap(thing)).rstrip()
    return str(ast.get_source_segment(inspect.getsource(module), statement))


def _top_level(module: ModuleType) -> dict[str, ast.stmt]:
    """Return, by name, the statements that make a module's names, those under `if TYPE_CHECKING` included."""
    statements: dict[str, ast.stmt] = {}
    for outer in ast.parse(inspect.getsource(module)).body:
        for statement in outer.body if isinstance(outer, ast.If) else [outer]:
            statements |= dict.fromkeys(_names_made_by(statement), statement)
    return statements


def _names_made_by(statement: ast.stmt) -> list[str]:
    """List the names that a statement makes: imported, defined or assigned."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a definition uses, in their order, those in quoted annotations included."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        for annotation in (getattr(part, "annotation", None), getattr(part, "returns", None)):
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                yield from _names(ast.parse(annotation.value))
