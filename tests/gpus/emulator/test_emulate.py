"""Programs on the emulated GPU: true sizes, the card's own refusals, reports, exit statuses."""

import json
import os
import pickle
import sys

import pytest

from workbench.__main__ import main
from workbench.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS, gpu
from workbench.gpus.emulator.card import emulated_card, with_memory
from workbench.gpus.emulator.launch import TIMED_OUT, started_by
from workbench.gpus.emulator.report import NOT_MEASURED, emulation_json, emulation_text, fits

MIB = 2**20


def test_the_books_are_pytorchs_own(program):
    """One block of 100 MiB, one of 5 in the segment of 20 that small large requests share: the allocator's rules."""
    found, out = program(
        "import torch\n"
        "one = torch.empty(100 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "two = torch.empty(5 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.get_device_name())\n"
        "raise SystemExit(7)\n",
        gpu("t4"),
    )
    assert found.exit_status == 7
    assert out.out == f"{105 * MIB} {120 * MIB} NVIDIA T4 (emulated)\n"
    ((device,),) = [process["devices"] for process in found.processes]
    assert (device["peak_allocated_bytes"], device["peak_reserved_bytes"]) == (105 * MIB, 120 * MIB)
    assert [(entry["line"].rpartition(":")[2], entry["bytes"]) for entry in device["lines"]] == [
        ("2 in <module>", 100 * MIB),
        ("3 in <module>", 5 * MIB),
    ]


@pytest.mark.parametrize("name", ["t4", "rtx3090", "h100", "b200"])
def test_the_card_answers_as_the_catalogue_says(name, program):
    row = gpu(name)
    source = (
        "import torch\np = torch.cuda.get_device_properties(0)\n"
        "print(p.total_memory, p.major, p.minor, p.multi_processor_count, p.max_threads_per_multi_processor,\n"
        "      p.shared_memory_per_block_optin, torch.cuda.is_bf16_supported(including_emulation=False))"
    )
    _, out = program(source, row)
    of = row.multiprocessor
    expected = (row.memory_bytes, *row.compute_capability, row.multiprocessors, of.threads, of.shared_bytes_of_a_block)
    assert out.out.split() == [*map(str, expected), str(row.native_bf16)]


def test_out_of_memory_comes_in_pytorchs_own_words(program):
    found, out = program("import torch\ntorch.empty(9 * 2**30, dtype=torch.uint8, device='cuda')", gpu("rtx3070"))
    assert found.exit_status == 1
    assert (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of"
        in out.err
    )
    assert fits(found) == {}
    assert "ran out of memory" in emulation_text(found)


def test_less_memory_than_the_card_has(program):
    source = "import torch\ntorch.empty(2 * 2**30, dtype=torch.uint8, device='cuda')"
    assert program(source, with_memory(gpu("h100"), 3 * 2**30))[0].exit_status == 0
    assert program(source, with_memory(gpu("h100"), 2 * 2**30))[0].exit_status == 1
    with pytest.raises(ConfigurationError, match="memory: CUDA's context alone takes about 750 MiB"):
        with_memory(gpu("h100"), 2**29)


def test_yes_and_no(program):
    """All of a mask is set, a loss is finite; nothing is infinite, equal to a number or any other thing."""
    source = (
        "import torch\nx = torch.ones(64, device='cuda')\n"
        "finite = torch.isfinite\n"
        "print(bool((x > 0).all()), torch.equal(x, x + 1), bool(finite(x.sum())), bool(finite(x).all()),\n"
        "      bool(torch.isnan(x.sum())), bool((x < 0).any()), x.sum().item(), x.cpu().sum().item())\n"
        "one = torch.zeros(1, 1, dtype=torch.int64, device='cuda')\n"
        "print(bool((one[:, -1] == 0).all()), bool((one == 0)), bool(torch.isnan(x[:1]).any()))\n"
        "mask = torch.ones(2, 8, dtype=torch.int64, device='cuda')\n"
        "print(bool(mask.sum() == 16), bool(mask.bool().sum() == 16))  # as transformers asks for padding\n"
    )
    words = program(source, gpu("t4"))[1].out
    assert words == "True True True True False False 0.0 0.0\nTrue False False\nTrue True\n"
    assert program(source, gpu("t4"), padding=True)[1].out.startswith("False False True False False False")


