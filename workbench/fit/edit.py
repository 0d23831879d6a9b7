"""What to change in a script, in its own words, and the script with it: calls are found where they were made."""

import ast
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.fit.places import arguments_of, as_calls, as_keywords, places_of, variables
from workbench.fit.program import Program
from workbench.techniques import Technique
from workbench.techniques.base import Arguments

NOWHERE = {"file": "", "parsed": False, "indirect": False}  # a call of a script that is not known
Insertion = tuple[int, int, str]  # from, to, text; in bytes
Writer = Callable[..., list[Insertion]]


class CannotBeWrittenError(Exception):
    """Why a change has no place in the script's text."""


@dataclass(frozen=True)
class Edit:
    """One change of a script.

    Attributes:
        advice: what to do there.
        call: of the script, as `inside.py` reports it; empty: nothing stands there that is to be changed.
        write: makes the insertions of the text and of this call in it.
        techniques: whose names the script needs.
        flags: arguments of the command line instead.
    """

    advice: str
    call: Mapping[str, Any] = field(default_factory=dict)
    write: Writer | None = None
    techniques: tuple[Technique, ...] = ()
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.call.get("file"):
            return self.advice
        return f"{os.path.relpath(self.call['file'])}:{self.call['line']}  {self.advice}"


def edits_of(techniques: Sequence[Technique], seen: Mapping[str, Any]) -> list[Edit]:
    """What a person writes so that a training of which this was seen has the techniques. Effective batches stay what
    they were."""
    places = places_of(techniques, arguments_of(seen))
    edits = _edits_of_arguments(places.arguments, seen) if places.arguments else []
    if seen["kind"] == "loop" and places.on_trainer:
        name = seen.get("model_name")
        statement = f"apply({name or 'model'}, {as_calls(places.on_trainer)})"
        write = partial(_with_statement, statement=statement if name else "")
        # a line before it can be written whoever makes it
        call = {**seen["optimizer_call"], "indirect": False}
        edits.append(Edit(f"before the optimizer: {statement}", call, write, places.on_trainer))
    elif seen["kind"] == "trainer":
        trainer = seen.get("trainer_class", "Trainer")
        call = seen.get("trainer_call", NOWHERE)
        if places.on_model:
            advice = f"{trainer}(model=apply(model, {as_calls(places.on_model)}), …)"
            write = partial(_with_changed_model, techniques=places.on_model)
            edits.append(Edit(advice, call, write, places.on_model))
        if places.on_trainer:
            advice = f"apply({trainer}(…), {as_calls(places.on_trainer)})"
            write = partial(_changed, techniques=places.on_trainer)
            edits.append(Edit(advice, call, write, places.on_trainer))
    if places.environment:
        edits.append(Edit(f"in front of the command: {variables(places.environment)}"))
    return edits


def _edits_of_arguments(changed: Arguments, seen: Mapping[str, Any]) -> list[Edit]:
    call = seen.get("arguments_call", NOWHERE)
    if call["parsed"]:
        flags: list[str] = []
        for name, value in changed.items():
            flags += [f"--{name}", str(value)]
        return [Edit(f"add to the command: {shlex.join(flags)}", flags=tuple(flags))]
    advice = f"{seen.get('arguments_class', 'TrainingArguments')}(…, {as_keywords(changed)})"
    write = partial(_with_keywords, keywords=changed, before=seen["arguments"])
    return [Edit(f"args={advice}" if call["indirect"] else advice, call, write)]


def imports_of_edits(edits: Sequence[Edit]) -> list[str]:
    """The lines that a script needs at its top for them."""
    names: set[str] = set()
    for edit in edits:
        names |= class_names(edit.techniques)
    if not names:
        return []
    return ["from workbench import apply", f"from workbench.techniques import {', '.join(sorted(names))}"]


def class_names(techniques: Sequence[Technique]) -> set[str]:
    return {type(entry).__name__ for entry in techniques}


# ---- the script, changed ----


