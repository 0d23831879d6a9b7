"""What to change in a script, in its own words, and the script with it: calls are found where they were made."""

import ast
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.fit.places import as_keywords
from workbench.fit.program import Program, Trial
from workbench.recipe import changed_settings
from workbench.techniques import Technique

PLACE = ("line", "column", "end_line", "end_column")
Insertion = tuple[int, int, str]  # from, to, text; in bytes
Writer = Callable[..., list[Insertion]]


class CannotBeWrittenError(Exception):
    """Why a change has no place in the script's text."""


@dataclass(frozen=True)
class Edit:
    """One change of a script.

    Attributes:
        advice: what to do there.
        call: of the script, as `inside.py` reports it; None: nothing stands there that is to be changed.
        write: makes the insertions of the text and of this call in it.
        techniques: whose names the script needs.
        flags: arguments of the command line instead.
    """

    advice: str
    call: Mapping[str, Any] | None = None
    write: Writer | None = None
    techniques: tuple[Technique, ...] = ()
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.call is None or not self.call["file"]:
            return self.advice
        return f"{os.path.relpath(self.call['file'])}:{self.call['line']}  {self.advice}"


def edits_of(trial: Trial) -> list[Edit]:
    """What a person writes so that the program is as it was in a trial. Effective batches stay what they were."""
    seen = trial.seen
    edits = _edits_of_arguments(seen)
    put = [entry for entry in trial.techniques if entry.name in seen.get("put", ())]
    on_model = tuple(entry for entry in put if entry.name in seen.get("on_model", ()))
    around = tuple(entry for entry in put if entry not in on_model)
    if seen["kind"] == "loop" and put:
        name = seen.get("model_name")
        statement = f"apply({name or 'model'}, {_makers(around)})"
        write: Writer = partial(_with_statement, statement=statement if name else "")
        edits.append(Edit(f"before the optimizer: {statement}", seen["optimizer_call"], write, around))
    elif on_model:
        advice = f"{seen['trainer_class']}(model=apply(model, {_makers(on_model)}), …)"
        write = _in_a_library if seen["trainer_call"]["indirect"] else partial(_with_changed_model, techniques=on_model)
        edits.append(Edit(advice, seen["trainer_call"], write, on_model))
    if seen["kind"] == "trainer" and around:
        advice = f"apply({seen['trainer_class']}(…), {_makers(around)})"
        write = _in_a_library if seen["trainer_call"]["indirect"] else partial(_changed, techniques=around)
        edits.append(Edit(advice, seen["trainer_call"], write, around))
    if trial.variables:
        edits.append(Edit(f"in front of the command: {' '.join(trial.variables)}"))
    return edits


def _edits_of_arguments(seen: Mapping[str, Any]) -> list[Edit]:
    changed = seen.get("changed")
    if not changed:
        return []
    if not seen["arguments_call"]["parsed"]:
        advice = f"{seen['arguments_class']}(…, {as_keywords(changed)})"
        if seen["arguments_call"]["indirect"]:
            return [Edit(f"args={advice}", seen["arguments_call"], _in_a_library)]
        write = partial(_with_keywords, keywords=changed, before=seen["arguments"])
        return [Edit(advice, seen["arguments_call"], write)]
    flags: list[str] = []
    for name, value in changed.items():
        flags += [f"--{name}", str(value)]
    return [Edit(f"add to the command: {shlex.join(flags)}", flags=tuple(flags))]


def _makers(techniques: Sequence[Technique]) -> str:
    """`Lora(rank=4), FusedGelu()`, as Python has it."""
    return ", ".join(f"{type(entry).__name__}({as_keywords(changed_settings(entry))})" for entry in techniques)


def imports_of_edits(edits: Sequence[Edit]) -> list[str]:
    """The lines that a script needs at its top for them."""
    names = sorted({type(entry).__name__ for edit in edits for entry in edit.techniques})
    if not names:
        return []
    return ["from workbench import apply", f"from workbench.techniques import {', '.join(names)}"]


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
        if "column" not in place:  # Python before 3.11
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            return bool(node.lineno == place["line"] and name == place["name"])
        there = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        return there == tuple(place[name] for name in PLACE)

    def statement_around(self, node: ast.Call) -> int:
        """The line on which the innermost statement around a call begins."""
        lines = []
        for statement in ast.walk(self.tree):
            if isinstance(statement, ast.stmt) and statement.lineno <= node.lineno <= (statement.end_lineno or 0):
                lines.append(statement.lineno)
        return max(lines)

    def place_for_imports(self) -> int:
        """Before the first statement that is no docstring and nothing of `__future__`."""
        for statement in self.tree.body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
                return self.starts[statement.lineno - 1]
        return 0

    def check_names(self, imports: list[str]) -> None:
        """Raises CannotBeWrittenError: the script has something else of a name that is imported."""
        ours = {name.strip() for line in imports for name in line.partition(" import ")[2].split(",")}
        for node in ast.walk(self.tree):
            is_bound = isinstance(node, ast.FunctionDef | ast.ClassDef)
            is_bound = is_bound or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
            name = getattr(node, "name", None) or getattr(node, "id", None)
            if is_bound and name in ours:
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
    imports = imports_of_edits(edits)
    for edit in edits:
        try:
            if edit.call is not None and edit.write is not None:
                if not edit.call["file"] or Path(edit.call["file"]) != program.file.resolve():
                    raise CannotBeWrittenError("the call stands in another file")
                insertions += edit.write(text, text.call_at(edit.call))
            if edit.techniques:
                text.check_names(imports)
        except CannotBeWrittenError as error:
            raise ConfigurationError(f"plan: nothing was written, since {error}. Change it by hand: {edit}") from None
    if imports:
        place = text.place_for_imports()
        insertions.append((place, place, "\n".join([*imports, ""])))
    content = text.content
    for start, end, new in sorted(insertions, key=lambda insertion: insertion[:2], reverse=True):
        content = content[:start] + new.encode() + content[end:]
    ast.parse(content)
    return content.decode()


def _in_a_library(*_: Any) -> list[Insertion]:
    raise CannotBeWrittenError("a library makes it, on this line")


def _changed(text: Text, part: ast.expr, techniques: Sequence[Technique]) -> list[Insertion]:
    """`apply(…, …)` around a part of the script."""
    start, end = text.span(part)
    return [(start, start, "apply("), (end, end, f", {_makers(techniques)})")]


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
    missing = {name: value for name, value in keywords.items() if name not in there}
    for name in keywords.keys() - missing.keys():
        start, end = text.span(there[name])
        value = repr(keywords[name])
        if not isinstance(there[name], ast.Constant):
            value = _changed_number(text.content[start:end].decode(), before[name], keywords[name])
        if not value:
            raise CannotBeWrittenError(f"{name} is no literal there")
        insertions.append((start, end, value))
    parts = [*call.args, *there.values()]
    if missing and (None in there or not parts):
        raise CannotBeWrittenError("its arguments come from a dictionary" if parts else "the call has no arguments")
    if missing:
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
