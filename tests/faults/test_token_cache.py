"""The tokens of long texts on disk: what damages them, what is left of killed processes, and a full disk."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from datasets.arrow_writer import ArrowWriter

from workbench.base import paths
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.models.gpt2 import gpt2_tokenizer
from workbench.techniques import data_loading
from workbench.texts import corpus
from workbench.training.run import run

WORDS = "some words of a long text. " * 200


@pytest.fixture(autouse=True)
def long_text(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "IN_MEMORY_CHARACTERS", 1000)
    path = tmp_path / "long.txt"
    path.write_text(WORDS)
    return path


def rows(path):
    return corpus.make_blocks(corpus.load_corpus(str(path)), gpt2_tokenizer(), 32, 4).train["input_ids"][:]


@pytest.fixture
def cache(long_text, runs_folder):
    """The rows as they should be, and the file that has them."""
    expected = rows(long_text)
    (path,) = (runs_folder / "tokens").iterdir()
    return expected, path


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)


def link_to(target):
    return lambda path: (path.unlink(), path.symlink_to(target))


def folder(path):
    path.unlink()
    path.mkdir()
    (path / "file").write_text("x")


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a bit at the start": lambda path: flip(path, 9),
    "a bit in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "a bit at the end": lambda path: flip(path, -1),
    "a text": lambda path: path.write_text("some text"),
    "gone": lambda path: path.unlink(),
    "a folder": folder,
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a dangling link": link_to("nowhere"),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "a link to a folder": lambda path: link_to(path.parent.parent)(path),
    "a device": link_to("/dev/null"),
}


def test_what_is_damaged_is_made_again(cache, long_text, subtests):
    expected, path = cache
    for name, damage in DAMAGE.items():
        with subtests.test(name):
            damage(path)
            assert rows(long_text) == expected
            assert [file.name for file in path.parent.iterdir()] == [path.name]
            assert path.is_file()
            assert not path.is_symlink()


def test_what_cannot_be_read_is_made_again(cache, long_text, monkeypatch):
    expected, path = cache
    flip(path, 500)
    # the tests may run as root, for whom no file is closed
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.R_OK)
    assert rows(long_text) == expected
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:24] in path.name


def test_a_whole_file_is_checked_once(cache, long_text, monkeypatch):
    rows(long_text)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert rows(long_text) == cache[0]


def test_parts_of_killed_processes_go_and_those_of_others_stay(cache, long_text):
    _, path = cache
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = paths.platform.node()
    gone = [f"x@{here}.{dead.pid}-part", f"abc.{dead.pid}-part", f"{dead.pid}-part.parquet"]
    stay = [f"x@{here}.{os.getpid()}-part", f"x@other.machine.{dead.pid}-part", "my-part", "no.x1-part"]
    for name in gone + stay:
        (path.parent / name).write_bytes(b"x")
    rows(long_text)
    assert {file.name for file in path.parent.iterdir()} == {path.name, *stay}


BUILD = """
import sys, time
from workbench.models.gpt2 import gpt2_tokenizer
from workbench.texts import corpus
corpus.IN_MEMORY_CHARACTERS = 1000
write = corpus._write_blocks
def slowly(blocks, path):
    write(blocks, path)
    print("written", flush=True)
    sys.stdin.readline()