class Text:
    """A script and where its parts stand, in bytes, as the syntax tree counts."""

    def __init__(self, text: str) -> None:
        self.content = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in self.content.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, part: ast.expr) -> tuple[int, int]:
        end_line = part.end_lineno or part.lineno
        return self.starts[part.lineno - 1] + part.col_offset, self.starts[end_line - 1] + (part.end_col_offset or 0)

    def call_at(self, place: Mapping[str, Any]) -> ast.Call:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and self._is_at(node, place):
                return node
        raise CannotBeWrittenError("the call was not found there")

    def _is_at(self, node: ast.Call, place: Mapping[str, Any]) -> bool:
        if "positions" not in place:  # Python before 3.11
            name = ast.unparse(node.func).rpartition(".")[2]
            return bool(node.lineno == place["line"] and name == place["name"])
        return bool([node.lineno, node.end_lineno, node.col_offset, node.end_col_offset] == place["positions"])

    def statement_around(self, node: ast.Call) -> int:
        """The line on which the innermost statement around a call begins."""
        line = 0
        for part in ast.walk(self.tree):
            if isinstance(part, ast.stmt) and part.lineno <= node.lineno <= (part.end_lineno or 0):
                line = max(line, part.lineno)
        return line

    def place_for_imports(self) -> int:
        """Before the first statement that is no docstring and nothing of `__future__`."""
        for statement in self.tree.body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
                return self.starts[statement.lineno - 1]
        return 0

    def check_names(self, names: set[str]) -> None:
        """Raises CannotBeWrittenError: the script has something else of a name that is imported."""
        bound = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        for name in names & bound:
            raise CannotBeWrittenError(f"the script has something else called {name}")


def changed_script(program: Program, edits: Sequence[Edit]) -> str:
    """The text of the script with the edits.

    Raises:
        ConfigurationError: a change has no place in it that can be written; the message names the line.
    """
    if program.file is None:
        raise ConfigurationError(f"plan: --apply writes scripts, and {shlex.join(program.script)} is a module.")
    text = Text(program.file.read_text(encoding="utf-8"))
    insertions: list[Insertion] = []
    for edit in edits:
        try:
            if edit.write is not None:
                if Path(edit.call["file"]) != program.file.resolve():
                    raise CannotBeWrittenError("the call stands in another file")
                if edit.call["indirect"]:
                    raise CannotBeWrittenError("a library makes it, on this line")
                insertions += edit.write(text, text.call_at(edit.call))
            if edit.techniques:
                text.check_names({"apply", *class_names(edit.techniques)})
        except CannotBeWrittenError as error:
            raise ConfigurationError(f"plan: nothing was written, since {error}. Change it by hand: {edit}") from None
    imports = imports_of_edits(edits)
    if imports:
        place = text.place_for_imports()
        insertions.append((place, place, "\n".join([*imports, ""])))
    content = text.content
    for start, end, new in sorted(insertions, key=lambda insertion: insertion[:2], reverse=True):
        content = content[:start] + new.encode() + content[end:]
    ast.parse(content)
    return content.decode()


def _changed(text: Text, part: ast.expr, techniques: Sequence[Technique]) -> list[Insertion]:
    """`apply(…, …)` around a part of the script."""
    start, end = text.span(part)
    return [(start, start, "apply("), (end, end, f", {as_calls(techniques)})")]


def _with_changed_model(text: Text, call: ast.Call, techniques: Sequence[Technique]) -> list[Insertion]:
    for keyword in call.keywords:
        if keyword.arg == "model":
            return _changed(text, keyword.value, techniques)
    if call.args and not isinstance(call.args[0], ast.Starred):
        return _changed(text, call.args[0], techniques)
    raise CannotBeWrittenError("the call does not name the model")


def _with_statement(text: Text, call: ast.Call, statement: str) -> list[Insertion]:
    if not statement:
        raise CannotBeWrittenError("the model has no name there")
    place = text.starts[text.statement_around(call) - 1]
    line = text.content[place:]
    indent = line[: len(line) - len(line.lstrip())].decode()
    return [(place, place, f"{indent}{statement}\n")]


def _with_keywords(
    text: Text, call: ast.Call, keywords: Mapping[str, Any], before: Mapping[str, Any]
) -> list[Insertion]:
    there = {keyword.arg: keyword.value for keyword in call.keywords}
    insertions = []
    missing = {}
    for name, value in keywords.items():
        if name not in there:
            missing[name] = value
            continue
        start, end = text.span(there[name])
        new = repr(value)
        if not isinstance(there[name], ast.Constant):
            new = _changed_number(text.content[start:end].decode(), before[name], value)
        if not new:
            raise CannotBeWrittenError(f"{name} is no literal there")
        insertions.append((start, end, new))
    if missing:
        parts = [*call.args, *there.values()]
        if None in there or not parts:
            raise CannotBeWrittenError("its arguments come from a dictionary" if parts else "the call has no arguments")
        end = max(text.span(part)[1] for part in parts)
        insertions.append((end, end, f", {as_keywords(missing)}"))
    return insertions


def _changed_number(source: str, before: Any, after: Any) -> str:
    """`(batch_size) // 2`: what stands there may be another number in the next run; empty if it is none."""
    if type(before) is not int or type(after) is not int or not before or not after:
        return ""
    if before % after == 0:
        return f"({source}) // {before // after}"
    return f"({source}) * {after // before}" if after % before == 0 else ""
