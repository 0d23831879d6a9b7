"""Hostile names, labels and messages stay what they are: text. And no code of others is run."""

import csv
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from workbench.advise.compare import compare, comparison_text
from workbench.advise.frame import FORMULA, to_csv, to_frame
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.base.paths import ROOT, path_inside
from workbench.journal.record import Record, Status
from workbench.lessons import plots
from workbench.lessons.staircase import draw_staircase

NASTY = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</title></table></style><script>x", "&lt;b&gt;",
    "=cmd|' /C calc'!A0", "@SUM(1+1)", "+1", "-1+2", "\t=1", "\r=1", "\n=1", "$\\frac{", "$x$", "{0}", "%s", "_a_ *b*",
    "javascript:alert(1)", "\u202egnp.exe", "', '); --", "a,b\"c\nd", "nan", "", "baseline ",
]  # fmt: skip
TEXTS = st.one_of(st.sampled_from(NASTY), st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40))
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def finished(label: str, number: int, hostile: str) -> Record:
    facts = {
        "model": hostile, "device_name": hostile, "error": hostile, "memory_source": "cpu-tracker",
        "learning_rate": 1e-3,
        "peak_allocated_bytes": 100 + number, "peak_phase": "backward", "held_out_loss": 4.0, "tokens_per_s": 1.0,
        "trainable_parameters": 10, "by_category": {str(c): 0 for c in Category} | {"weights": 100 + number},
    }  # fmt: skip
    recipe = {"corpus": hostile, "effective_batch_size": 8, "sequence_length": 128, "steps": 2, "seed": 0}
    return Record(f"id{number}", f"2026-01-01T00:00:{number:02}.000+00:00", Status.OK, recipe, "r", label, **facts)


def frame_of(label: str, hostile: str):
    return to_frame([finished("baseline", 0, hostile), finished(label, 1, hostile)])


class Tags(HTMLParser):
    """The tags, the names of attributes, and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text = set[str](), set[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text.append(data)


@QUICK
@given(label=TEXTS, hostile=TEXTS)
@example(label=NASTY[0], hostile=NASTY[1])
def test_the_table_shows_them(label, hostile):
    text = comparison_text(compare(frame_of(label, hostile)))
    assert label in text or "\n" in label or "\r" in label or "\t" in label


@QUICK
@given(label=TEXTS, hostile=TEXTS)
@example(label="=1+1", hostile="@x")
def test_a_spreadsheet_calculates_none_of_them(label, hostile, tmp_path):
    frame = frame_of(label, hostile)
    table = compare(frame)
    to_csv(frame, tmp_path / "runs.csv")
    to_csv(table.assign(**table.attrs), tmp_path / "comparison.csv", index=True)
    for name in ("runs.csv", "comparison.csv"):
        with (tmp_path / name).open(encoding="utf-8", newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        assert not [cell for cell in cells if cell.startswith(FORMULA) and not re.fullmatch(r"-?[\d.e+-]+", cell)]
        assert {cell.removeprefix("'") for cell in cells} >= {hostile.removeprefix("'"), label.removeprefix("'")}


def test_pictures_can_be_drawn_of_them(tmp_path):
    """Of a record they show its label; all of them stand in one picture of each kind."""
    labels = ["baseline", *(f"x{hostile}" for hostile in NASTY)]
    table = compare(to_frame([finished(label, number, NASTY[0]) for number, label in enumerate(labels)]))
    assert set(table.index) == set(labels)
    for picture in (plots.memory_bars(table), draw_staircase(table)):
        picture.savefig(tmp_path / "picture.png")
        plt.close(picture)


# ---- names that become paths ----


@given(
    st.one_of(st.sampled_from(["..", ".", "", "a/b", "../x", "/etc/passwd", "a\0b", "x" * 65, "a b", "ä"]), st.text())
)
def test_a_name_stays_inside_its_folder_or_is_refused(name):
    root = Path("/tmp/root")
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name, flags=re.ASCII) and name.strip("."):
        assert path_inside(root, name).parent == root
    else:
        with pytest.raises(ConfigurationError, match="cannot be a file's. Use 1 to 64 letters"):
            path_inside(root, name)


def test_a_link_that_leads_out_is_refused(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "x").symlink_to(tmp_path)
    with pytest.raises(ConfigurationError, match="is a link that leads out"):
        path_inside(tmp_path / "root", "x")


def test_a_record_whose_id_is_a_path_is_neither_read_nor_written(tmp_path, subtests):
    record = finished("baseline", 0, "x")
    path = record.save(tmp_path)
    for identity in ("../../x", "/tmp/x", "a\0b", "x" * 300, "..", 7, None):
        with subtests.test(identity=identity):
            path.write_text(json.dumps({**dataclasses.asdict(record), "id": identity}))
            with pytest.raises(ConfigurationError, match="is not a record"):
                Record.read(path)
            with pytest.raises(ConfigurationError, match="name: "):
                dataclasses.replace(record, id=f"{identity}/../../x").save(tmp_path)
            assert [file.name for file in tmp_path.iterdir()] == [path.name]


# ---- code from elsewhere ----


def sources() -> list[Path]:
    return [*(ROOT / "workbench").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]


# the pipe to a process that it started itself
OWN_PROCESS = {"launch.py": {"pickle.load("}}


def test_no_code_and_no_pickles_of_others_are_run():
    """It sees a call that no test makes, too."""
    faults = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        calls = re.findall(r"trust_remote_code\s*=\s*True|weights_only\s*=\s*False", text)
        calls += re.findall(r"\bpickle\.loads?\(|(?<![.\w])eval\(|(?<![.\w])exec\(", text)
        faults += [(path.name, call) for call in calls if call not in OWN_PROCESS.get(path.name, ())]
        loads = [(call, "weights_only=True") for call in re.findall(r"torch\.load\([^)]*\)", text)]
        if path.suffix == ".py":
            models = re.findall(r"Auto\w+\.from_pretrained\([^)]*\)", text)
            loads += [(call, "trust_remote_code=False") for call in models]
        faults += [(path.name, call) for call, argument in loads if argument not in call]
    assert faults == []


def test_what_a_record_shows_in_a_notebook_is_text():
    shown = finished("<b>", 0, "<script>alert(1)</script>")._repr_html_()
    assert Tags(shown).tags == {"pre"}
