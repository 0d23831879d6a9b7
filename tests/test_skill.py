"""SKILL.md, which coding assistants follow: its commands exist, and what it says of answers and exits is so."""

import json
import re
import shlex

import pytest
import yaml

from workbench.__main__ import _parser
from workbench.advise.candidate import Candidate
from workbench.advise.causes import Cause
from workbench.advise.message import ErrorMessage
from workbench.advise.plan import Plan
from workbench.advise.scan import Scan
from workbench.base.command_line import BUG, COMMANDS, INTERRUPTED, OUT_OF_MEMORY, PROGRAM, split_off_program
from workbench.base.paths import ROOT
from workbench.fit.results import Answer, Fit
from workbench.gpus.emulator.report import Emulation
from workbench.prediction.prediction import Prediction
from workbench.techniques import REGISTRY, Numerics

SKILL = (ROOT / "SKILL.md").read_text(encoding="utf-8")
_, HEAD, BODY = SKILL.split("---\n", 2)
# `emulate --set-up` has no program, and `--version` no command.
COMMAND_LINES = re.findall(r"`workbench ((?!emulate --set-up|--)[^`]+)`", BODY)


def test_its_head_is_that_of_the_format():
    """Lengths and letters by the specification of agent skills."""
    head = yaml.safe_load(HEAD)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", head["name"])
    assert len(head["name"]) <= 64
    assert 0 < len(head["description"]) <= 1024
    assert len(BODY.splitlines()) < 500


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_each_command_can_be_typed(line):
    ours, _ = split_off_program(shlex.split(line))
    args, others = _parser().parse_known_args(ours)
    assert not others
    assert args.json == ("--json" in line)


def test_it_has_each_command_but_those_of_the_notebooks():
    assert {line.split()[0] for line in COMMAND_LINES} == COMMANDS.keys() - {"notebooks", "lessons", "records"}


def test_its_exit_statuses_are_those_of_the_program():
    statuses = set(map(int, re.findall(r"^\| (\d+) \|", BODY, re.MULTILINE)))
    assert statuses == set(map(int, re.findall(r"^  (\d+)  ", PROGRAM["exit_codes"], re.MULTILINE)))
    assert statuses >= {OUT_OF_MEMORY, BUG, INTERRUPTED}


ANSWERS = {
    "`predict`": (Prediction,),
    "`plan` of a recipe": (Plan, Candidate),
    "`plan` of a program": (Fit, Answer),
    "`emulate`": (Emulation,),
    "`scan`": (Scan,),
    "`doctor`": (ErrorMessage, Cause),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_fields_that_it_names_are_in_the_answer(answer):
    (line,) = re.findall(rf"^- {answer}: (.*)$", BODY, re.MULTILINE)
    names = re.findall(r"`([a-z_]+)(?:\[\]\.?[\w.[\]]*)?`", line)
    # Within a field, added to the fields, or said of another command.
    others = {"tokens", "step", "place", "command", "processes", "what_would_tell"}
    fields = {name for result in ANSWERS[answer] for name in (*dir(result), *result.__dataclass_fields__)}
    assert set(names) - others <= fields
    assert names


def test_the_words_for_the_loss_are_those_of_the_techniques():
    assert {str(numerics) for numerics in Numerics} <= set(re.findall(r"`(\w+)`", BODY))


def test_the_techniques_that_it_types_exist():
    typed = re.findall(r"--technique (\w+)", " ".join(COMMAND_LINES))
    assert set(typed) <= REGISTRY.keys()
    assert typed


def test_a_message_is_answered_as_it_says(tmp_path, capsys):
    from workbench.__main__ import main

    crash = tmp_path / "crash.log"
    crash.write_text(
        "CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 14.58 GiB of which 1.20 GiB is "
        "free. Of the allocated memory 12.50 GiB is allocated by PyTorch, and 748.23 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert main(["doctor", str(crash), "--json"]) == 0
    causes = json.loads(capsys.readouterr().out)["causes"]
    assert causes
    assert all({"because", "cure"} <= cause.keys() for cause in causes)
