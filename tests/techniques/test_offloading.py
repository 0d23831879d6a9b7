"""What both kinds of offloading promise: the places where tensors wait, their account, and the refusals."""

import gc
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.base.device import Device
from workbench.base.errors import UnavailableError
from workbench.base.offloaded import DISK, Account
from workbench.journal.record import Status, read_all
from workbench.techniques import ActivationOffloading, OptimizerOffloading
from workbench.techniques.offloading import AccountedPlace, DiskFile, Nowhere
from workbench.training.run import run

LINUX = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into Linux's /proc")
ON_DISK = [
    ActivationOffloading(to="disk", minimum_bytes=4096),
    OptimizerOffloading(to="disk", chunk_elements=2**14),
]
both = pytest.mark.parametrize("technique", ON_DISK, ids=lambda technique: technique.name)


def nameless_files():
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [name for name in found if name.startswith(tempfile.gettempdir()) and name.endswith("(deleted)")]


@pytest.fixture(autouse=True)
def _no_older_file_is_closed_in_the_middle_of_a_test():
    gc.collect()


def let_go(technique):
    """Saved tensors go with the graph. An optimizer goes with its Trainer, which is a cycle."""
    if isinstance(technique, OptimizerOffloading):
        gc.collect()


def test_a_file_gives_back_what_was_stored_in_each_of_its_rooms(subtests):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        with subtests.test(dtype=dtype):
            place = DiskFile()
            tensors = [torch.randint(0, 2, (size,)).to(dtype) for size in (7, 300)]
            rooms = [place.allocate(tensor) for tensor in tensors]
            for room, tensor in zip(rooms, tensors, strict=True):
                place.store(room, 0, tensor)
            tensors[1][100:150] = 1 - tensors[1][100:150].to(torch.int64)
            place.store(rooms[1], 100, tensors[1][100:150])  # a chunk in the middle
            for room, tensor in zip(rooms, tensors, strict=True):
                buffer = torch.empty_like(tensor)
                place.load(room, 0, buffer)
                assert torch.equal(buffer, tensor)
            part = torch.empty(50, dtype=dtype)
            place.load(rooms[1], 120, part)
            assert torch.equal(part, tensors[1][120:170])


def test_a_file_that_was_cut_short_is_not_read_as_numbers():
    place = DiskFile()
    room = place.allocate(torch.ones(10))
    place.store(room, 0, torch.ones(9))
    with pytest.raises(OSError, match="cut short"):
        place.load(room, 0, torch.empty(10))


@LINUX
def test_a_file_is_closed_when_its_last_user_is_gone():
    before = nameless_files()
    place = DiskFile()
    assert len(nameless_files()) == len(before) + 1
    del place
    assert nameless_files() == before


def test_nowhere_leaves_the_buffer_as_it_is():
    place, buffer = Nowhere(), torch.arange(3)
    room = place.allocate(buffer)
    place.store(room, 0, torch.zeros(3, dtype=torch.int64))
    place.load(room, 0, buffer)
    assert buffer.tolist() == [0, 1, 2]


def test_the_account_says_what_is_held_what_moved_and_forgets_what_nobody_has():
    account = Account()
    place = AccountedPlace(DiskFile, account, "a technique", "tensors")
    one, other = place.allocate(torch.empty(10)), place.allocate(torch.empty(5))
    assert account == Account(held_bytes=60, peak_bytes=60, moved_bytes=0)  # room alone: nothing has moved yet
    place.store(one, 2, torch.ones(4))
    place.load(one, 2, torch.empty(4))
    assert account.moved_bytes == 32
    del one
    assert (account.held_bytes, account.peak_bytes) == (20, 60)
    account.reset()
    assert account == Account(held_bytes=20, peak_bytes=20, moved_bytes=0)
    del other
    assert account.held_bytes == 0


@LINUX
@both
def test_nothing_is_left_on_the_disk(recipe, technique, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run(replace(recipe, steps=2) | technique, device="cpu")
    let_go(technique)
    assert [path for path in tmp_path.iterdir() if path.name != "runs"] == []
    assert nameless_files() == []
    assert DISK.held_bytes == 0


@LINUX
@both
def test_nothing_is_left_after_a_failure_in_the_middle_of_a_forward_pass(recipe, technique, monkeypatch):
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    plain, calls, before = GPT2MLP.forward, [], set(nameless_files())

    def fails(self, x):
        calls.append(set(nameless_files()) - before)
        if len(calls) > 1 and torch.is_grad_enabled():
            raise RuntimeError("broken")
        return plain(self, x)

    monkeypatch.setattr(GPT2MLP, "forward", fails)
    with pytest.raises(RuntimeError, match="broken"):
        run(recipe | technique, device="cpu")
    assert len(calls[-1]) == 1
    let_go(technique)
    assert set(nameless_files()) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@both
def test_a_full_disk_is_named_with_the_cure(recipe, technique, monkeypatch, runs_folder):
    real = tempfile.TemporaryFile

    def full(*_, **at):  # the folder of records, which is tried before, has room
        return real(**at) if "dir" in at else open("/dev/full", "r+b", buffering=0)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    words = rf"{technique.name}: .*of {technique.what} and cannot take .* more \(No space left on device\)\. .*TMPDIR"
    with pytest.raises(UnavailableError, match=words):
        run(recipe | technique, device="cpu")
    (record,) = read_all(runs_folder)
    assert record.status is Status.FAILED
    assert "No space left" in record.error


def test_where_host_memory_is_the_devices_own_it_is_refused(subtests):
    for kind in (ActivationOffloading, OptimizerOffloading):
        assert kind().missing(Device("cuda")) is None
        for device_type in ("cpu", "mps"):
            with subtests.test(kind.name, device_type=device_type):
                refusal = kind().missing(Device(device_type))
                assert refusal.startswith(
                    f"{kind.name}=to:cpu needs a CUDA device, and this run is on the {device_type}"
                )
                assert "nothing would move. Use to:disk" in refusal


def test_the_refusal_is_on_record(recipe, runs_folder):
    for kind in (ActivationOffloading, OptimizerOffloading):
        with pytest.raises(UnavailableError, match="nothing would move"):
            run(recipe | kind(), device="cpu")
    assert [record.status for record in read_all(runs_folder)] == [Status.UNAVAILABLE] * 2


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="needs a folder in memory, as Linux has one")
def test_a_folder_that_is_itself_in_memory_is_refused(monkeypatch, subtests):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    for technique in ON_DISK:
        for device_type in ("cpu", "cuda"):
            with subtests.test(technique.name, device_type=device_type):
                refusal = technique.missing(Device(device_type))
                assert refusal.startswith(f"{technique.name}=to:disk: /dev/shm is itself held in memory")
