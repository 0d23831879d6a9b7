"""The index of a folder of records: nothing is read twice, and the table is as if everything were."""

import os
from dataclasses import replace

import pandas as pd
import pytest

from workbench.advise import index
from workbench.advise.frame import records, to_frame
from workbench.journal.record import Record, Status, read_all, read_record
from workbench.recipe import Recipe
from workbench.techniques import Lora

MOST = 8


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with records, for whose index few are enough."""
    monkeypatch.setattr(index, "WORTH", 3)
    for number in range(MOST):
        recipe = Recipe(model="gpt2-tiny", seed=number)
        record = Record.start(recipe | Lora() if number % 2 else recipe)
        replace(record, rates_tried={"0.1": 1.0}, peak_allocated_bytes=0, status=Status.OK).save(tmp_path)
    return tmp_path


@pytest.fixture
def read_again(monkeypatch):
    """The names of the files that are read."""
    names = []

    def note(path):
        names.append(path.name)
        return read_record(path)

    monkeypatch.setattr(index, "read_record", note)
    return names


def check(folder):
    pd.testing.assert_frame_equal(records(folder), to_frame(read_all(folder)))


def test_only_what_has_changed_is_read_again(folder, read_again):
    check(folder)
    assert len(read_again) == MOST
    read_again.clear()
    check(folder)
    assert read_again == []
    first, second, *_ = read_all(folder)
    replace(first, status=Status.KILLED).save(folder)
    second.path(folder).unlink()
    new = Record.start(Recipe(model="gpt2-tiny"))
    new.save(folder)
    check(folder)
    assert sorted(read_again) == sorted([f"{first.id}.json", f"{new.id}.json"])


def test_a_file_of_the_same_size_and_time_is_another_one(folder):
    check(folder)
    path = read_all(folder)[0].path(folder)
    before = path.stat()
    text = path.read_text()
    other = path.with_suffix(".other")
    other.write_text(text.replace('"seed": 0', '"seed": 7'))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert path.stat().st_size == before.st_size
    check(folder)


def test_few_records_need_no_index(folder, monkeypatch):
    monkeypatch.setattr(index, "WORTH", MOST + 1)
    check(folder)
    assert not (folder / index.NAME).exists()


def test_an_index_that_cannot_be_used_is_made_anew(folder, read_again, monkeypatch):
    check(folder)
    path = folder / index.NAME
    content = path.read_bytes()
    for damage in (b"", b"{}", content[:-9], content[:99] + b"?" * 99 + content[198:]):
        path.write_bytes(damage)
        read_again.clear()
        check(folder)
        assert len(read_again) in (0, MOST)  # a damage in the middle may lie where nothing is read
    with monkeypatch.context() as patch:
        patch.setattr(index, "_code", lambda: b"of another version")
        read_again.clear()
        check(folder)
        assert len(read_again) == MOST


def test_what_is_no_record_is_named_as_ever_and_not_kept(folder, capsys):
    (folder / "broken.json").write_text("{")
    original = read_all(folder)[0]
    copy = folder / "copy.json"
    copy.write_text(original.path(folder).read_text())
    capsys.readouterr()
    for _ in range(2):
        check(folder)
    # Without the original the copy is the record, and with it no more.
    content = original.path(folder).read_bytes()
    original.path(folder).unlink()
    check(folder)
    assert original.id in set(records(folder)["id"])
    original.path(folder).write_bytes(content)
    check(folder)
    assert len(records(folder)) == MOST


def test_a_folder_that_cannot_be_written_to_is_read(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index.parquet, "write_table", refuse)
    check(folder)
    assert not [path for path in folder.iterdir() if path.suffix != ".json"]


def test_an_empty_folder_has_an_empty_table(tmp_path):
    check(tmp_path / "missing")
    check(tmp_path)
