"""Colab and Kaggle: their copies of the notebooks work. That their versions lie in our ranges is `tests/lint.py`'s."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import types

import anywhere
import nbformat
import pytest
import yaml
from anywhere import Repository
from packaging.requirements import Requirement

from workbench.base.paths import NOTEBOOKS, ROOT

ADDRESS = "https://github.com/someone/some.thing"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# ---- the copies of the notebooks ----


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies") / "new"
    assert anywhere.main([str(folder), "--repository", f"{ADDRESS}.git", "--ref", "abc123"]) == 0
    return folder


def test_every_notebook_is_a_valid_one_with_links_and_set_up_on_top(copies, subtests):
    assert {path.name for path in copies.glob("*.ipynb")} == {path.name for path in NOTEBOOKS.glob("*.ipynb")}
    for path in sorted(copies.glob("*.ipynb")):
        with subtests.test(notebook=path.name):
            book, original = (nbformat.read(str(file), as_version=4) for file in (path, NOTEBOOKS / path.name))
            nbformat.validate(book)
            assert len({cell.id for cell in book.cells}) == len(book.cells)
            badges, set_up, *others = book.cells
            assert f"colab.research.google.com/github/someone/some.thing/blob/anywhere/{path.name})" in badges.source
            assert f"raw.githubusercontent.com/someone/some.thing/anywhere/{path.name})" in badges.source
            assert set_up.cell_type == "code"
            assert [cell.source for cell in others if cell.cell_type == "code"] == [
                cell.source for cell in original.cells if cell.cell_type == "code"
            ]
            assert len(others) == len(original.cells)


def test_links_lead_to_the_repository_or_to_another_copy(copies):
    for path in copies.glob("*.ipynb"):
        for cell in nbformat.read(str(path), as_version=4).cells:
            if cell.cell_type == "markdown":
                for link in re.findall(r"\]\(([^)\s]+)", cell.source):
                    assert re.match(r"https?://|#", link), (path.name, link)
                    file = link.partition(f"{ADDRESS}/blob/abc123/")[2].partition("#")[0]
                    assert (ROOT / file).exists(), (path.name, link)


def test_a_link_is_completed_by_what_it_leads_to():
    assert Repository(ADDRESS, "v1").make_links_absolute(
        "[a](05_lora.ipynb) [b](../README.md#the-pages) ![c](../data/x.png) [d](#e)"
    ) == (
        f"[a]({ADDRESS}/blob/anywhere/05_lora.ipynb) [b]({ADDRESS}/blob/v1/README.md#the-pages) "
        f"![c]({ADDRESS}/raw/v1/data/x.png) [d](#e)"
    )


NO_ADDRESSES = [
    "", "someone/thing", "http://github.com/a/b", "https://github.com/a", "https://gitlab.com/a/b",
    "https://github.com/a/b/c", "https://github.com/a/b\n", 'https://github.com/a/b")', "https://github.com/a/b?x",
]  # fmt: skip
NO_REFS = ["", "-x", "a b", 'a"b', "a..b", "a\n"]


def test_an_address_or_a_ref_that_is_none_is_refused_with_a_cure(tmp_path, capsys, subtests):
    cases = [(["--repository", address], "Give it as https://github.com/OWNER/NAME.") for address in NO_ADDRESSES]
    cases += [(["--repository", ADDRESS, f"--ref={ref}"], "is no branch, tag or commit") for ref in NO_REFS]
    for options, message in cases:
        with subtests.test(options=options):
            assert anywhere.main([str(tmp_path / "new"), *options]) == 2
            assert message in capsys.readouterr().err
            assert not (tmp_path / "new").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "mine.txt", NOTEBOOKS):
        assert anywhere.main([str(folder), "--repository", ADDRESS]) == 2
        assert "Name a new one, or remove it first." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# ---- the set-up cell ----


@pytest.fixture
def set_up(copies, monkeypatch, tmp_path):
    """Runs the cell where the workbench is missing or not, with a pip that only says what it was asked for."""

    def run(exits=(0,), missing=True):
        asked, left = [], list(exits)

        def pip(command, **_):
            asked.append((command, command_constraints(command)))
            return subprocess.CompletedProcess(command, left.pop(0), "", "what pip says")

        monkeypatch.setattr(subprocess, "run", pip)
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
        if missing:
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        exec(nbformat.read(str(copies / "05_lora.ipynb"), as_version=4).cells[1].source, {})
        return asked

    return run


def command_constraints(command):
    with open(command[command.index("--constraint") + 1]) as file:
        return file.read().splitlines()


@pytest.fixture
def on_kaggle(monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")


@pytest.fixture(params=["colab", "kaggle"])
def platform(request, monkeypatch):
    if request.param == "colab":
        monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    else:
        request.getfixturevalue("on_kaggle")


def test_on_a_platform_it_installs_the_workbench_and_keeps_what_is_there(platform, set_up):
    ((command, kept),) = set_up()
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    first, *others = command[7:]
    assert first == f"{PROJECT['name']} @ {ADDRESS}/archive/abc123.zip"
    assert {*others} == {line for line in PROJECT["optional-dependencies"]["lessons"] if "jupyterlab" not in line}
    assert Requirement(first).url.startswith(ADDRESS)
    assert f"torch=={importlib.metadata.version('torch')}" in kept
    assert len(kept) > 100
    assert all(Requirement(line).specifier for line in kept)


@pytest.mark.usefixtures("on_kaggle")
def test_where_nothing_goes_beside_all_of_it_pytorch_alone_is_kept(set_up):
    (_, every), (_, torch) = set_up(exits=(1, 0))
    assert set(torch) < set(every)
    assert f"torch=={importlib.metadata.version('torch')}" in torch
    assert not any(line.startswith("numpy") for line in torch)


@pytest.mark.usefixtures("on_kaggle")
def test_what_pip_says_is_shown_when_it_fails(set_up):
    with pytest.raises(
        RuntimeError, match=r"what pip says\npip cannot install .* PyTorch \d.* choose the platform's newest"
    ):
        set_up(exits=(1, 1))


@pytest.mark.usefixtures("on_kaggle")
def test_where_the_workbench_is_there_nothing_happens(set_up):
    assert set_up(missing=False) == []


def test_elsewhere_nothing_is_installed_unasked(set_up, monkeypatch):
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install 'gpt2-memory-workbench @ https"):
        set_up()


# ---- where they are published, and opened ----


def test_the_workflow_pushes_the_copies_as_a_branch_of_their_own(tmp_path):
    """Its shell, in a repository with the files it needs, with a folder in GitHub's place."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "site.yml").read_text(encoding="utf-8"))["jobs"]
    (script,) = (step["run"] for step in jobs["anywhere"]["steps"] if "run" in step)

    def git(*words):
        return subprocess.run(["git", *words], cwd=tmp_path / "here", capture_output=True, text=True, check=True).stdout

    (tmp_path / "here").mkdir()
    for name in ("notebooks", "tools", "pyproject.toml", ".gitignore"):
        (tmp_path / "here" / name).symlink_to(ROOT / name)
    git("init", "--quiet", "--bare", str(tmp_path / "origin"))
    git("init", "--quiet", "--initial-branch=main")
    git("remote", "add", "origin", str(tmp_path / "origin"))
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "all")
    folder = os.path.dirname(sys.executable)
    environment = {**os.environ, "REPOSITORY_URL": ADDRESS, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path / "here", env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    pushed = git("ls-tree", "-r", "--name-only", "origin/anywhere").split()
    assert pushed == sorted(["README.md", *(path.name for path in NOTEBOOKS.glob("*.ipynb"))])
    assert git("rev-parse", "main").strip() in git("show", "origin/anywhere:05_lora.ipynb")


@pytest.mark.parametrize(("address", "links"), [("", 0), (ADDRESS, 1)])
def test_a_page_of_the_site_links_to_its_copy_where_the_address_is_known(address, links, tmp_path):
    pytest.importorskip("latex2mathml", reason="needs the extra `site`")
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    app = types.SimpleNamespace(
        config=types.SimpleNamespace(executed_notebooks=str(tmp_path), repository_url=address),
        env=types.SimpleNamespace(note_dependency=lambda path: None),
    )
    source = [(NOTEBOOKS / "05_lora.ipynb").read_text(encoding="utf-8")]
    conf["show_executed"](app, "notebooks/05_lora", source)
    title = "".join(json.loads(source[0])["cells"][0]["source"])
    assert title.startswith("# 05 · LoRA\n")
    assert title.count("/someone/some.thing/blob/anywhere/05_lora.ipynb)") == links
    assert title.count("/someone/some.thing/anywhere/05_lora.ipynb)") == links
    assert title.count("**Freeze the model") == 1
