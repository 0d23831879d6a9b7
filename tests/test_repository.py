"""What people and their tools expect beside the code: who to cite, where to report, what every change is asked."""

import re

import pytest
import yaml

import workbench
from workbench.paths import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_version_is_the_same_everywhere():
    citation = read(ROOT / "CITATION.cff")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d\S*)(?: \((.*)\))?$", changes, flags=re.MULTILINE)
    assert citation["version"] == workbench.__version__ == released[0][0]
    assert str(citation["date-released"]) == released[0][1]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_every_form_asks_for_the_environment(path):
    assert any("python -m workbench env" in field["attributes"]["label"] for field in read(path)["body"])


def test_every_system_and_python_is_tried():
    matrix = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["elsewhere"]["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert {row["libraries"] for row in matrix["include"]} == {"oldest", "newest"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_there(path):
    text = path.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    for name in re.findall(r"(?:python |run: )((?:tools|\.ci)/\S+)", text):
        assert (ROOT / name).is_file(), name


def test_before_a_commit_the_programs_of_make_lint_are_run():
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks} == set(
        re.findall(r"\$\(BIN\)/(\S+)", lint)
    )
