"""`workbench check`: what is over its limit fails, and what has moved is said."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import yaml

from workbench.__main__ import main
from workbench.advise import budget as budgets
from workbench.advise.budget import Budget, judge, read_budgets
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.base.paths import ROOT
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator.report import Emulation
from workbench.prediction.predict import predict
from workbench.techniques import Lora, Numerics, Technique
from workbench.techniques.base import Call

MIB = 2**20


def keep_a_copy(model):
    """As some releases of transformers: one more copy of the logits lives through the backward pass."""
    loss_function = model.loss_function

    def loss(logits, *arguments, **others):
        model.copied = None
        model.copied = logits.detach().clone()
        return loss_function(logits, *arguments, **others)

    model.loss_function = loss
    return model


@dataclass(frozen=True)
class KeepsACopy(Technique):
    name: ClassVar[str] = "keeps_a_copy"
    title: ClassVar[str] = "Another release of a library"
    attacks: ClassVar[tuple[Category, ...]] = ()
    costs: ClassVar[str] = "memory"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def model(self, family):
        return Call(keep_a_copy)


@pytest.fixture
def small(recipe, predicted_once):
    return replace(recipe, steps=1)


@pytest.fixture
def upgrade(monkeypatch):
    """From now on the libraries are other ones: the loss keeps a copy."""

    def install():
        def later(recipe, gpu):
            found = predict(recipe | KeepsACopy(), gpu)
            newer = {**found.versions, "transformers": "99.0"}
            return replace(found, recipe_id=recipe.id, versions=newer)

        monkeypatch.setattr(budgets, "predict", later)

    return install


@pytest.fixture
def toml(tmp_path, small):
    """A budget.toml for the small recipe with this limit."""

    def write(limit, more=""):
        settings = {k: v for k, v in small.to_dict().items() if v is not None and k != "techniques"}
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        head = f'[small]\nlimit = "{limit}"\ngpu = "t4"\n{more}[small.recipe]\n'
        (tmp_path / "budget.toml").write_text("\n".join([head, *lines, ""]))
        return tmp_path / "budget.toml"

    return write


def test_growth_is_named_by_category_and_operation(toml, upgrade, capsys, small):
    before = predict(small, "t4")
    path = toml("1GiB")
    assert main(["check", str(path)]) == 0
    assert "small: " in capsys.readouterr().out
    upgrade()
    assert main(["check", str(path)]) == 0  # grown, but within its limit
    grown = capsys.readouterr().out
    versions = f"transformers {before.versions['transformers']} → 99.0"
    assert f"since it was stored: {versions}\n" in grown
    assert "within its limit of 1.0 GiB" in grown
    logits = 8 * 32 * 4096 * 4 / MIB
    assert f"+{logits:.1f} MiB  logits and loss: copy (aten.clone.default)\n" in grown


def test_the_differences_sum_to_the_growth(toml, upgrade, capsys):
    path = toml("1GiB")
    main(["check", str(path)])
    upgrade()
    capsys.readouterr()
    assert main(["check", str(path), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    for need in (told["found"], told["before"]):
        assert sum(need["holders"].values()) <= need["peak_bytes"]
    unused = "reserved, unused"
    tensors = [sum(need["holders"].values()) - need["holders"][unused] for need in (told["before"], told["found"])]
    assert tensors[1] - tensors[0] == 8 * 32 * 4096 * 4
    assert told["grown_bytes"] == told["found"]["peak_bytes"] - told["before"]["peak_bytes"] >= 0


def test_what_is_over_its_limit_fails_and_says_who_holds_most(toml, upgrade, capsys):
    path = toml("21MiB")
    assert main(["check", str(path)]) == 1
    first = capsys.readouterr().out
    assert "over its limit of 21.0 MiB" in first
    _, title, *largest = first.splitlines()
    assert title == "  largest allocations at the peak"
    assert len(largest) == budgets.SHOWN
    assert not re.search(r"[+−]", "".join(largest)), "nothing has grown"
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().out == first, "the second check says it again"
    upgrade()
    assert main(["check", str(path)]) == 1
    assert "transformers" in capsys.readouterr().out


def test_an_update_stores_what_is_found_and_a_check_does_not(toml, upgrade):
    path = toml("1GiB")
    lock = path.with_suffix(".lock.json")
    main(["check", str(path)])
    first = lock.read_text()
    upgrade()
    main(["check", str(path)])
    assert lock.read_text() == first
    main(["check", str(path), "--update"])
    assert json.loads(lock.read_text())["small"]["facts"]["transformers"] == "99.0"
    (verdict,) = judge(read_budgets(path), lock)
    assert verdict.before == verdict.found
    assert "\n" not in str(verdict)


def test_a_changed_recipe_is_told_from_a_changed_library(small, tmp_path):
    lock = tmp_path / "a.json"
    judge([Budget("it", small, "1GiB", "t4")], lock)
    (verdict,) = judge([Budget("it", small | Lora(), "1GiB", "t4")], lock)
    assert f"recipe {small.id} → {(small | Lora()).id}" in str(verdict)
    assert verdict.grown_bytes < 0
    assert str(verdict).splitlines()[1].startswith("  −")


# ---- what makes no sense is refused before anything is predicted ----


CONTRADICTORY = [
    ("", "has no budget in it. A table has a limit"),
    ("[a]\n[a]\n", "cannot be read .*twice.* A table has a limit"),
    ('[a]\nlimit = "1GiB"\ngpu = "t4"\nrecipe = {}\nscript = "python a.py"', "a has limit, gpu, recipe, script. A"),
    ('[a]\nlimit = "1GiB"\ngpu = "t4"', "a has limit, gpu. A table has a limit"),
    ("[a]", "a has nothing. A table has a limit"),
    ("a = 1", "check: a takes each key by its name"),
    ('[a]\nlimit = "1GiB"\nrecipe = {}', "a has limit, recipe. A table has a limit"),
    ('[a]\nlimit = "1GiB"\ngpu = "t4"\nscripts = "x"', "check: a has no key 'scripts'. .* Did you mean script?"),
    (
        '[a]\nlimit = "16GiB"\ngpu = "t4"\nrecipe = {}',
        "the limit of a, 16.0 GiB, is more than the NVIDIA T4 has .*",
    ),
    ('[a]\nlimit = "much"\ngpu = "t4"\nrecipe = {}', "the limit of a: 'much' is not an amount of memory"),
    ('[a]\nlimit = "1GiB"\ngpu = "t5"\nrecipe = {}', "gpu: there is no 't5'. Known: "),
    ('[a]\nlimit = "1GiB"\ngpu = "cpu"\nscript = "python a.py"', "gpu: there is no 'cpu'. Known: "),
    ('[a]\nlimit = "1GiB"\ngpu = "t4"\nscript = 3', "the script of a must be a command line, got 3"),
    ('[a]\nlimit = "1GiB"\ngpu = "t4"\nscript = "python \'a"', "the script of a must be a command line, got"),
    ('[a]\nlimit = "1GiB"\ngpu = "t4"\nrecipe = {sequence_length = 1}', "sequence_length must be an integer of at"),
]


def test_contradictory_budgets(tmp_path, monkeypatch, subtests):
    monkeypatch.setattr(budgets, "predict", lambda *_: pytest.fail("predicted"))
    monkeypatch.setattr(budgets, "emulate", lambda *_, **__: pytest.fail("emulated"))
    path = tmp_path / "budget.toml"
    for text, message in CONTRADICTORY:
        with subtests.test(text=text):
            good = '[good]\nlimit = "1GiB"\ngpu = "t4"\nrecipe = {}\n' if text.startswith("[a]\nlimit") else ""
            path.write_text(good + text)
            with pytest.raises(ConfigurationError, match=message):
                read_budgets(path)
            assert main(["check", str(path)]) == 2


def test_no_file_and_a_damaged_lock(tmp_path, small, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"budget.toml cannot be read \(.*No such file.*A table has a limit"):
        read_budgets(tmp_path / "budget.toml")
    monkeypatch.setattr(budgets, "predict", lambda *_: pytest.fail("predicted"))
    for damaged in ("{", '{"it": {"peak_bytes": "much"}}', "[]"):
        (tmp_path / "a.json").write_text(damaged)
        with pytest.raises(ConfigurationError, match="cannot be read .*Remove it: the next check writes it anew"):
            judge([Budget("it", small, "1GiB", "t4")], tmp_path / "a.json")


# ---- programs ----

PROGRAM = """
import torch, library
model = torch.nn.Linear(1024, 1024, device="cuda")
library.use(model(torch.empty(4096, 1024, device="cuda")))
"""


@pytest.fixture
def program(emulator, tmp_path, monkeypatch):
    """A program with a library of its own, which can be upgraded."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"))
    monkeypatch.chdir(tmp_path)

    def library(line):
        (tmp_path / "site-packages" / "library.py").write_text(f"def use(logits):\n    {line}\n    return logits\n")

    library("pass")
    return library


