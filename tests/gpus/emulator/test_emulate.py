"""Programs on the emulated GPU: true sizes, the card's own refusals, reports, exit statuses."""

import json
import os
import pickle
import signal
import sys
from dataclasses import replace

import pytest
import torch

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import host
from workbench.gpus.emulator.call import PROCESSES, call_on
from workbench.gpus.emulator.card import find_emulated_gpu, variable, with_memory
from workbench.gpus.emulator.launch import INSIDE, complete_command, emulate, environment
from workbench.gpus.emulator.padding import VARIABLE as PADDING
from workbench.gpus.emulator.place import python_path
from workbench.gpus.emulator.report import TIMED_OUT

MIB = 2**20


@pytest.mark.dear
def test_the_books_are_pytorchs_own_and_this_process_sees_nothing_of_it(program):
    """One block of 100 MiB, one of 5 in the segment of 20 that small large requests share: the allocator's rules."""
    before = dict(os.environ)
    found, out = program(
        "import torch\n"
        "one = torch.empty(100 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "two = torch.empty(5 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.get_device_name())\n"
        "raise SystemExit(7)\n",
        gpu("t4"),
    )
    assert found.exit_status == 7
    assert out.out == f"{105 * MIB} {120 * MIB} Tesla T4\n"
    ((device,),) = [process["devices"] for process in found.processes]
    assert (device["peak_allocated_bytes"], device["peak_reserved_bytes"]) == (105 * MIB, 120 * MIB)
    assert [(entry["line"].rpartition(":")[2], entry["bytes"]) for entry in device["lines"]] == [
        ("2 in <module>", 100 * MIB),
        ("3 in <module>", 5 * MIB),
    ]
    assert dict(os.environ) == before
    assert not torch.cuda.is_available() or "emulated" not in torch.cuda.get_device_name()


def properties():
    """What PyTorch says of the card of its process."""
    card = torch.cuda.get_device_properties(0)
    sizes = card.total_memory, card.max_threads_per_multi_processor, card.shared_memory_per_block_optin
    sizes = *sizes, card.L2_cache_size
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return (card.major, card.minor), card.multi_processor_count, *sizes, bf16


@pytest.mark.dear
@pytest.mark.xdist_group("emulated")
def test_the_card_answers_as_the_catalogue_says(emulator, subtests):
    for name in ("t4", "rtx3090", "h100", "b200"):
        with subtests.test(gpu=name):
            row = gpu(name)
            of = row.multiprocessor
            sizes = row.memory_bytes, of.threads, of.shared_bytes_of_a_block, row.l2_bytes
            expected = row.compute_capability, row.multiprocessors, *sizes, row.device.computes_bf16
            assert call_on(row, properties, modules=("torch",)) == expected
    PROCESSES.end()


@pytest.mark.dear
def test_out_of_memory_comes_in_pytorchs_own_words(program):
    found, out = program("import torch\ntorch.empty(9 * 2**30, dtype=torch.uint8, device='cuda')", gpu("rtx3070"))
    assert found.exit_status == 1
    assert (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of"
        in out.err
    )
    assert found.fits == {}
    assert "ran out of memory" in str(found)


@pytest.mark.dear
def test_less_memory_than_the_card_has(program):
    source = (
        "import torch\nfirst = torch.empty(2 * 2**30, dtype=torch.uint8, device='cuda')\nprint('there')\n"
        "second = torch.empty(2**30, dtype=torch.uint8, device='cuda')\nprint('there too')\n"
    )
    found, out = program(source, with_memory(gpu("h100"), 3 * 2**30))
    assert (found.exit_status, out.out) == (1, "there\n")
    assert "Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 3.00 GiB" in out.err


def test_a_card_has_at_least_its_context():
    assert with_memory(gpu("h100"), 2**30) == replace(gpu("h100"), memory_bytes=2**30)
    with pytest.raises(ConfigurationError, match="memory: CUDA's context alone takes about 750 MiB"):
        with_memory(gpu("h100"), 2**29)