def test_expandable_segments_pinned_memory_streams_and_events(program):
    source = (
        "import torch\ntorch.cuda.memory._set_allocator_settings('expandable_segments:True')\n"
        "x = torch.empty(30 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "pinned = torch.arange(10).pin_memory()\nside = torch.cuda.Stream()\n"
        "with torch.cuda.stream(side):\n    y = pinned.to('cuda', non_blocking=True)\n    event = side.record_event()\n"
        "event.synchronize()\ntorch.cuda.synchronize()\nprint(pinned.is_pinned(), pinned.sum().item(), y.shape)\n"
        "print(torch.cuda.memory_reserved(), torch.cuda.memory_snapshot()[-1]['is_expandable'])"
    )
    found, out = program(source, gpu("h100"))
    assert found.exit_status == 0, out.err
    assert out.out.splitlines() == [f"True 45 {[10]}".replace("[10]", "torch.Size([10])"), f"{42 * MIB} True"]


@pytest.mark.parametrize(
    ("line", "function"),
    [
        ("torch.linalg.qr(torch.zeros(300, 300, device='cuda'))", "cusolverDnXgeqrf_bufferSize"),
        ("torch.fft.fft(torch.zeros(300, device='cuda'))", "cufftXtMakePlanMany"),
        ("torch.cuda.graph(torch.cuda.CUDAGraph()).__enter__()", "cudaStreamBeginCapture (CUDA graphs)"),
    ],
)
def test_what_is_not_emulated_is_refused_by_name(line, function, program):
    found, out = program(f"import torch\ntorch.zeros(1, device='cuda')\n{line}", gpu("h100"))
    assert found.exit_status == 1
    assert f"emulated GPU: {function} is not emulated" in out.err
    assert "Traceback" in out.err


def test_a_crash_names_the_last_function_and_where_to_report_it(program):
    source = "import ctypes, torch\nctypes.string_at(torch.zeros(4, device='cuda').data_ptr())"
    found, out = program(source, gpu("h100"))
    assert found.exit_status == 139
    assert "emulated GPU: the program crashed (signal 11)" in out.err
    assert "Please report it" in out.err


def test_a_program_that_waits_for_ever_is_ended_and_says_where(program):
    source = "import torch\nx = torch.ones(8, device='cuda')\ndef wait():\n    while not x.sum() == 8: pass\nwait()"
    found, _ = program(source, gpu("h100"), timeout_s=20)  # enough for a busy machine to import torch
    assert found.exit_status == TIMED_OUT
    assert "line 4 in wait" in found.stuck_at
    assert found.processes[0]["devices"][0]["peak_reserved_bytes"] == 2 * MIB
    assert "perhaps waiting for a value that is never computed" in emulation_text(found)


def test_a_program_that_is_killed_leaves_no_report_and_that_is_said(program):
    found, _ = program("import os, torch\ntorch.ones(8, device='cuda')\nos.kill(os.getpid(), 9)", gpu("t4"))
    assert (found.exit_status, found.processes, found.silent) == (137, (), 1)
    assert "1 processes that used the GPU were killed" in emulation_text(found)


def test_peaks_outlive_the_programs_own_resets(program):
    source = (
        "import torch\nfor _ in range(2):\n    torch.empty(50 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "    torch.cuda.empty_cache()\n    torch.cuda.reset_peak_memory_stats()\n"
    )
    found, _ = program(source, gpu("t4"), history=False)
    assert found.peak_reserved_bytes == 50 * MIB


def test_a_program_that_leaves_its_folder_and_removes_it_is_reported_all_the_same(program):
    source = (
        "import os, tempfile, torch\nwith tempfile.TemporaryDirectory() as folder:\n    os.chdir(folder)\n"
        "    kept = torch.empty(50 * 2**20, dtype=torch.uint8, device='cuda')\n"
    )
    found, _ = program(source, gpu("t4"))
    assert found.processes[0]["devices"][0]["lines"][0]["bytes"] == 50 * MIB
    assert not found.silent