@pytest.mark.dear
def test_a_library_that_takes_more_is_named_with_the_programs_line(program, tmp_path):
    budget, lock = Budget("it", "python train.py", "60MiB", "t4"), tmp_path / "it.json"
    (first,) = judge([budget], lock)
    assert not first.over
    program("copy = logits.double()")
    (then,) = judge([budget], lock)
    assert then.over
    assert then.grown_bytes == 32 * MIB
    assert "+32.0 MiB  train.py:4 in <module>" in str(then)
    assert sum(then.found.holders.values()) == then.found.peak_bytes


@pytest.mark.dear
def test_a_program_that_runs_out_is_over_whatever_its_peak(program, tmp_path):
    program("logits.new_empty(2**34)")
    (verdict,) = judge([Budget("it", "python train.py", "14GiB", "t4")], tmp_path / "it.json")
    assert verdict.over
    assert verdict.found.peak_bytes < MIB * 100
    assert "out of the card's memory, over its limit of 14.0 GiB" in str(verdict)


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """What is judged of a program that ended so on an emulated card, and was refused memory so often."""

    def judged(status, *refusals):
        memory = {"peak_reserved_bytes": 2 * MIB, "peak_allocated_bytes": MIB, "lines": []}
        processes = [{"torch": "2.13.0", "devices": [{"index": 0, **memory, "refusals": count}]} for count in refusals]
        emulation = Emulation(gpu("t4"), ("python",), status, tuple(processes))
        monkeypatch.setattr(budgets, "emulate", lambda *_, **__: emulation)
        (verdict,) = judge([Budget("it", "python train.py", "14GiB", "t4")], tmp_path / f"{status} {refusals}.json")
        return verdict

    return judged