@pytest.mark.dear
def test_yes_and_no(program):
    """All of a mask is set, a loss is finite; nothing is infinite, equal to a number or any other thing. A number that
    the host sent and no kernel can have changed is known."""
    source = (
        "import torch\nx = torch.ones(64, device='cuda')\n"
        "finite = torch.isfinite\n"
        "print(bool((x > 0).all()), torch.equal(x, x + 1), bool(finite(x.sum())), bool(finite(x).all()),\n"
        "      bool(torch.isnan(x.sum())), bool((x < 0).any()), x.sum().item(), x.cpu().sum().item())\n"
        "one = torch.zeros(1, 1, dtype=torch.int64, device='cuda')\n"
        "print(bool((one[:, -1] == 0).all()), bool((one == 0)), bool(torch.isnan(x[:1]).any()))\n"
        "mask = torch.ones(2, 8, dtype=torch.int64, device='cuda')\n"
        "print(bool(mask.sum() == 16), bool(mask.bool().sum() == 16))  # as transformers asks for padding\n"
        "counts = torch.tensor([3.0, 4.0], device='cuda')\n"
        "filled = torch.zeros(2, device='cuda')\n"
        "print(counts.tolist(), filled.tolist(), (counts + 1).tolist(), counts.tolist())\n"
        "1 / x.sum().item()\n"
    )
    words = program(source, gpu("t4"))[1]
    answers = "True True True True False False 0.0 0.0\nTrue False False\nTrue True\n"
    assert words.out == answers + "[3.0, 4.0] [0.0, 0.0] [0.0, 0.0] [0.0, 0.0]\n"
    assert "emulated GPU: values of the card are not computed, and each reads 0" in words.err
    assert program(source, gpu("t4"), padding=True)[1].out.startswith("False False True False False False")


@pytest.mark.dear
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
    assert out.out.splitlines() == ["True 45 torch.Size([10])", f"{42 * MIB} True"]


@pytest.mark.dear
def test_a_graph_is_captured_into_a_pool_of_its_own_and_replays_take_nothing(program):
    """Two streams take part; whoever waits for the card in the middle of a capture fails, as on a card."""
    source = (
        "import torch\n"
        "model = torch.nn.Linear(1024, 1024).cuda()\n"
        "x = torch.randn(4096, 1024, device='cuda')\n"
        "side = torch.cuda.Stream()\n"
        "with torch.cuda.stream(side):\n    model(x).sum().backward()\n"
        "torch.cuda.current_stream().wait_stream(side)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    y = model(x)\n"
        "    side.wait_stream(torch.cuda.current_stream())\n"
        "    with torch.cuda.stream(side):\n        z = y * 2\n"
        "    torch.cuda.current_stream().wait_stream(side)\n"
        "    y.sum().backward()\n"
        "pools = {segment['segment_pool_id'] for segment in torch.cuda.memory_snapshot()\n"
        "         if segment['address'] <= z.data_ptr() < segment['address'] + segment['total_size']}\n"
        "before = torch.cuda.memory_reserved()\n"
        "for _ in range(3): graph.replay()\n"
        "print(pools == {graph.pool()}, torch.cuda.memory_reserved() - before)\n"
        "try:\n"
        "    with torch.cuda.graph(torch.cuda.CUDAGraph()):\n        x.sum().item()\n"
        "except RuntimeError as error:\n    print('not permitted when stream is capturing' in str(error))\n"
        "print(torch.normal(torch.zeros(3, 1, device='cuda'), torch.ones(4, device='cuda')).shape)\n"
    )
    found, out = program(source, gpu("h100"))
    assert (found.exit_status, out.out) == (0, "True 0\nTrue\ntorch.Size([3, 4])\n"), out.err[-2000:]
    assert "is not emulated" not in out.err


@pytest.mark.dear
def test_a_crash_names_the_last_function_and_where_to_report_it(program):
    source = "import ctypes, torch\nctypes.string_at(torch.zeros(4, device='cuda').data_ptr())"
    found, out = program(source, gpu("h100"))
    assert found.exit_status == 139
    assert "emulated GPU: the program crashed (signal 11)" in out.err
    assert "Please report it" in out.err


