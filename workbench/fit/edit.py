"""Edits of somebody's script, in the script's own words, and the text of the script with them.

A call that is to be changed is found by its place, which `inside.py` has noted as the call was made.
"""

import ast
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.fit.any_training import CallSite, Facts
from workbench.fit.places import Techniques, arguments_of, as_calls, as_keywords, places_of, variables
from workbench.fit.program import Program
from workbench.techniques import Technique
from workbench.techniques.base import Arguments

NOWHERE: CallSite = {"file": "", "parsed": False, "indirect": False}  # stands for a call whose script is not known
Insertion = tuple[int, int, str]  # the first byte that is replaced, the byte after the last, and the new text
Writer = Callable[..., list[Insertion]]  # takes the text and the call in it


class CannotBeWrittenError(Exception):
    """A change has no place in the script's text; the message says why."""


@dataclass(frozen=True)
class Edit:
    """One change of a script.

    Attributes:
        advice: what a person does at the call.
        call: the call that is changed, as `inside.py` reports it; empty if no call is changed.
        write: returns the insertions, given the script's text and the call in it; None if the text stays as it is.
        techniques: those whose names the script needs.
        flags: arguments that the command line gets instead.
    """

    advice: str
    call: CallSite = field(default_factory=CallSite)
    write: Writer | None = None
    techniques: Techniques = ()
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.call.get("file"):
            return self.advice
        return f"{os.path.relpath(self.call['file'])}:{self.call['line']}  {self.advice}"


def edits_of(techniques: Sequence[Technique], facts: Facts) -> list[Edit]:
    """List the edits that give the techniques to a training. Effective batches stay what they were."""
    places = places_of(techniques, arguments_of(facts))
    edits = _edits_of_arguments(places.arguments, facts) if places.arguments else []
    if facts["kind"] == "loop" and places.on_trainer:
        name = facts.get("model_name")
        statement = f"apply({name or 'model'}, {as_calls(places.on_trainer)})"
        write = partial(_insert_before, statement=statement if name else "")
        # A line before the call can be written even if a library makes the optimizer.
        call: CallSite = {**facts["optimizer_call"], "indirect": False}
        edits.append(Edit(f"before the optimizer: {statement}", call, write, places.on_trainer))
    elif facts["kind"] == "trainer":
        trainer = facts.get("trainer_class", "Trainer")
        call = facts.get("trainer_call", NOWHERE)
        if places.on_model:
            advice = f"{trainer}(model=apply(model, {as_calls(places.on_model)}), …)"
            write = partial(_wrap_model, techniques=places.on_model)
            edits.append(Edit(advice, call, write, places.on_model))
        if places.on_trainer:
            advice = f"apply({trainer}(…), {as_calls(places.on_trainer)})"
            write = partial(_wrap, techniques=places.on_trainer)
            edits.append(Edit(advice, call, write, places.on_trainer))
    if places.environment:
        edits.append(Edit(f"in front of the command: {variables(places.environment)}"))
    return edits


def _edits_of_arguments(changed: Arguments, facts: Facts) -> list[Edit]:
    """Return the edit of the TrainingArguments, or of the command line if a parser reads them from there."""
    call = facts.get("arguments_call", NOWHERE)
    if call["parsed"]:
        flags: list[str] = []
        for name, value in changed.items():
            flags += [f"--{name}", str(value)]
        return [Edit(f"add to the command: {shlex.join(flags)}", flags=tuple(flags))]
    advice = f"{facts.get('arguments_class', 'TrainingArguments')}(…, {as_keywords(changed)})"
    write = partial(_set_keywords, keywords=changed, before=facts["arguments"])
    return [Edit(f"args={advice}" if call["indirect"] else advice, call, write)]


def imports_of_edits(edits: Sequence[Edit]) -> list[str]:
    """List the import lines that a script needs for the edits."""
    names: set[str] = set()
    for edit in edits:
        names |= class_names(edit.techniques)
    if not names:
        return []
    return ["from workbench import apply", f"from workbench.techniques import {', '.join(sorted(names))}"]


def class_names(techniques: Sequence[Technique]) -> set[str]:
    """Return the names under which a script imports techniques."""
    return {type(entry).__name__ for entry in techniques}


# ---- the script, changed ----