def test_the_snapshot_is_pytorchs(program, tmp_path):
    path = tmp_path / "kept" / "step.pickle"
    found, _ = program("import torch\nx = torch.ones(8, device='cuda')", gpu("t4"), snapshot=path)
    assert found.snapshots == (path,)
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot["segments"][0]["total_size"] == 2 * MIB
    assert [event["action"] for event in snapshot["device_traces"][0]][:2] == ["segment_alloc", "alloc"]


RANKS = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4, 1024, device="cuda")).sum().backward()
optimizer.step()
assert sum(p.to_local().numel() for p in model.parameters()) == 8 * (1024 * 1024 + 1024) // dist.get_world_size()
dist.destroy_process_group()
"""


def test_ranks_shard_as_they_do_on_several_cards(program):
    found, out = program(RANKS, gpu("a100-80gb"), ranks=2)
    assert found.exit_status == 0, out.err[-2000:]
    assert [process["rank"] for process in found.processes] == [0, 1]
    assert [process["devices"][0]["index"] for process in found.processes] == [0, 1]
    assert "rank 1, device 1" in emulation_text(found)


def test_what_it_says_of_itself(program):
    found, _ = program("import torch\nx = torch.ones(8, device='cuda')", gpu("t4"))
    facts = emulation_json(found)
    assert facts["memory_source"] == "emulated:t4"
    assert facts["measured_on_a_gpu"] is False
    assert set(facts["fits"]) == set(GPUS)
    assert all(facts["fits"].values())
    assert json.loads(json.dumps(facts)) == facts
    assert NOT_MEASURED in emulation_text(found)


def test_this_process_sees_nothing_of_it(program):
    before = dict(os.environ)
    program("import torch\ntorch.ones(8, device='cuda')", gpu("t4"))
    assert dict(os.environ) == before
    import torch

    assert not torch.cuda.is_available() or "emulated" not in torch.cuda.get_device_name()


# ---- how it is started ----


def test_python_is_this_python_and_ranks_are_torchruns():
    assert started_by(["python", "train.py", "--lr", "1"], 1) == [sys.executable, "train.py", "--lr", "1"]
    assert started_by(["/opt/venv/bin/python", "-c", "1"], 1) == ["/opt/venv/bin/python", "-c", "1"]
    assert started_by(["accelerate", "launch", "train.py"], 4) == ["accelerate", "launch", "train.py"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert started_by(["python3", "-m", "train"], 2) == [*torchrun, "-m", "train"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "t5", "--", "python"], "gpu: there is no 't5'. Known: t4, "),
        (["--gpu", "t4"], "emulate: name a program after --"),
        (["--memory", "lots", "--", "python"], "memory"),
    ],
)
def test_a_command_that_cannot_be_used(arguments, message, capsys):
    assert main(["emulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_ranks_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["emulate", "--gpu", "t4", "--ranks", "0", "--", "python"])
    assert "argument --ranks: '0' is not a number of at least 1." in capsys.readouterr().err


def test_a_program_that_is_not_there(stubs, capsys):
    assert main(["emulate", "--", "/no/such/program"]) == 2
    assert "emulate: '/no/such/program' cannot be started: No such file" in capsys.readouterr().err
    assert main(["emulate", "--", "train.py"]) == 2
    assert "A Python program needs python in front of it." in capsys.readouterr().err


def test_json_stands_alone_on_standard_output(stubs, tmp_path, capfd):
    path = tmp_path / "program.py"
    path.write_text("import torch\nprint('hello')\ntorch.ones(8, device='cuda')")
    assert main(["emulate", "--gpu", "t4", "--json", "--", "python", str(path)]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["peak_reserved_bytes"] == 2 * MIB
    assert "hello" in err
    assert "emulated GPU: NVIDIA T4, 14.6 GiB. PyTorch's own allocator keeps the books" in err


def test_names_of_devices():
    assert emulated_card("emulated:RTX 4090") == gpu("rtx4090")
    assert emulated_card("cuda") is None
    with pytest.raises(ConfigurationError, match="device: emulated: needs the name of a GPU"):
        emulated_card("emulated:")
