"""Programs of somebody else's, run in this process on the CPU as `inside.py` runs them on an emulated card."""

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import transformers.trainer
import transformers.training_args

from workbench.fit import inside
from workbench.fit.card import Use
from workbench.fit.program import Program, Trial, changes_of

OPTIMIZERS = import_module("torch.optim.optimizer")  # which is no attribute of its package
CHANGED = (
    (transformers.training_args.TrainingArguments, "__post_init__"),
    (transformers.trainer.Trainer, "__init__"),
    (transformers.trainer.Trainer, "train"),
    (OPTIMIZERS.Optimizer, "__init__"),
)


class EndedError(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Program, Trial]]:
    """Runs the text of a script with techniques; the program, and what a trial of it has seen."""

    def run_script(
        source: str,
        *techniques: object,
        arguments: tuple[str, ...] = (),
        life: bool = False,
        before: dict | None = None,
    ) -> tuple[Program, Trial]:
        file = tmp_path / "train.py"
        file.write_text(source)
        program = Program.parse(["python", str(file), *arguments])
        if techniques and before is None:  # as a search does, which knows by then which arguments there are
            before = run_script(source, arguments=arguments)[1].facts
        job = changes_of(program, techniques, before or {}) | {
            "steps": 3,
            "life": life,
            "report": str(tmp_path / "report.json"),
            "scratch": str(tmp_path),
            "here": False,
            "timed": False,
            "share": 1.0,
        }
        kinds = [(field, field.type) for field in fields(transformers.training_args.TrainingArguments)]
        run = inside.Run(json.loads(json.dumps(job)))
        for owner, name in CHANGED:
            monkeypatch.setattr(owner, name, getattr(owner, name))

        def end(reason: str) -> None:
            run.facts["ended_by"] = reason
            raise EndedError

        monkeypatch.setattr(run, "end", end)
        run.change_arguments(transformers.training_args)
        run.change_trainer(transformers.trainer)
        hook = OPTIMIZERS.register_optimizer_step_post_hook
        handles = []
        monkeypatch.setattr(OPTIMIZERS, "register_optimizer_step_post_hook", lambda step: handles.append(hook(step)))
        run.change_optimizers(OPTIMIZERS)
        monkeypatch.setattr(sys, "argv", [str(file), *arguments])
        try:
            runpy.run_path(str(file), run_name="__main__")
        except EndedError:
            pass
        finally:
            for (
                field,
                kind,
            ) in kinds:  # transformers' parser of command lines writes others there, for good
                field.type = kind
            monkeypatch.undo()
            handles[0].remove()
        facts = json.loads(json.dumps(run.facts))
        return program, Trial(tuple(techniques), facts, Use(0, 0, 0), True, 0.0)

    return run_script