def test_a_program_that_fails_is_no_answer(ended):
    with pytest.raises(ConfigurationError, match="program of it ended with exit status 3, having not used the GPU"):
        ended(3)
    with pytest.raises(ConfigurationError, match="program of it ended with exit status 3, having used"):
        ended(3, 0)


def test_a_program_that_mended_its_refusals_is_one(ended):
    mended, refused = ended(0, 2), ended(1, 2)
    assert (mended.over, refused.over) == (False, True)
    for verdict in (mended, refused):
        assert verdict.found.facts["torch"] == "2.13.0"
        assert "transformers" not in verdict.found.facts, "it ran under another Python"


# ---- the workflow that stands ready ----


def test_the_workflow_runs_commands_that_exist_on_budgets_that_can_be_read():
    folder = ROOT / "data" / "workflows"
    workflow = yaml.safe_load((folder / "memory.yml").read_text())
    steps = workflow["jobs"]["check"]["steps"]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    (ours,) = [step for step in steps if step.get("uses", "").startswith("OWNER/NAME@")]
    assert ours["with"].keys() <= ACTION["inputs"].keys()
    assert workflow[True].keys() == {"pull_request", "push", "schedule"}  # YAML reads `on` as true
    assert [budget.name for budget in read_budgets(folder / "budget.toml")] == ["lora-on-a-t4"]
    assert ours["with"]["budget"] == "budget.toml"


ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def run_step(number, folder, **variables):
    """Run a step of the action as a runner does: bash ends with the first command that fails."""
    step = ACTION["runs"]["steps"][number]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **variables}
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.dear
def test_the_action_fails_over_a_budget_and_shows_the_verdicts(tmp_path):
    assert ACTION["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" for step in ACTION["runs"]["steps"])
    assert ACTION["runs"]["steps"][2]["env"] == {"BUDGET": "${{ inputs.budget }}"}
    summary = tmp_path / "summary.md"
    recipe = 'gpu = "t4"\nrecipe = { model = "gpt2-tiny", effective_batch_size = 2, sequence_length = 32 }\n'
    for limit, exit_status in (("1GiB", 0), ("1MiB", 1)):
        (tmp_path / "budget.toml").write_text(f'[it]\nlimit = "{limit}"\n{recipe}')
        summary.write_text("")
        done = run_step(2, tmp_path, BUDGET="budget.toml", GITHUB_STEP_SUMMARY=str(summary))
        assert done.returncode == exit_status, done.stderr
        assert "it" in done.stdout
        assert done.stdout.strip() in summary.read_text()
    assert run_step(2, tmp_path, BUDGET="missing.toml", GITHUB_STEP_SUMMARY=str(summary)).returncode == 2
    assert {path.name for path in tmp_path.iterdir()} == {"budget.toml", "budget.lock.json", "summary.md", "runs"}
