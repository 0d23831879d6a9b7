"""Every form in which a recipe is taken home, executed: the losses of a run."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from workbench.base.paths import ROOT
from workbench.export.script import portable
from workbench.export.settings import read_settings
from workbench.journal.record import read_all
from workbench.techniques import GradientCheckpointing, Lora
from workbench.training.run import run
from workbench.widgets.takehome import FORMS

FILES = {form: (name, write) for form, (name, write) in FORMS.items() if name.endswith((".toml", ".json"))}
PROGRAMS = [form for form in FORMS if form not in FILES]


@pytest.fixture
def home(recipe, tmp_path, monkeypatch):
    """The recipe, of which model and text lie in the working directory."""
    folder, model, text = tmp_path / "home", Path(recipe.model.removeprefix("random:")), Path(recipe.corpus)
    shutil.copytree(model, folder / model.name)
    shutil.copy(text, folder)
    monkeypatch.chdir(folder)
    names = {"model": f"random:{folder / model.name}", "corpus": str(folder / text.name)}
    return replace(recipe, steps=2, **names) | Lora(rank=2) | GradientCheckpointing()


def executed(name, text):
    """The losses of what the file is for."""
    Path(name).write_text(text, encoding="utf-8")
    if name.endswith((".toml", ".json")):
        return run(read_settings(Path(name).read_text(encoding="utf-8")).recipe, device="cpu").losses
    here = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    here = {name: os.pathsep.join([str(first), os.environ.get(name, "")]) for name, first in here.items()}
    program = sys.executable if name.endswith(".py") else "sh"
    done = subprocess.run(
        [program, name], env={**os.environ, **here, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if program == "sh":
        return read_all()[-1].losses
    history = json.loads(Path("fine-tuned", "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture
def expected(recipe, fine_tuned):
    """The losses of the recipe where it lay."""
    return fine_tuned(replace(recipe, steps=2) | Lora(rank=2) | GradientCheckpointing()).losses


def test_a_file_that_is_taken_home_is_the_recipe(home, expected, subtests):
    for name, write in FILES.values():
        with subtests.test(name):
            assert executed(name, portable(home, write(home))[0]) == expected


@pytest.mark.dear
@pytest.mark.parametrize("form", PROGRAMS)
def test_a_program_that_is_taken_home_trains_what_a_run_trains(home, expected, form):
    name, write = FORMS[form]
    if "trl" in name and find_spec("trl") is None:
        pytest.skip("TRL is not installed")
    losses = executed(name, portable(home, write(home))[0])
    assert losses == (pytest.approx(expected, rel=1e-6) if "trl" in name else expected)
