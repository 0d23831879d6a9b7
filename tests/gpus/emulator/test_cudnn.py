"""What cuDNN and the solvers take beside tensors, on the emulated card as on the H200 whose sizes are committed."""

import json
import re
import subprocess
import sys

import pandas as pd
import pytest

from workbench.base.paths import DATA
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import build
from workbench.gpus.emulator.launch import emulate

EVERY = 9  # of the measured cases one in so many is tried, or it would take two minutes

PROGRAM = """
import gc, json, sys
import torch, torch.nn as nn

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def batch_norm(case):
    shape = case["shape"]
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    model = norm(shape[1]).cuda().to(TYPES[case.get("weights", "fp32")])
    x = torch.randn(*shape, device="cuda", dtype=TYPES[case["dtype"]])
    if case["channels_last"] and len(shape) in LAST:
        x = x.contiguous(memory_format=LAST[len(shape)])
    return model, x.requires_grad_()


def recurrent(case):
    hidden, inputs = case["hidden"], case.get("inputs", case["hidden"])
    options = {"num_layers": case.get("layers", 1), "bias": case.get("bias", True)}
    options |= {"bidirectional": case.get("bidirectional", False), "batch_first": case.get("batch_first", False)}
    options["dropout"] = case.get("dropout", 0)
    if "projection" in case:
        options["proj_size"] = case["projection"]
    model = getattr(nn, case["cell"])(inputs, hidden, **options).cuda().to(TYPES[case["dtype"]])
    batch, length = case.get("batch", 16), case.get("length", 32)
    shape = (batch, length, inputs) if options["batch_first"] else (length, batch, inputs)
    return model, torch.randn(*shape, device="cuda", dtype=TYPES[case["dtype"]], requires_grad=True)


def requested(which):
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


torch.cuda.init()
peaks = []
for group, case in json.load(open(sys.argv[1])):
    gc.collect()
    torch.cuda.empty_cache()
    before = requested("current") if torch.cuda.memory_stats() else 0
    model, x = {"batch_norm": batch_norm, "recurrent": recurrent}[group](case)
    model.train(case.get("train", True))
    torch.cuda.reset_peak_memory_stats()
    with torch.set_grad_enabled(model.training):
        y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    peak = {"forward": requested("peak") - before}
    if model.training:
        gradient = torch.ones_like(y)
        torch.cuda.reset_peak_memory_stats()
        y.backward(gradient)
        peak["backward"] = requested("peak") - before
        del gradient
    peaks.append(peak)
    del model, x, y
print(json.dumps(peaks))
"""


def measured():
    """Group, settings and requested peak by phase of the first step, of each case that the program can make."""
    table = pd.read_csv(DATA / "reference" / "h200" / "cudnn.csv", dtype=str)
    table[["group", "settings", "step"]] = table[["group", "settings", "step"]].ffill()
    table = table[table.group.isin(["batch_norm", "recurrent"]) & (table.step == "1")]
    cases = []
    for (group, settings), rows in table.groupby(["group", "settings"], sort=False):
        case = json.loads(settings)
        if not {"packed", "autocast_dtype"} & case.keys():
            cases.append((group, case, dict(zip(rows.phase, rows.requested_peak_bytes.astype(int), strict=True))))
    return cases


def follows_from_its_shape(group, case):
    """Whether the workspace is known too; of other cases the emulated peak is a lower bound."""
    if group == "batch_norm":
        return not case["channels_last"] or case["shape"][1] not in (3, 17)
    special = {"inputs", "bidirectional", "dropout", "projection"} & case.keys() or not case.get("train", True)
    large = case["hidden"] >= (512 if case["cell"] == "RNN" else 256)
    one_layer = case.get("layers", 1) == 1
    no_rule = case["dtype"] == "fp16" and case["cell"] != "GRU" and one_layer and case["hidden"] >= 256
    return not special and not no_rule and (case["dtype"] == "bf16" or large or one_layer)


@pytest.mark.dear
def test_batch_norm_and_recurrent_networks_take_what_they_took_on_an_h200(emulator, tmp_path, capfd, subtests):
    cases = measured()[::EVERY]
    (tmp_path / "cases.json").write_text(json.dumps([(group, case) for group, case, _ in cases]))
    (tmp_path / "program.py").write_text(PROGRAM)
    found = emulate([sys.executable, str(tmp_path / "program.py"), str(tmp_path / "cases.json")], gpu("h200"))
    assert found.exit_status == 0
    peaks = json.loads(capfd.readouterr().out)
    dropout_stays = 132 * 48 * 1024  # random states, which PyTorch keeps for the next network
    for (group, case, expected), peak in zip(cases, peaks, strict=True):
        with subtests.test(group=group, **case):
            for phase, size in peak.items():
                if follows_from_its_shape(group, case):
                    assert size == expected[phase]
                elif group == "recurrent":
                    assert 0.3 * expected[phase] < size + dropout_stays
                    assert size <= expected[phase]
    assert sum(follows_from_its_shape(group, case) for group, case, _ in cases) > 0.7 * len(cases)


@pytest.mark.dear
def test_solvers_and_transforms_answer_and_the_report_is_a_lower_bound(program):
    source = (
        "import torch\n"
        "x = torch.randn(64, 64, device='cuda')\n"
        "print(torch.linalg.qr(x).R.shape, torch.linalg.eigh(x).eigenvalues.shape, torch.fft.rfft(x).shape)\n"
    )
    found, out = program(source, gpu("t4"))
    assert (found.exit_status, out.out) == (
        0,
        "torch.Size([64, 64]) torch.Size([64]) torch.Size([64, 33])\n",
    )
    assert found.not_measured == ["scratch of cuFFT", "scratch of cuSOLVER"]


# what looks like an answer and is none: errors, copies of data, opaque descriptions that only kernels read
HARMLESS = re.compile(
    "cuda(GetLastError|StreamQuery)|cublasGet(Matrix|Vector)Async|cusparseCreateIdentityPermutation"
    "|cusparseLt.*Init|cufftSetAutoAllocation|nvshmem_malloc"
)


def test_no_stub_says_success_where_its_caller_waits_for_an_answer(emulator, nm, subtests):
    """By their names, of the functions that the installed PyTorch imports. A new release may bring more of them: they
    belong into `outputs.toml`, or are to be written by hand."""
    answering = re.compile("Get|Create|Find|Query|[sS]ize|Open|Alloc|Init|Begin|Estimate|malloc|get_")
    for library in emulator.glob("lib*.so*[!cp]"):
        generated = library.with_name(f"{library.name}.c")
        if not generated.exists():
            continue
        silent = set(re.findall(r"^STUB\((\w+)\)", generated.read_text(), re.MULTILINE))
        listing = subprocess.run([nm, "-D", library], capture_output=True, text=True, check=True).stdout
        weak = {line.split()[-1].partition("@")[0] for line in listing.splitlines() if " W " in line}
        with subtests.test(library=library.name):
            assert {name for name in silent & weak if answering.search(name) and not HARMLESS.match(name)} == set()


def test_what_writes_is_named_once():
    assert not build.CREATES.keys() & build.WRITES
    assert not build.SIZES.keys() & build.WRITES
    assert not build.SIZES.keys() & build.CREATES.keys()