corpus._write_blocks = slowly
print(len(corpus.make_blocks(corpus.load_corpus(sys.argv[1]), gpt2_tokenizer(), 32, 4).train))
"""


@pytest.mark.dear
def test_two_processes_may_make_the_same_file_and_one_may_be_killed(long_text, runs_folder):
    command = [sys.executable, "-c", BUILD, str(long_text)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    killed, other = (subprocess.Popen(command, **pipes) for _ in range(2))
    assert [process.stdout.readline() for process in (killed, other)] == ["written\n"] * 2  # at the same time
    killed.kill()
    killed.communicate()
    expected = rows(long_text)  # a third one, which is faster
    assert other.communicate("\n")[0] == f"{len(expected)}\n"
    assert other.returncode == 0
    assert len(list((runs_folder / "tokens").iterdir())) == 1
    assert rows(long_text) == expected


# ---- a text that changes ----


def rewrite(path, text):
    """As another program would that keeps the times."""
    times = path.stat()
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_text_of_the_same_size_and_time_is_read_again(long_text):
    before = corpus.load_corpus(str(long_text)).sha256
    time.sleep(0.02)  # the clock of a file system may tick every 10 ms
    rewrite(long_text, WORDS.replace("long", "tiny"))
    assert corpus.load_corpus(str(long_text)).sha256 != before
    other = long_text.with_name("other.txt")
    rewrite(shutil.copy2(long_text, other), WORDS)
    other.replace(long_text)
    assert corpus.load_corpus(str(long_text)).sha256 == before


def test_a_saved_data_set_that_changes_inside_is_read_again(tmp_path):
    from datasets import Dataset

    for words, name in ((WORDS, "one"), (WORDS.replace("long", "tiny"), "two")):
        Dataset.from_dict({"text": [words]}).save_to_disk(tmp_path / name)
    before = corpus.load_corpus(str(tmp_path / "one")).sha256
    data = "data-00000-of-00001.arrow"
    shutil.copyfile(tmp_path / "two" / data, tmp_path / "one" / data)
    assert corpus.load_corpus(str(tmp_path / "one")).sha256 != before


def test_a_text_that_changes_between_the_survey_and_the_tokens_is_refused(long_text, runs_folder):
    text = corpus.load_corpus(str(long_text))
    long_text.write_text(WORDS.replace("long", "tiny"))
    with pytest.raises(ConfigurationError, match="was changed while it was read. Start again"):
        corpus.make_blocks(text, gpt2_tokenizer(), 32, 4)
    assert not list((runs_folder / "tokens").iterdir())


def test_a_text_that_changes_while_its_tokens_are_written_is_refused(long_text, runs_folder, monkeypatch):
    write = ArrowWriter.write_examples_on_file

    def write_and_change(self):
        write(self)
        long_text.write_text("no " * 9000)

    monkeypatch.setattr(ArrowWriter, "write_examples_on_file", write_and_change)
    with pytest.raises(ConfigurationError, match="was changed while it was read. Start again"):
        rows(long_text)
    assert not list((runs_folder / "tokens").iterdir())


# ---- a disk that is full ----


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_named_and_nothing_is_left(long_text, runs_folder, monkeypatch, subtests):
    place = rf"corpus: the tokens of .*long.txt cannot be written to {runs_folder / 'tokens'}: "
    for error, reason in (
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "the disk is full. Free some space, or name another place"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "the disk is full. Free some space, or name another place"),
        (OSError("Write failed"), ".*Free some space, or name another place"),
    ):
        with subtests.test(error=error), monkeypatch.context() as patch:
            patch.setattr(ArrowWriter, "write_examples_on_file", Mock(side_effect=error))
            with pytest.raises(UnavailableError, match=place + reason):
                rows(long_text)
            assert not list((runs_folder / "tokens").iterdir())


def test_a_run_on_a_full_disk_ends_before_the_model_loads(
    recipe, long_text, earlier, no_model, runs_folder, monkeypatch
):
    monkeypatch.setattr(ArrowWriter, "write_examples_on_file", full)
    with pytest.raises(UnavailableError, match="cannot be written to .*Free some space, or name another place"):
        run(replace(recipe, corpus=str(long_text)), device="cpu")
    assert not list((runs_folder / "tokens").iterdir())
    assert (runs_folder / f"{earlier.id}.json").exists()


def test_a_disk_that_is_full_at_the_very_end(long_text, runs_folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UnavailableError, match="the disk is full"):
        rows(long_text)
    assert not list((runs_folder / "tokens").iterdir())


def test_a_device_without_room(long_text, runs_folder, monkeypatch):
    def on_a_full_device(self, *, path):
        os.symlink("/dev/full", path)
        begin(self, path=path)

    begin = ArrowWriter.__init__
    monkeypatch.setattr(ArrowWriter, "__init__", on_a_full_device)
    with pytest.raises(UnavailableError, match="the disk is full. Free some space, or name another place"):
        rows(long_text)
    assert not list((runs_folder / "tokens").iterdir())


def test_a_file_where_the_folder_should_be(long_text, runs_folder):
    runs_folder.write_text("a file")
    with pytest.raises(UnavailableError, match="cannot be written to .*tokens: .*name another place"):
        rows(long_text)


def test_mapped_blocks_leave_nothing_on_a_full_disk(tmp_path, monkeypatch):
    from datasets import Dataset

    monkeypatch.setattr(data_loading.tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(Dataset, "save_to_disk", lambda self, path: ((Path(path) / "half").write_bytes(b"x"), full()))
    with pytest.raises(OSError, match="No space left"):
        data_loading.map_from_disk(Dataset.from_dict({"a": [1]}))
    assert not list((tmp_path / "scratch").iterdir())


MAPPED = """
import signal, sys
from datasets import Dataset
from workbench import __main__ as front
from workbench.techniques.data_loading import map_from_disk
def run_recipe(args):
    mapped = map_from_disk(Dataset.from_dict({"a": [1]}))
    print("mapped", file=sys.__stdout__, flush=True)
    signal.pause()
front.COMMAND_FUNCTIONS["run"] = run_recipe
sys.exit(front.main(["run", "gpt2-tiny"]))
"""


def test_mapped_blocks_go_when_the_program_is_told_to_end(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", MAPPED], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "TMPDIR": str(tmp_path)})  # fmt: skip
    assert process.stdout.readline() == "mapped\n"
    assert list(tmp_path.glob("blocks-*"))
    process.terminate()
    process.communicate()
    assert process.returncode == 130
    assert not list(tmp_path.glob("blocks-*"))


def test_a_second_user_of_the_folder_makes_a_cache_of_his_own(cache, long_text, runs_folder, monkeypatch):
    expected, path = cache
    usual = os.access
    monkeypatch.setattr(os, "access", lambda place, mode: place != path.parent and usual(place, mode))
    assert rows(long_text) == expected
    assert [other.name for other in runs_folder.glob("tokens-*/*")] == [path.name]


def test_what_another_user_left_unfinished_does_not_end_a_run(cache, long_text, runs_folder, monkeypatch):
    expected, path = cache
    (path.parent / "abc@.999999-part").touch()
    path.unlink()
    usual = Path.unlink

    def refused(self, missing_ok=False):
        if "999999" in self.name:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        usual(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert rows(long_text) == expected