class Text:
    """A script and its syntax tree. Places in it are counted in bytes, as the tree does."""

    def __init__(self, text: str) -> None:
        self.content = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in self.content.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, part: ast.expr) -> tuple[int, int]:
        """Return the first byte of a part, and the byte after its last."""
        end_line = part.end_lineno or part.lineno
        return self.starts[part.lineno - 1] + part.col_offset, self.starts[end_line - 1] + (part.end_col_offset or 0)

    def call_at(self, place: CallSite) -> ast.Call:
        """Find the call at a place. Raises CannotBeWrittenError: there is none."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and self._is_at(node, place):
                return node
        raise CannotBeWrittenError("the call was not found there")

    def _is_at(self, node: ast.Call, place: CallSite) -> bool:
        if "positions" not in place:  # Python before 3.11
            name = ast.unparse(node.func).rpartition(".")[2]
            return node.lineno == place["line"] and name == place["name"]
        return [node.lineno, node.end_lineno, node.col_offset, node.end_col_offset] == place["positions"]

    def statement_around(self, node: ast.Call) -> int:
        """Return the line on which the innermost statement around a call begins."""
        line = 0
        for part in ast.walk(self.tree):
            if isinstance(part, ast.stmt) and part.lineno <= node.lineno <= (part.end_lineno or 0):
                line = max(line, part.lineno)
        return line

    def place_for_imports(self) -> int:
        """Return the byte before the first statement that is no docstring and no import from `__future__`."""
        for statement in self.tree.body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
                return self.starts[statement.lineno - 1]
        return 0

    def check_names(self, names: set[str]) -> None:
        """Raise CannotBeWrittenError if the script uses one of these names, which are to be imported, otherwise."""
        bound = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        for name in names & bound:
            raise CannotBeWrittenError(f"the script has something else called {name}")


def rewrite_script(program: Program, edits: Sequence[Edit]) -> str:
    """Return the text of the program's script with the edits.

    Raises:
        ConfigurationError: the program is a module, or an edit cannot be written; the message names the line.
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
    # The last insertion comes first: so the places of the others stay right.
    for start, end, new in sorted(insertions, key=lambda insertion: insertion[:2], reverse=True):
        content = content[:start] + new.encode() + content[end:]
    ast.parse(content)  # a mistake of ours fails here, and is not written
    return content.decode()


def _wrap(text: Text, part: ast.expr, techniques: Sequence[Technique]) -> list[Insertion]:
    """Put `apply(…, …)` around a part of the script."""
    start, end = text.span(part)
    return [(start, start, "apply("), (end, end, f", {as_calls(techniques)})")]


def _wrap_model(text: Text, call: ast.Call, techniques: Sequence[Technique]) -> list[Insertion]:
    """Put `apply(…, …)` around the model that a call is given."""
    for keyword in call.keywords:
        if keyword.arg == "model":
            return _wrap(text, keyword.value, techniques)
    if call.args and not isinstance(call.args[0], ast.Starred):
        return _wrap(text, call.args[0], techniques)
    raise CannotBeWrittenError("the call does not name the model")


def _insert_before(text: Text, call: ast.Call, statement: str) -> list[Insertion]:
    """Put a statement on a line of its own before the one that makes the call.

    Raises CannotBeWrittenError: the statement is "", since the model has no name there.
    """
    if not statement:
        raise CannotBeWrittenError("the model has no name there")
    place = text.starts[text.statement_around(call) - 1]
    line = text.content[place:]
    indent = line[: len(line) - len(line.lstrip())].decode()
    return [(place, place, f"{indent}{statement}\n")]


def _set_keywords(text: Text, call: ast.Call, keywords: Arguments, before: Arguments) -> list[Insertion]:
    """Give keyword arguments of a call their new values, and append those that it has not.

    Args:
        before: the arguments' values in the run.
    """
    written = {keyword.arg: keyword.value for keyword in call.keywords}
    insertions = []
    missing = {}
    for name, value in keywords.items():
        if name not in written:
            missing[name] = value
            continue
        start, end = text.span(written[name])
        new = repr(value)
        if not isinstance(written[name], ast.Constant):
            new = _scale_number(text.content[start:end].decode(), before[name], value)
        if not new:
            raise CannotBeWrittenError(f"{name} is no literal there")
        insertions.append((start, end, new))
    if missing:
        parts = [*call.args, *written.values()]
        if None in written or not parts:
            raise CannotBeWrittenError("its arguments come from a dictionary" if parts else "the call has no arguments")
        end = max(text.span(part)[1] for part in parts)
        insertions.append((end, end, f", {as_keywords(missing)}"))
    return insertions


def _scale_number(source: str, before: Any, after: Any) -> str:
    """Return the source of a number multiplied or divided, as `(batch_size) // 2`, since the expression may have
    another value in the next run; "" if the numbers are none, or one is no multiple of the other."""
    if type(before) is not int or type(after) is not int or not before or not after:
        return ""
    if before % after == 0:
        return f"({source}) // {before // after}"
    return f"({source}) * {after // before}" if after % before == 0 else ""
