"""Notebooks that lie about their success, and parameters that papermill would pass on without a word."""

from functools import partial
from pathlib import Path

import nbformat
import pytest

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.lessons import parameters
from workbench.lessons.notebooks import NotebookError, build, execute_notebook

DECLARED = "steps: int = 1\nrate: float = 0.1\nquick: bool = True\ncorpus: str = 'x'\nfree = 3"


@pytest.fixture
def lesson(tmp_path, monkeypatch):
    """Makes a notebook of cells, the only one that the command line knows."""
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    monkeypatch.setattr("workbench.lessons.notebooks.build.__defaults__", ((), None, False, tmp_path / "build", 1))

    def make(*cells: str) -> Path:
        book = nbformat.v4.new_notebook(
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        )
        book.cells = [nbformat.v4.new_code_cell(cell) for cell in (DECLARED, *cells)]
        book.cells[0].metadata["tags"] = ["parameters"]
        nbformat.write(book, tmp_path / "lesson.ipynb")
        return tmp_path / "lesson.ipynb"

    return make


@pytest.mark.dear
def test_a_notebook_that_did_not_run_to_its_end_is_a_failure(lesson, tmp_path, capsys, subtests):
    for cell, reason in (
        ("import os; os._exit(0)", "lesson.ipynb, cell 3: its kernel died"),
        ("import sys; sys.exit(0)", "lesson.ipynb, cell 3: stopped by sys.exit or the like; 1 cells after it"),
    ):
        with subtests.test(cell):
            lesson("print('so far')", cell, "print('never')")
            assert main(["notebooks", "lesson"]) == 1
            assert reason in capsys.readouterr().err
            kept = tmp_path / "build" / "notebooks" / "lesson.ipynb"
            assert "so far" in kept.read_text()
            assert not list((tmp_path / "build").rglob("*.html"))
            kept.unlink()


@pytest.mark.dear
def test_an_exit_in_the_last_cell_is_told_too(lesson, tmp_path):
    with pytest.raises(NotebookError, match="cell 2: stopped by sys.exit or the like; 0 cells"):
        execute_notebook(lesson("import sys; sys.exit()"), tmp_path / "out.ipynb")


PARAMETERS = (
    ("stepz", 3, "notebooks has no parameter 'stepz'. Known: corpus, free, quick, rate, steps. Did you mean steps?"),
    ("steps\nimport os", 3, r"notebooks has no parameter 'steps\nimport os'"),
    ("steps = 1; import os #", 3, "notebooks has no parameter"),
    ("", 3, "notebooks has no parameter ''"),
    ("steps", "30", "steps must be an integer of at least 1, got '30'"),
    ("steps", 1.5, "steps must be an integer of at least 1, got 1.5"),
    ("steps", True, "steps must be an integer of at least 1, got True"),
    ("steps", None, "steps must be an integer of at least 1, got None"),
    ("rate", "1e-3", "rate must be a number of at least 0, got '1e-3'"),
    ("quick", 1, "quick must be true or false, got 1"),
    ("corpus", 7, "corpus must be a text, got 7"),
    ("corpus", ["a"], "corpus must be a text"),
    ("corpus", "hf_AbCdEfGhIjKlMnOpQrStUvWxYz", "corpus looks like a secret (hf_…, 29 characters)"),
    ("free", {"key": ["sk-proj-abcdefghijkl"]}, "free looks like a secret (sk-…, 20 characters)"),
)


def test_a_parameter_is_refused_before_anything_runs(lesson, tmp_path, subtests):
    path = lesson("print(steps)")
    for name, value, reason in PARAMETERS:
        calls = {
            "build": partial(build, ["lesson"], {name: value}),
            "check": partial(parameters.check_parameters, [path], {name: value}),
        }
        for call, start in calls.items():
            with subtests.test(call=call, name=name, value=value):
                with pytest.raises(ConfigurationError) as caught:
                    start()
                assert str(caught.value).startswith("notebooks")
                assert reason in str(caught.value)
                assert "AbCdEf" not in str(caught.value)
                assert not (tmp_path / "build").exists()


def test_the_command_line_refuses_them_with_code_2(lesson, capsys):
    lesson()
    for name, value in (("stepz", "3"), ("steps", "many"), ("steps\nimport os", "1"), ("corpus", "ghp_" + "a1B2" * 9)):
        assert main(["notebooks", "lesson", "-p", name, value]) == 2
        assert capsys.readouterr().err.startswith("error: notebooks")


SECRETS = (
    "hf_" + "aB3d" * 8, "github_pat_11ABCDEFG0abcdefgh", "glpat-abcdefgh1234", "xoxb-123456789012-abc",
    "AKIAIOSFODNN7EXAMPLE", "https://user:ghp_0123456789abcdef@host/x", "eyJhbGciOi.eyJzdWIi.c2ln",
)  # fmt: skip
NO_SECRETS = (
    "gpt2", "random:gpt2-medium", "openai-community/gpt2-large", "shakespeare", "", "bf16",
    "/home/me/texts/My_Novel.txt",
    "my-fine-tuned-gpt2-medium-with-lora-rank-8-on-shakespeare-seed-3", "C:\\texts\\novel.txt:encoding=latin-1",
    "./runs/20261121T144847123456-a1b2-0123456789ab/model",
    "MyOrganisation/GPT2-Medium-Finetuned-On-Wikipedia-Articles",
    "a" * 40, "1" * 40, "TheQuickBrownFoxJumpsOverTheLazyDogAgain",
)  # fmt: skip


def test_secrets_are_known_by_their_looks(subtests):
    for value in SECRETS:
        with subtests.test(value):
            assert parameters.TOKENS.search(value)


def test_names_of_models_and_texts_are_no_secrets(subtests):
    for value in NO_SECRETS:
        with subtests.test(value):
            assert not parameters.TOKENS.search(value)
