"""What to change in a script, in its own words, and the script with it: calls are found where they were made."""

import ast
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.fit.places import as_keywords
from workbench.fit.program import Program, Trial
from workbench.recipe import changed_settings
from workbench.techniques import Technique

APPLY = "apply"


@dataclass(frozen=True)
class Edit:
    """One change of a script.

    Attributes:
        call: of the script, as `inside.py` reports it.
        advice: what to do there.
        keywords: arguments that the call gets.
        around: techniques that are put around what it makes.
        on_model: techniques that are put around its argument `model`.
        before: a statement in front of it.
        flags: arguments of the command line instead.
        environment: variables of the command.
    """

    advice: str
    call: Mapping[str, Any] | None = None
    keywords: Mapping[str, Any] | None = None
    around: tuple[Technique, ...] = ()
    on_model: tuple[Technique, ...] = ()
    before: str = ""
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    def __str__(self) -> str:
        if self.call is None or not self.call["file"]:
            return self.advice
        return f"{os.path.relpath(self.call['file'])}:{self.call['line']}  {self.advice}"


def edits_of(trial: Trial) -> list[Edit]:
    """What a person writes so that the program is as it was in a trial. Effective batches stay what they were."""
    seen = trial.seen
    edits = []
    changed = seen.get("changed") or {}
    if changed and seen["arguments_call"]["parsed"]:
        flags: list[str] = []
        for name, value in changed.items():
            flags += [f"--{name}", str(value)]
        edits.append(Edit(f"add to the command: {shlex.join(flags)}", flags=tuple(flags)))
    elif changed:
        advice = f"{seen['arguments_class']}(…, {as_keywords(changed)})"
        edits.append(Edit(advice, call=seen["arguments_call"], keywords=changed))
    put = [entry for entry in trial.techniques if entry.name in seen.get("put", ())]
    on_model = tuple(entry for entry in put if entry.name in seen.get("on_model", ()))
    around = tuple(entry for entry in put if entry not in on_model)
    if seen["kind"] == "trainer":
        trainer = seen["trainer_class"]
        if on_model:
            advice = f"{trainer}(model=apply(model, {_makers(on_model)}), …)"
            edits.append(Edit(advice, call=seen["trainer_call"], on_model=on_model))
        if around:
            advice = f"apply({trainer}(…), {_makers(around)})"
            edits.append(Edit(advice, call=seen["trainer_call"], around=around))
    elif put:
        name = seen.get("model_name") or "model"
        advice = f"before the optimizer: apply({name}, {_makers(around)})"
        statement = f"apply({name}, {_makers(around)})" if seen.get("model_name") else ""
        edits.append(Edit(advice, call=seen["optimizer_call"], around=around, before=statement))
    if trial.environment:
        variables = " ".join(f"{name}={value}" for name, value in trial.environment.items())
        edits.append(Edit(f"in front of the command: {variables}", environment=trial.environment))
    return edits


def _makers(techniques: Sequence[Technique]) -> str:
    """`Lora(rank=4), FusedGelu()`, as Python has it."""
    sources = []
    for entry in techniques:
        sources.append(f"{type(entry).__name__}({as_keywords(changed_settings(entry))})")
    return ", ".join(sources)


def imports_of_edits(edits: Sequence[Edit]) -> list[str]:
    """The lines that a script needs at its top for them."""
    names = sorted({type(entry).__name__ for edit in edits for entry in (*edit.around, *edit.on_model)})
    if not names:
        return []
    return [f"from workbench import {APPLY}", f"from workbench.techniques import {', '.join(names)}"]


# ---- the script, changed ----


def changed_script(program: Program, edits: Sequence[Edit]) -> str:
    """The text of the script with the edits.

    Raises:
        ConfigurationError: a change has no place in it that can be written; the message names the line.
    """
    if program.file is None:
        raise ConfigurationError(f"plan: --apply writes scripts, and {shlex.join(program.script)} is a module.")
    text = program.file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    insertions: list[tuple[int, int, str]] = []  # from, to, text; in bytes
    starts = _starts_of_lines(text)
    for edit in edits:
        if edit.call is not None:
            node = _node_of(edit, program.file, tree)
            insertions += _changes(edit, node, text, starts, tree)
    imports = imports_of_edits(edits)
    if imports:
        _check_names(tree, imports)
        place = starts[_line_for_imports(tree)]
        insertions.append((place, place, "\n".join([*imports, ""])))
    source = text.encode()
    for start, end, new in sorted(insertions, key=lambda change: change[:2], reverse=True):
        source = source[:start] + new.encode() + source[end:]
    changed = source.decode()
    ast.parse(changed)
    return changed


