"""The folder of records under many writers, under kills, and on a disk that is full."""

import json
import multiprocessing
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.journal import store
from workbench.journal.record import Record, Status, read_all
from workbench.models import load
from workbench.recipe import Recipe
from workbench.training.run import run

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["workbench.training.run"])


def write_many(folder, count):
    for seed in range(count):
        record = store.begin(Record.start(Recipe(seed=seed)), folder)
        store.end(replace(record, status=Status.OK, held_out_loss=float(seed)), folder)


def start_writers(folder, processes, count):
    writers = [CONTEXT.Process(target=write_many, args=(folder, count)) for _ in range(processes)]
    for writer in writers:
        writer.start()
    return writers


def assert_all_there(folder, processes, count):
    for writer in start_writers(folder, processes, count):
        writer.join()
    found = read_all(folder)
    assert len(found) == processes * count
    assert {record.status for record in found} == {Status.OK}
    assert sorted(record.held_out_loss for record in found) == sorted(list(map(float, range(count))) * processes)
    return len(found)


@pytest.mark.dear
def test_several_processes_write_at_once_and_nothing_is_lost(tmp_path):
    assert_all_there(tmp_path, processes=4, count=20)


@pytest.mark.long
def test_eight_processes_write_two_hundred_records_each(tmp_path):
    start = time.monotonic()
    found = assert_all_there(tmp_path, processes=8, count=200)
    print(f"\n8 processes × 200 records: {found} there, {time.monotonic() - start:.0f} s")


@pytest.mark.dear
@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.long)])
def test_after_kills_every_record_can_be_read(tmp_path, rounds, capsys):
    for attempt in range(rounds):
        before = len(list(tmp_path.glob("*.json")))
        writers = start_writers(tmp_path, processes=2, count=10_000)
        while len(list(tmp_path.glob("*.json"))) < before + 5 + attempt % 7:
            time.sleep(0.001)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
    store.mark_killed(tmp_path)
    found = read_all(tmp_path)
    assert "warning" not in capsys.readouterr().err
    assert len(found) == len(list(tmp_path.glob("*.json"))) > rounds
    assert {record.status for record in found} <= {Status.OK, Status.KILLED}
    print(f"\n{2 * rounds} writers killed: all of {len(found)} records can be read")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB, where this machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount a tmpfs: {error}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, leave: int) -> None:
    """Write zeros until so many bytes are left."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    (folder / "ballast").write_bytes(bytes(max(free - leave, 0)))


@pytest.fixture(scope="module")
def quick(recipe):
    return replace(recipe, steps=4)


def test_a_full_disk_is_refused_before_the_model_loads(quick, small_disk, monkeypatch):
    kept = run(quick, device="cpu", folder=small_disk)
    fill(small_disk, leave=0)
    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(Exception, match=r"nothing can be written into .* \(No space left on device\). Free some space"):
        run(replace(quick, seed=1), device="cpu", folder=small_disk)
    assert read_all(small_disk) == [kept]


def test_a_disk_too_small_for_a_checkpoint_costs_the_checkpoint(quick, small_disk):
    fill(small_disk, leave=200_000)
    record = run(quick, device="cpu", folder=small_disk, checkpoint_every=2)
    assert record.status is Status.OK
    assert len(record.warnings) == 1
    assert record.warnings[0].startswith(f"no checkpoint-2: nothing can be written into {small_disk}")
    assert "Free some space, or set WORKBENCH_RUNS to another folder." in record.warnings[0]
    assert read_all(small_disk) == [record]


def test_a_disk_too_small_for_the_model_keeps_the_measurements(quick, small_disk):
    fill(small_disk, leave=200_000)
    record = run(quick, device="cpu", folder=small_disk, save="merged")
    assert record.status is Status.OK
    assert record.model_path == ""
    assert record.warnings[0].startswith(f"the model was not saved: nothing can be written into {small_disk}")
    assert not any(path.is_dir() for path in small_disk.iterdir())
    assert read_all(small_disk) == [record]


def test_a_disk_that_fills_up_during_the_run_gets_the_record_printed(quick, small_disk, monkeypatch, capsys):
    kept = run(quick, device="cpu", folder=small_disk)
    whole_end = store.end

    def full_end(record, folder):
        fill(small_disk, leave=0)
        return whole_end(record, folder)

    monkeypatch.setattr(store, "end", full_end)
    record = run(replace(quick, seed=1), device="cpu", folder=small_disk)
    assert record.status is Status.OK
    assert record.warnings[0].startswith("the record was printed instead of written: nothing can be written into ")
    printed = capsys.readouterr().err
    assert json.loads(printed[printed.index("{") :])["held_out_loss"] == record.held_out_loss
    (small_disk / "ballast").unlink()
    store.mark_killed(small_disk)
    assert [r.status for r in read_all(small_disk)] == [Status.OK, Status.KILLED]
    assert read_all(small_disk)[0] == kept