@pytest.fixture
def background_job():
    """Programs that are started inherit what a shell's job in the background has: interrupts are ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.dear
@pytest.mark.usefixtures("background_job")
def test_a_program_that_waits_for_ever_is_ended_and_says_where(program):
    source = (
        "import time, torch\nx = torch.ones(8, device='cuda')\ndef wait():\n"
        "    while not x.sum() == 8: time.sleep(0.01)\nwait()"
    )
    found, _ = program(source, gpu("h100"), timeout_s=20)  # enough for a busy machine to import torch
    assert found.exit_status == TIMED_OUT
    assert "line 4 in wait" in found.stuck_at
    assert found.processes[0]["devices"][0]["peak_reserved_bytes"] == 2 * MIB
    assert "perhaps waiting for a value that is never computed" in str(found)


@pytest.mark.dear
def test_a_program_that_is_killed_has_reported_by_then_and_its_figures_are_lower_bounds(program):
    source = (
        "import os, time, torch\nx = torch.empty(50 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "time.sleep(3)\nos.kill(os.getpid(), 9)"
    )
    found, _ = program(source, gpu("t4"))
    assert (found.exit_status, found.processes_without_report, found.peak_reserved_bytes) == (137, 0, 50 * MIB)
    assert found.devices[0]["lines"][0]["bytes"] == 50 * MIB
    assert "needs at least 50.0 MiB" in str(found)
    assert str(found).endswith("a lower bound: what a killed process would have taken later is not known")


def test_a_program_that_fills_the_hosts_own_memory_is_ended_before_it_is_full(program, monkeypatch):
    """The machine's figures are made up: one with 0.5 GiB, of which 10 MiB are left."""
    monkeypatch.setattr(host, "memory", lambda: (512 * MIB, 10 * MIB))
    found, _ = program("import time\nweights = b'1' * (256 * 2**20)\ntime.sleep(60)", gpu("t4"), timeout_s=50)
    assert found.exit_status == 137
    assert "this machine's own memory was nearly full (10.0 MiB of 512 MiB left): the program's" in str(found)
    assert "Build the model on the card" in str(found)


def test_a_machine_that_others_fill_ends_nothing(monkeypatch):
    total, available = host.memory()
    assert 0 < available < total
    monkeypatch.setattr(host, "memory", lambda: (2**50, 2**40))
    assert host.bytes_held_by(os.getpid()) > MIB
    assert host.why_too_full([os.getpid()]) == ""


@pytest.mark.dear
def test_a_worker_of_torch_compile_takes_nothing_of_the_card_and_is_not_missed(program):
    worker = "import os, torch; torch.cuda.init(); os.kill(os.getpid(), 9)"
    source = (
        "import subprocess, sys\n"
        f"print(subprocess.run([sys.executable, '-c', {worker!r}, 'torch/_inductor/compile_worker']).returncode)\n"
    )
    found, out = program(source, gpu("t4"))
    assert out.out == "-9\n", out.err
    assert (found.processes_without_report, found.lower_bound) == (0, [])


@pytest.mark.dear
def test_what_grows_from_step_to_step_is_named_with_its_line_and_its_holder(program):
    source = (
        "import importlib.util; importlib.util.find_spec('torch'); import torch  # transformers asks first, too\n"
        "model = torch.nn.Linear(1024, 1024).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "class History: pass\nhistory = History()\nhistory.losses = []\ntotal = 0\n"
        "for step in range(12):\n"
        "    loss = model(torch.ones(1024, 1024, device='cuda')).square().mean()\n"
        "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
        "    total = total + loss\n"
        "    history.losses.append(torch.empty(2**21, dtype=torch.uint8, device='cuda'))\n"
    )
    found, _ = program(source, gpu("t4"))
    device = found.devices[0]
    assert device["growth"]["lines"][0]["line"].endswith("program.py:14 in <module>")
    assert device["growth"]["lines"][0]["bytes_a_step"] == 2 * MIB
    assert device["holders"] == [
        "the list `history.losses`",
        "the sum `total`, which keeps the graph of each loss",
    ]
    assert "grows by 2.0 MiB a step, as seen over 9 steps" in str(found)
    assert "held by the list `history.losses`" in str(found)


@pytest.mark.dear
def test_peaks_outlive_the_programs_own_resets(program):
    source = (
        "import torch\nfor _ in range(2):\n    torch.empty(50 * 2**20, dtype=torch.uint8, device='cuda')\n"
        "    torch.cuda.empty_cache()\n    torch.cuda.reset_peak_memory_stats()\n"
    )
    found, _ = program(source, gpu("t4"), history=False)
    assert found.peak_reserved_bytes == 50 * MIB


@pytest.mark.dear
def test_a_program_that_leaves_its_folder_and_removes_it_is_reported_all_the_same(program):
    source = (
        "import os, tempfile, torch\nwith tempfile.TemporaryDirectory() as folder:\n    os.chdir(folder)\n"
        "    kept = torch.empty(50 * 2**20, dtype=torch.uint8, device='cuda')\n"
    )
    found, _ = program(source, gpu("t4"))
    assert found.processes[0]["devices"][0]["lines"][0]["bytes"] == 50 * MIB
    assert not found.processes_without_report