def _starts_of_lines(text: str) -> list[int]:
    """The offset of each line in bytes, as the syntax tree counts."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _node_of(edit: Edit, file: Path, tree: ast.Module) -> ast.Call:
    call = edit.call or {}
    if not call["file"] or Path(call["file"]) != file.resolve():
        raise _by_hand(edit, "the call stands in another file")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _place(node) == [call[name] for name in _PLACE]:
            return node
    raise _by_hand(edit, "the call was not found there")


_PLACE = ("line", "column", "end_line", "end_column")


def _place(node: ast.expr) -> list[int | None]:
    return [node.lineno, node.col_offset, node.end_lineno, node.end_col_offset]


def _by_hand(edit: Edit, reason: str) -> ConfigurationError:
    return ConfigurationError(f"plan: nothing was written, since {reason}. Change it by hand: {edit}")


def _changes(edit: Edit, node: ast.Call, text: str, starts: list[int], tree: ast.Module) -> list[tuple[int, int, str]]:
    """What is written where: from, to, text; in bytes."""

    def span(part: ast.expr) -> tuple[int, int]:
        end_line = part.end_lineno or part.lineno
        return starts[part.lineno - 1] + part.col_offset, starts[end_line - 1] + (part.end_col_offset or 0)

    start, end = span(node)
    if edit.before:
        line = _statement_of(node, tree)
        first = text.encode()[starts[line - 1] :]
        indent = first[: len(first) - len(first.lstrip())].decode()
        return [(starts[line - 1], starts[line - 1], f"{indent}{edit.before}\n")]
    if edit.keywords:
        return _keyword_changes(edit, node, span)
    if edit.on_model:
        model = _model_of(edit, node)
        model_start, model_end = span(model)
        return [(model_start, model_start, "apply("), (model_end, model_end, f", {_makers(edit.on_model)})")]
    if edit.around and edit.call is not None:
        return [(start, start, "apply("), (end, end, f", {_makers(edit.around)})")]
    raise _by_hand(edit, "the model has no name there")


def _keyword_changes(edit: Edit, node: ast.Call, span: Any) -> list[tuple[int, int, str]]:
    there = {keyword.arg: keyword.value for keyword in node.keywords}
    changes = []
    missing = []
    for name, value in (edit.keywords or {}).items():
        if name in there:
            if not isinstance(there[name], ast.Constant):
                raise _by_hand(edit, f"{name} is no literal there")
            start, end = span(there[name])
            changes.append((start, end, repr(value)))
        else:
            missing.append(f"{name}={value!r}")
    if missing and None in there:
        raise _by_hand(edit, "its arguments come from a dictionary")
    parts = [*node.args, *there.values()]
    if missing and not parts:
        raise _by_hand(edit, "the call has no arguments")
    if missing:
        last = max(span(part)[1] for part in parts)
        changes.append((last, last, f", {', '.join(missing)}"))
    return changes


def _model_of(edit: Edit, node: ast.Call) -> ast.expr:
    for keyword in node.keywords:
        if keyword.arg == "model":
            return keyword.value
    if node.args and not isinstance(node.args[0], ast.Starred):
        return node.args[0]
    raise _by_hand(edit, "the call does not name the model")


def _statement_of(node: ast.Call, tree: ast.Module) -> int:
    """The line on which the innermost statement around a call begins."""
    lines = []
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and statement.lineno <= node.lineno <= (statement.end_lineno or 0):
            lines.append(statement.lineno)
    return max(lines)


def _line_for_imports(tree: ast.Module) -> int:
    """How many lines stand above the first statement that is no docstring and nothing of `__future__`."""
    for statement in tree.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            return statement.lineno - 1
    return 0


def _check_names(tree: ast.Module, imports: list[str]) -> None:
    ours = {name.strip() for line in imports for name in line.partition(" import ")[2].split(",")}
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for name in sorted(ours & bound):
        raise ConfigurationError(
            f"plan: nothing was written, since the script has something else called {name}. Change it by hand, with "
            "another name for ours."
        )
