"""A run in a process of its own: what the child does, and how its caller learns of its end.

The child passes the gate first and answers with the record as it begins. So the caller knows under which id the run is
found on disk, and can end that record if the child is lost.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.base.launch import Child, LostChildError
from workbench.journal import store
from workbench.journal.record import Record, Status
from workbench.recipe import Recipe
from workbench.training.execute import execute
from workbench.training.job import Job
from workbench.training.place import Place
from workbench.training.run import prepare_alone

# ---- in the child ----

_prepared: list[Job] = []


def prepare_here(recipe: Recipe, working_folder: str, folder: Path | None, options: dict[str, Any]) -> Record:
    """Pass the gate, where relative paths mean what they mean to the caller; the record as it begins."""
    os.chdir(working_folder)
    job = prepare_alone(recipe, None, folder, **options)
    _prepared[:] = [job]
    return job.record


def execute_here() -> Record:
    """Execute what was prepared. How the run ends is never raised."""
    return execute(Place(_prepared.pop()))


# ---- in its caller ----


def finished(child: Child, begun: Record, folder: Path | None) -> Record:
    """The record of the run that a child executes, once it has ended. Of one that is lost it is what it wrote last,
    ended here."""
    try:
        record: Record = child.answer()
    except LostChildError as lost:
        record = begun
        if begun.path(folder).exists():
            record = Record.read(begun.path(folder))
        if record.status is Status.RUNNING:
            record = store.end(replace(record, status=Status.KILLED, error=str(lost)), folder)
    return record
