"""The front page, and the pages that lead to the lessons or say how to go on: links, minutes, numbers."""

import csv
import json
import re
import runpy
from itertools import chain
from types import SimpleNamespace

import pytest

from workbench.base.paths import NOTEBOOKS, ROOT

DOCS = ROOT / "docs"
FRONT_PAGES = (ROOT / "README.md", DOCS / "index.md")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md") if path not in FRONT_PAGES}
FOR_PEOPLE = {"CODE_OF_CONDUCT", "SECURITY"}  # which GitHub shows, and CONTRIBUTING.md links to
UNDEFINED_ONCE = {  # which readers of the lessons did not know
    "Conv1D",
    "SDPA",
    "apart",
    "compute capability",
    "disturbed",
    "eager",
    "foreach",
    "fused kernel",
    "held-out loss",
    "reentrant",
    "spread",
    "tied embedding",
}
LINK = re.compile(r"\[[^]]+\]\(([^)\s]+)\)")
LESSONS = {path.name for path in NOTEBOOKS.glob("*.ipynb")}


def linked(name):
    return [target for target in LINK.findall(PAGES[name]) if not target.startswith("http")]


def anchors(text):
    """Of the headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def settings():
    pytest.importorskip("latex2mathml", reason="needs the extra `site`")
    return runpy.run_path(str(DOCS / "conf.py"))


@pytest.fixture(scope="module")
def with_minutes(settings):
    return settings["with_minutes"]


def test_a_page_made_before_its_notebook_was_executed_waits_for_it(settings, tmp_path):
    noted = []
    config = SimpleNamespace(executed_notebooks=tmp_path, repository_url="")
    app = SimpleNamespace(config=config, env=SimpleNamespace(note_dependency=noted.append))
    settings["show_executed"](app, "notebooks/05_lora", [(NOTEBOOKS / "05_lora.ipynb").read_text(encoding="utf-8")])
    assert noted == [tmp_path / "05_lora.ipynb"]


def test_what_a_page_links_to_is_there(subtests):
    for page in (*FRONT_PAGES, ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            with subtests.test(page=page.name, target=target):
                path, _, anchor = target.partition("#")
                file = (page.parent / path).resolve() if path else page
                assert target.startswith("http") or file.exists()
                assert not anchor or target.startswith("http") or anchor in anchors(file.read_text(encoding="utf-8"))


def test_the_front_page_is_short_and_begins_with_the_three_commands():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    for command in ("make lab", "make run", "make test"):
        assert any(line.startswith(f"{command} ") for line in lines[:25]), command


def test_the_front_page_has_every_lesson_once():
    rows = re.findall(r"^\| \[.*?\]\(notebooks/(\w+\.ipynb)\)", FRONT_PAGES[0].read_text(encoding="utf-8"), flags=re.M)
    assert sorted(rows) == sorted(LESSONS)


def test_every_lesson_is_on_a_path_or_cures_a_symptom_and_an_appendix_hangs_on_its_lesson():
    reached = {target.rpartition("/")[2] for target in chain(linked("paths"), linked("symptoms"))}
    for lesson in sorted(LESSONS & reached):
        prose = json.dumps(json.loads((NOTEBOOKS / lesson).read_text(encoding="utf-8"))["cells"], ensure_ascii=False)
        reached |= {target for target in LINK.findall(prose) if target.startswith(f"{lesson[:2]}b_")}
    assert LESSONS - reached == set()


def test_the_front_pages_lead_to_all_of_them():
    readme, index = (page.read_text(encoding="utf-8") for page in FRONT_PAGES)
    for name in PAGES.keys() - FOR_PEOPLE:
        assert f"](docs/{name}.md" in readme, name
        assert re.search(rf"^{name}$", index, flags=re.MULTILINE), f"{name} is in no table of contents"


def test_a_symptom_has_its_category_a_check_and_two_switches():
    rows = [line.split(" | ") for line in PAGES["symptoms"].splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    assert {len(row) for row in rows} == {5}
    for row in rows:
        if row[0] == "| what you see":
            continue
        assert LINK.search(row[3]), row[0]


def test_minutes_stand_behind_every_lesson_and_are_those_of_the_notebooks(with_minutes, tmp_path):
    told, asked = with_minutes(PAGES["paths"], tmp_path)
    lessons = re.findall(r"^\d+\. .*\(\.\./notebooks/([\w.]+)\).* \*\((\d+) min to read\)\*$", told, flags=re.MULTILINE)
    assert len(lessons) == len(re.findall(r"^\d+\. ", PAGES["paths"], flags=re.MULTILINE))
    assert {path.name for path in asked} == {name for name, _ in lessons}
    for name, minutes in lessons:
        cells = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))["cells"]
        words = " ".join("".join(cell["source"]) for cell in cells).split()
        assert int(minutes) == round(len(words) / 200) > 0, name
    assert told.count("*Together ") == PAGES["paths"].count("\n1. ") == 3


def test_a_run_that_was_timed_is_told_and_one_that_failed_is_not(with_minutes, tmp_path):
    text = "1. [One](../notebooks/05_lora.ipynb): why"
    executed = json.loads((NOTEBOOKS / "05_lora.ipynb").read_text(encoding="utf-8"))
    for noted, words in (({"duration": 90}, ", 1.5 to run)*"), ({"duration": 9, "exception": True}, "read)*")):
        executed["metadata"]["papermill"] = noted
        (tmp_path / "05_lora.ipynb").write_text(json.dumps(executed))
        assert with_minutes(text, tmp_path)[0].splitlines()[0].endswith(words)


def test_the_numbers_of_the_decision_page_are_those_of_the_file_that_it_names():
    (file,) = {target for target in linked("decide") if target.endswith(".csv")}
    with (DOCS / file).open(encoding="utf-8") as opened:
        known = {row["label"]: row for row in csv.DictReader(opened)}
    peak, speed = (float(known["baseline"][name]) for name in ("peak_allocated_bytes", "tokens_per_s"))
    rows = [line for line in PAGES["decide"].splitlines() if line.startswith("| `")]
    assert len(rows) > 10
    peaks = []
    for row in rows:
        label, _, *told = (cell.strip() for cell in row.replace("\xa0", " ").strip("|").split("|"))
        found = known[label.strip("`")]
        needs, runs = float(found["peak_allocated_bytes"]), float(found["tokens_per_s"])
        saves = "" if label == "`baseline`" else f"{1 - needs / peak:.0%}".replace("%", " %")
        assert told == [f"{needs / 2**30:.1f} GiB", saves, f"{runs / speed:.2f}×"], label
        peaks.append(needs)
    assert peaks == sorted(peaks, reverse=True)


def test_words_of_the_glossary_are_defined_once():
    words = re.findall(r"^(\S.*)\n: ", PAGES["glossary"], flags=re.MULTILINE)
    assert len(words) == len(set(words)) > 40
    told = {part for word in words for part in word.strip("`").split(", ")}
    assert UNDEFINED_ONCE - told == set()