@pytest.mark.dear
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


@pytest.mark.dear
def test_ranks_shard_as_they_do_on_several_cards(program):
    found, out = program(RANKS, gpu("a100-80gb"), ranks=2)
    assert found.exit_status == 0, out.err[-2000:]
    assert [process["rank"] for process in found.processes] == [0, 1]
    assert [process["devices"][0]["index"] for process in found.processes] == [0, 1]
    assert "rank 1, device 1" in str(found)


BUSY_CARD = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device("cuda:0"))
one = torch.zeros(50 * 2**20, dtype=torch.uint8, device="cuda")
two = torch.zeros_like(one)
dist.reduce_scatter(two, [one], async_op=True).get_future().wait()  # the futures are waited for, the works are not
time.sleep(0.5)  # NCCL's watchdog looks every tenth of a second
held = torch.cuda.memory_allocated()
dist.all_reduce(two)
print((held - torch.cuda.memory_allocated()) // 2**20)
torch.cuda.synchronize()
time.sleep(0.5)
dist.all_reduce(two)
print((held - torch.cuda.memory_allocated()) // 2**20)

event = torch.cuda.Event()
print(event.query())
event.record()
print(event.query())
torch.cuda.synchronize()
print(event.query())
event.record()
while not event.query():
    pass
dist.destroy_process_group()
"""


@pytest.mark.dear
def test_an_event_is_over_when_the_host_has_waited_for_the_card(program):
    """NCCL keeps the flat copy of a list until then and the next collective: nanochat's peak on eight cards."""
    found, out = program(BUSY_CARD, gpu("h100"))
    assert found.exit_status == 0, out.err
    assert out.out.split() == ["0", "50", "True", "False", "True"]


@pytest.mark.dear
def test_two_cards_in_one_process(program):
    source = (
        "import torch\n"
        "model = torch.nn.DataParallel(torch.nn.Linear(1024, 1024).cuda())\n"
        "model(torch.randn(64, 1024, device='cuda')).sum().backward()\n"
        "print(model.module.weight.grad.shape)\n"
    )
    found, out = program(source, gpu("t4"), gpus=2)
    assert (found.exit_status, out.out) == (0, "torch.Size([1024, 1024])\n"), out.err[-2000:]
    (process,) = found.processes
    assert [device["peak_reserved_bytes"] > 0 for device in process["devices"]] == [True, True]


@pytest.mark.dear
def test_a_text_ends_at_its_greatest_length_and_weights_drawn_on_the_host_take_none_of_it(program):
    source = (
        "import torch\n"
        "large = torch.nn.Linear(32768, 32768)\n"
        "print(large.weight[5, 7].item(), torch.nn.Linear(8, 8).weight.abs().max().item() > 0)\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_embd=32, n_layer=1, n_head=2, eos_token_id=3)).cuda()\n"
        "begun = torch.ones(2, 8, dtype=torch.long, device='cuda')\n"
        "print(model.generate(begun, max_new_tokens=5, pad_token_id=0).shape)\n"
        "model.generate(begun, max_new_tokens=5, pad_token_id=0, num_beams=2)  # ends too\n"
    )
    found, out = program(source, gpu("t4"), timeout_s=100)
    assert found.exit_status == 0, out.err[-2000:]
    assert out.out == "0.0 True\ntorch.Size([2, 13])\n"
    assert found.processes[0]["peak_host_bytes"] < 3 * 2**30


# ---- how it is started, and what is collected of programs that use no GPU ----


def test_a_child_is_told_its_cards_and_sees_no_real_one(emulator, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PYTHONPATH", "mine")
    variables = environment(gpu("t4"), 2)
    assert "CUDA_VISIBLE_DEVICES" not in variables
    assert (variables["EMULATED_CARD"], variables["EMULATED_STUBS"]) == ("t4", str(emulator))
    assert variables["EMULATED_GPU"] == variable(gpu("t4"), 2)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(INSIDE), *python_path(), "mine"]
    assert variables["PATH"] == os.environ["PATH"]
    told_of_padding = environment(gpu("t4"), padding=True)
    assert {name for name in variables if variables[name] != told_of_padding[name]} == {PADDING, "EMULATED_GPU"}


@pytest.mark.usefixtures("emulator")
def test_exit_statuses_are_those_of_a_shell(subtests):
    for command, status in (("exit 7", 7), ("kill -9 $$", 137), ("exit 0", 0)):
        with subtests.test(command=command):
            emulation = emulate(["sh", "-c", command], gpu("t4"))
            assert (emulation.exit_status, emulation.processes, emulation.processes_without_report) == (status, (), 0)
            assert emulation.command == ("sh", "-c", command)
    late = emulate(["sh", "-c", "exec sleep 60"], gpu("t4"), timeout_s=0.1)
    assert (late.exit_status, late.stuck_at) == (TIMED_OUT, "")


@pytest.mark.usefixtures("emulator")
def test_the_reports_of_all_processes_are_collected_in_the_order_of_their_ranks(tmp_path):
    program = """
cd "$EMULATED_REPORTS"
echo '{"rank": 1, "process": 5, "devices": [{"index": 1, "peak_reserved_bytes": 7}]}' > 5.json
echo '{"rank": 0, "process": 6, "devices": [{"index": 0, "peak_reserved_bytes": 9}]}' > 6.json
echo '{"rank": 0, "process": 4, "devices": []}' > 4.json
touch using-4 using-5 using-6 using-7 5.pickle
"""
    path = tmp_path / "kept" / "step.pickle"
    emulation = emulate(["sh", "-c", program], gpu("t4"), snapshot=path)
    assert [report["process"] for report in emulation.processes] == [6, 5]  # one has used no GPU
    assert [device["index"] for device in emulation.devices] == [0, 1]
    assert emulation.peak_reserved_bytes == 9
    assert emulation.processes_without_report == 1
    assert emulation.snapshots == (path,)
    assert path.exists()
    both = emulate(["sh", "-c", f"{program} touch 6.pickle"], gpu("t4"), snapshot=path)
    assert [kept.name for kept in both.snapshots] == ["step-5.pickle", "step-6.pickle"]


def test_python_is_this_python_and_ranks_are_torchruns(monkeypatch):
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    assert complete_command(["python", "train.py", "--lr", "1"], 1) == [sys.executable, "train.py", "--lr", "1"]
    assert complete_command(["/opt/venv/bin/python", "-c", "1"], 1) == ["/opt/venv/bin/python", "-c", "1"]
    assert complete_command(["accelerate", "launch", "train.py"], 4) == ["accelerate", "launch", "train.py"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert complete_command(["python3", "-m", "train"], 2) == [*torchrun, "-m", "train"]


UNUSABLE = (
    (["--gpu", "t5", "--", "python"], "gpu: there is no 't5'. Known: t4, "),
    (["--gpu", "t4"], "emulate: name a program after --"),
    (["--memory", "lots", "--", "python"], "memory"),
)


def test_a_command_that_cannot_be_used(subtests, capsys):
    for arguments, message in UNUSABLE:
        with subtests.test(arguments=arguments):
            assert main(["emulate", *arguments]) == 2
            assert message in capsys.readouterr().err


def test_no_ranks_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["emulate", "--gpu", "t4", "--ranks", "0", "--", "python"])
    assert "argument --ranks: '0' is not a number of at least 1." in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="emulate: ranks must be at least 1, got 0"):
        complete_command(["python"], 0)


def test_a_program_that_is_not_there(emulator, capsys):
    assert main(["emulate", "--", "/no/such/program"]) == 2
    assert "emulate: '/no/such/program' cannot be started: No such file" in capsys.readouterr().err
    assert main(["emulate", "--", "train.py"]) == 2
    assert "A Python program needs python in front of it." in capsys.readouterr().err


@pytest.mark.dear
def test_json_stands_alone_on_standard_output(emulator, tmp_path, capfd):
    path = tmp_path / "program.py"
    path.write_text("import torch\nprint('hello')\ntorch.ones(8, device='cuda')")
    assert main(["emulate", "--gpu", "t4", "--json", "--", "python", str(path)]) == 0
    out, err = capfd.readouterr()
    facts = json.loads(out)
    assert (facts["peak_reserved_bytes"], facts["memory_source"]) == (2 * MIB, "emulated:t4")
    assert facts["fits"]["rtx4060"]
    assert {name for name, fits in facts["fits"].items() if not fits} == set(facts["without_kernels"])
    assert "hello" in err
    assert "emulated GPU: NVIDIA T4, 14.6 GiB. PyTorch's own allocator keeps the books" in err


def test_names_of_devices():
    assert find_emulated_gpu("emulated:RTX 4090") == gpu("rtx4090")
    assert find_emulated_gpu("cuda") is None
    with pytest.raises(ConfigurationError, match="device: emulated: needs the name of a GPU"):
        find_emulated_gpu("emulated:")


@pytest.mark.dear
def test_a_program_that_catches_a_refusal_and_goes_on_with_less_needs_what_it_took_from_then_on(program):
    """As `auto_find_batch_size` does: half the batch after each out of memory."""
    source = (
        "import gc, torch\n"
        "size = 9 * 2**30\n"
        "while True:\n"
        "    try:\n"
        "        both = [torch.empty(size, dtype=torch.uint8, device='cuda') for _ in range(2)]\n"
        "        break\n"
        "    except torch.OutOfMemoryError:\n"
        "        size //= 2\n"
        "    gc.collect()\n"
        "    torch.cuda.empty_cache()\n"
        "print(size)\n"
    )
    found, out = program(source, gpu("rtx3080"))  # 10 GB
    assert (found.exit_status, out.out) == (0, f"{9 * 2**29}\n")
    assert (found.refusals, found.has_recovered, found.reserved_at_once_bytes) == (1, True, 9 * 2**30)
    assert "refused once, recovered" in str(found)
    assert "needs 9.0 GiB and about" in str(found)
    assert found.fits["rtx4060ti-16gb"]
    assert not found.fits["rtx4060"]


@pytest.mark.dear
def test_a_cap_of_the_programs_own_is_named_and_an_absurd_request_is_a_fault_of_ours(program):
    capped = (
        "import torch\n"
        "torch.cuda.set_per_process_memory_fraction(0.25)\n"
        "torch.empty(8 * 2**30, dtype=torch.uint8, device='cuda')\n"
    )
    found, _ = program(capped, gpu("t4"))
    assert found.exit_status == 1
    assert "it needs more than its own cap of 3.6 GiB, which set_per_process_memory_fraction has set" in str(found)
    _, out = program("import torch\ntorch.empty(2**47, dtype=torch.uint8, device='cuda')", gpu("t4"))
    assert "emulated GPU: a request for 131072 GiB is most likely a size that an emulated function" in out.err


@pytest.mark.dear
def test_a_size_that_follows_from_values_is_taken_by_a_rule_and_named_with_its_line(program):
    source = (
        "import torch\n"
        "hidden = torch.randn(8192, 32, device='cuda', requires_grad=True)\n"
        "labels = torch.zeros(8192, dtype=torch.long, device='cuda')\n"
        "for _ in range(2):\n"
        "    rows = hidden[labels != -100]\n"
        "    (rows @ torch.randn(32, 1000, device='cuda')).sum().backward()\n"
        "values, counts = torch.unique(labels, return_counts=True)\n"
        "repeated = torch.repeat_interleave(hidden.detach(), labels, dim=0)\n"
        "print(len(rows), len(values), len(counts), len(torch.bincount(labels, minlength=10)), len(repeated),\n"
        "      sum((labels == 0).tolist()))\n"
    )
    whole, out = program(source, gpu("t4"))
    assert out.out == "8192 8192 8192 10 8192 8192\n"
    assert whole.devices[0]["peak_allocated_bytes"] > 8192 * 1000 * 4
    line = whole.sizes_by_values[0]["line"]
    assert line.endswith("program.py:5 in <module>")
    noted = [(note["operation"], note["taken"], note["of"]) for note in whole.sizes_by_values]
    assert set(noted) == {
        ("nonzero", 8192, 8192),
        ("unique", 8192, 8192),
        ("bincount", 10, None),
        ("repeat_interleave", 8192, None),
        ("mask read by the host", 8192, 8192),
    }
    assert f"8,192 of 8,192  nonzero, {line}" in str(whole)
    quarter, out = program(source, gpu("t4"), masks=0.25)
    assert out.out == "2048 2048 2048 10 2048 2048\n"
    assert quarter.devices[0]["peak_allocated_bytes"] < whole.devices[0]["peak_allocated_bytes"]
    none, out = program(source, gpu("t4"), masks=0.0)
    assert out.out == "0 0 0 10 0 0\n"
    assert {note["taken"] for note in none.sizes_by_values} == {0, 10}


def test_a_share_of_ones_lies_between_none_and_all():
    with pytest.raises(ConfigurationError, match=r"masks must be a share from 0 \(none\) to 1 \(all\), got 1.5"):
        emulate(["python", "train.py"], gpu("t4"), masks=1.5)
