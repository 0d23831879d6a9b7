"""A run in a process of its own: what the child process does, and how its caller learns of its end.

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
from workbench.training.ongoing import OngoingRun
from workbench.training.run import prepare_alone

# ---- in the child ----

_prepared: list[Job] = []


def prepare_in_child(recipe: Recipe, working_folder: str, folder: Path | None, options: dict[str, Any]) -> Record:
    """Pass the gate, keep the job for `execute_in_child`, and return the record as it begins."""
    os.chdir(working_folder)  # relative paths in the recipe mean what they mean to the caller
    job = prepare_alone(recipe, None, folder, **options)
    _prepared[:] = [job]
    return job.record


def execute_in_child() -> Record:
    """Execute the job that was prepared, and return its record. How the run ends is never raised."""
    return execute(OngoingRun(_prepared.pop()))


# ---- in its caller ----


def await_record(child: Child, begun: Record, folder: Path | None) -> Record:
    """Wait for the run that a child process executes to end, and return its record.

    If the child is lost, that is the record which it wrote last, ended here as `killed`.

    Args:
        begun: the record as the run began, which `prepare_in_child` returned.
    """
    try:
        record: Record = child.answer()
    except LostChildError as lost:
        record = begun
        if begun.path(folder).exists():
            record = Record.read(begun.path(folder))
        if record.status is Status.RUNNING:
            record = store.end(replace(record, status=Status.KILLED, error=str(lost)), folder)
    return record
