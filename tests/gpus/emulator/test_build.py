"""The stubs themselves: what is read of PyTorch's libraries, what is generated, what the C does."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.base.errors import UnavailableError
from workbench.base.paths import DATA
from workbench.gpus.catalogue import GPUS, gpu, recognize_gpu
from workbench.gpus.emulator import build, card, place
from workbench.gpus.emulator.elf import read_imports
from workbench.gpus.emulator.interpreter import Python, this_python

# ---- reading libraries ----


def test_what_a_library_imports(compiler, tmp_path):
    source, library = tmp_path / "one.c", tmp_path / "libone.so"
    source.write_text("double nowhere(double), cos(double);\ndouble one(double x) { return cos(x) + nowhere(x); }")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library, "-lm"], check=True)
    found = read_imports(library)
    assert "libm.so.6" in found.libraries
    assert ("nowhere", "", "") in found.symbols
    assert any(name == "cos" and owner == "libm.so.6" for name, owner, _ in found.symbols)
    assert "one" not in {name for name, _, _ in found.symbols}


# ---- what is written by hand ----


def test_the_sources_compile_without_a_warning(compiler, subtests, tmp_path):
    strict = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fno-builtin"]
    for major in (12, 13):
        for path in sorted(build.SOURCES.glob("*.c")):
            with subtests.test(path=path.name, major=major):
                command = [compiler, *strict, f"-DCUDA_MAJOR={major}", "-c", path, "-o", tmp_path / "out.o"]
                subprocess.run(command, check=True)


def test_the_declared_types_are_laid_out_as_nvidias(compiler, subtests, tmp_path):
    """Sizes and offsets as NVIDIA's headers 12.8 and 13.0 give them to the same compiler."""
    for major, size, multiprocessors, opt_in in ((12, 1032, 388, 696), (13, 1008, 384, 672)):
        expected = {
            "sizeof(struct cudaDeviceProp)": size,
            "sizeof(struct cudaFuncAttributes)": 144,
            "offsetof(struct cudaDeviceProp, totalGlobalMem)": 288,
            "offsetof(struct cudaDeviceProp, multiProcessorCount)": multiprocessors,
            "offsetof(struct cudaDeviceProp, sharedMemPerBlockOptin)": opt_in,
            "offsetof(struct cudaFuncAttributes, maxDynamicSharedSizeBytes)": 44,
        }
        source = tmp_path / "layout.c"
        asserts = [f'_Static_assert({what} == {value}, "{what}");' for what, value in expected.items()]
        source.write_text("\n".join(['#include "cuda.h"', *asserts]))
        command = [compiler, "-std=gnu11", f"-DCUDA_MAJOR={major}", f"-I{build.SOURCES}", "-c", source]
        with subtests.test(major=major):
            done = subprocess.run([*command, "-o", tmp_path / "layout.o"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


def test_functions_that_owe_an_answer_give_one_or_are_refused_and_the_others_say_nothing():
    text = build._write_functions(
        [
            "cusolverDnSgeqrf_bufferSize",
            "cudnnCreateTensorDescriptor",
            "cublasSgemm_v2",
            "cuMemExportX",
            "cuLinkComplete",
            "cudnnGetRNNParamsSize",
        ]
    )
    refused = {"cuMemExportX", "cuLinkComplete", "cudnnGetRNNParamsSize"}
    assert set(re.findall(r"^REFUSED\((\w+)\)$", text, re.MULTILINE)) == refused
    assert "\nSTUB(cublasSgemm_v2)\n" in text
    assert "\nCREATES(cudnnCreateTensorDescriptor, 0)\n" in text
    assert '\nSIZES(cusolverDnSgeqrf_bufferSize, "scratch of cuSOLVER", SIZE(int, 5))\n' in text


# ---- what is missing on a machine ----


def test_without_a_compiler_there_is_a_cure(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"emulator: no C compiler .* pip install ziglang"):
        build.find_compiler()


def test_the_compiler_of_the_ziglang_package_is_taken(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "find_spec", lambda name: object())
    assert build.find_compiler() == [sys.executable, "-m", "ziglang", "cc"]
    monkeypatch.setenv("CC", "my cc")
    assert build.find_compiler() == ["my", "cc"]


def test_a_compiler_that_fails_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "false")
    monkeypatch.setattr(build, "find_wanted_libraries", lambda files: [build.Library("libcudart.so.13")])
    (asker := tmp_path / build.ASKER).write_bytes(b"libcudart.so.13")
    with pytest.raises(UnavailableError, match=r"emulator: false could not build a stub library \(libemulator.so\)"):
        build.build_stubs([asker], tmp_path)
    assert not list(tmp_path.glob("stubs-*"))


def test_another_cuda_is_refused(subtests, tmp_path):
    asker = tmp_path / build.ASKER
    for name in ("libcudart.so.11", "libcudart.so.14"):
        asker.write_bytes(b"\0cudaFree\0" + name.encode() + b"\0")
        refused = pytest.raises(
            UnavailableError, match=rf"emulator: this PyTorch wants {name}, and only CUDA 12 and 13"
        )
        with subtests.test(name=name), refused:
            build.cuda_major([asker])


def test_another_machine_is_refused(subtests, monkeypatch):
    for system, machine in (("darwin", "arm64"), ("win32", "AMD64"), ("linux", "aarch64")):
        monkeypatch.setattr(place.sys, "platform", system)
        monkeypatch.setattr(place.platform, "machine", lambda name=machine: name)
        refused = pytest.raises(UnavailableError, match=r"emulated GPU needs Linux on x86-64.*`predict` works here")
        with subtests.test(system=system, machine=machine), refused:
            place.torch_folder()


def python_with(folder, torch="2.13.0", executable=sys.executable):
    """An interpreter whose PyTorch, a CPU's, lies in this folder."""
    prefix = str(Path(executable).parent.parent)
    return Python(executable, "3.11", prefix, torch, str(folder / "torch") if torch else "", "")


def test_a_pytorch_without_cuda_says_how_to_set_it_up(monkeypatch, tmp_path):
    monkeypatch.setattr(place, "cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(UnavailableError, match=r"the PyTorch 2.13.0 of .* has no CUDA inside.*make emulator"):
        place.torch_folder(python_with(tmp_path))
    other = python_with(tmp_path, "2.6.0", "/other/bin/python")
    with pytest.raises(UnavailableError, match=r"of /other/bin/python has no.*emulate --set-up --python /other/bin/"):
        place.torch_folder(other)
    with pytest.raises(UnavailableError, match=r"/other/bin/python has no PyTorch\. Install it there, or name"):
        place.set_up(python_with(tmp_path, "", "/other/bin/python"))


def test_a_card_without_kernels_in_this_pytorch_is_refused_with_the_builds_that_have_them(monkeypatch, tmp_path):
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / place.CUDA_LIBRARY).write_text("")
    flags = b"other sm_1\0sm_75 sm_80 sm_86 sm_90\0"
    (tmp_path / "torch" / "lib" / "libtorch_python.so").write_bytes(flags)
    python = python_with(tmp_path)
    assert place.architectures(tmp_path / "torch") == ((7, 5), (8, 0), (8, 6), (9, 0))
    for name in ("t4", "rtx4090", "l40", "h200"):
        place.refuse_without_kernels(gpu(name), python)
    with pytest.raises(UnavailableError, match=r"V100 16 GB has 7\.0.*CUDA 12\.6 have them"):
        place.refuse_without_kernels(gpu("v100-16gb"), python)
    with pytest.raises(UnavailableError, match=r"GB10 has 12\.1.*CUDA 12\.8 and newer.*from PyTorch 2\.7 on"):
        place.refuse_without_kernels(gpu("gb10"), python)
    assert {"p100", "v100-32gb", "rtx5090", "b200"} <= set(place.without_kernels(python))
    silent = tmp_path / "silent"
    (silent / "torch" / "lib").mkdir(parents=True)
    (silent / "torch" / place.CUDA_LIBRARY).write_text("")
    assert place.without_kernels(python_with(silent)) == ()


def test_the_pytorch_of_another_python_is_used_where_it_lies_and_nothing_is_put_in_front_of_it(monkeypatch, tmp_path):
    monkeypatch.setattr(place, "cache_folder", lambda: tmp_path / "cache")
    other = python_with(tmp_path, "2.6.0", "/other/bin/python")
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / place.CUDA_LIBRARY).write_text("")
    assert place.torch_folder(other) == tmp_path / "torch"
    assert place.python_path(other) == []


def fake_pip(monkeypatch, tmp_path, fetches):
    """`place` with a CPU's PyTorch and a pip that fetches what it is told to."""

    def run(command, check):
        target = Path(command[command.index("--target") + 1])
        assert command[-1] == "torch===2.13.0"
        if fetches is None:
            return subprocess.CompletedProcess(command, 1)
        (target / "torch" / "lib").mkdir(parents=True)
        if fetches:
            (target / "torch" / place.CUDA_LIBRARY).write_text("")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(place, "this_python", lambda: python_with(tmp_path))
    monkeypatch.setattr(place, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(place.subprocess, "run", run)
    monkeypatch.setattr(place, "stub_folder", lambda python: tmp_path / "stubs")


@pytest.mark.parametrize(
    ("fetches", "message"),
    [(None, r"pip could not fetch torch 2.13.0 \(exit code 1"), (False, "gave a torch 2.13.0 without CUDA")],
)
def test_a_download_that_fails_leaves_nothing(fetches, message, monkeypatch, tmp_path):
    fake_pip(monkeypatch, tmp_path, fetches)
    with pytest.raises(UnavailableError, match=message):
        place.set_up()
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]


def test_a_download_is_put_in_its_place_whole(monkeypatch, tmp_path):
    fake_pip(monkeypatch, tmp_path, True)
    assert place.set_up() == tmp_path / "stubs"
    assert (place.torch_folder() / place.CUDA_LIBRARY).exists()
    assert place.python_path() == [str(place.torch_folder().parent)]


# ---- built ----


def test_every_import_of_pytorch_is_there(emulator):
    files = place._libraries(place.torch_folder(), this_python())
    for library in build.find_wanted_libraries(files):
        assert set(library.symbols) == _defined_in(emulator / library.name, library.symbols), library.name
    assert (emulator / "libcuda.so").resolve() == (emulator / "libcuda.so.1").resolve()  # of this name for older Triton


def _defined_in(path, names):
    """Which of the names a library has, asked of the dynamic linker in another process."""
    asked = f"""
import ctypes, json, sys
library = ctypes.CDLL({str(path)!r}, mode=ctypes.RTLD_GLOBAL)
print(json.dumps([name for name in json.load(sys.stdin) if hasattr(library, name)]))
"""
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, input=json.dumps(sorted(names)), capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_a_second_call_builds_nothing(emulator, monkeypatch):
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    assert build.build_stubs(place._libraries(place.torch_folder(), this_python()), place.cache_folder()) == emulator


MEMORY = """
import ctypes, os
os.environ["EMULATED_GPU"] = "memory=104857600 context=20971520 count=2 name=A card"  # 80 MiB to have
gpu = ctypes.CDLL({path!r})
gpu.device_left.restype = ctypes.c_size_t
gpu.device_of.argtypes = [ctypes.c_void_p]
gpu.device_free.argtypes = [ctypes.c_void_p]
gpu.device_allocate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
MIB = 2**20
def take(mib, device=0):
    address = ctypes.c_void_p()
    status = gpu.device_allocate(ctypes.byref(address), int(mib * MIB), device)
    return status, address.value or 0
"""


def test_device_memory_is_whole_pages_in_chunks_with_an_end(emulator):
    source = (
        MEMORY.format(path=str(emulator / build.OURS))
        + """
(_, first), (_, second), (_, third) = take(1), take(3), take(20)
assert gpu.device_left(0) == (80 - 2 - 4 - 20) * MIB, gpu.device_left(0)
assert second - first == 2 * MIB and third - second == 4 * MIB
assert gpu.device_of(second) == 0 and gpu.device_of(second + 4 * MIB - 1) == 0
assert gpu.device_of(id(take)) == -1
assert take(55)[0] == 2                                              # out of memory
status, fourth = take(54)
assert status == 0 and first - fourth == 64 * MIB                    # just room: in a chunk of its own, below
assert take(0.1)[0] == 2                                             # none left
assert gpu.device_left(1) == 80 * MIB and take(80, 1)[0] == 0        # another card has its own
assert gpu.device_free(second) == 0 and gpu.device_left(0) == 4 * MIB
assert take(4) == (0, fourth + 54 * MIB)                             # the newest chunk has room for it
assert gpu.device_free(first + 1) == 1                               # no allocation begins there
print("done")
"""
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr


def test_a_card_stays_while_the_environment_is_emptied(emulator):
    """As accelerate's `clear_environment` does, while NCCL's watchdog asks from another thread."""
    source = (
        MEMORY.format(path=str(emulator / build.OURS))
        + """
gpu.card_name.restype = ctypes.c_char_p
assert (gpu.device_left(0), gpu.card_name()) == (80 * MIB, b"A card")
before = dict(os.environ)
os.environ.clear()
assert (gpu.card(b"count"), gpu.device_left(0), gpu.card_name()) == (2, 80 * MIB, b"A card")
os.environ.update(before, EMULATED_GPU="memory=41943040 count=1 name=Another")
assert (gpu.card(b"count"), gpu.device_left(0), gpu.card_name()) == (1, 40 * MIB, b"Another")
os.environ["EMULATED_GPU"] = ""
assert gpu.card(b"count") == 0
print("done")
"""
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr


def followers(events, addresses):
    """Of each request, which living one ends where it begins."""
    living, found = {}, []
    for (kind, mib, name), address in zip(events, addresses, strict=True):
        if kind == "give":
            del living[name]
        else:
            found.append(next((other for other, end in living.items() if end == address), None))
            living[name] = address + -(-mib // 2) * 2
    return found


def test_requests_lie_behind_each_other_as_on_an_h100(emulator):
    """Where a new chunk comes to lie also depends on what else a process has mapped, so not all are the same."""
    recorded = json.loads((DATA / "reference" / "h100" / "addresses.json").read_text(encoding="utf-8"))["events"]
    source = (
        MEMORY.format(path=str(emulator / build.OURS)).replace("memory=104857600", "memory=85017493504")
        + """
import json, sys
ours, found = {}, []
for kind, mib, name in json.load(sys.stdin):
    if kind == "take":
        ours[name] = take(mib)[1] // MIB
    found.append(ours[name])
    if kind == "give":
        assert gpu.device_free(ours.pop(name) * MIB) == 0
json.dump(found, sys.stdout)
"""
    )
    command, text = [sys.executable, "-c", source], json.dumps(recorded)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    real = followers(recorded, [address for *_, address in recorded])
    emulated = followers(recorded, json.loads(done.stdout))
    assert sum(one == other for one, other in zip(real, emulated, strict=True)) >= 220  # of 254


# ---- the card ----


def test_every_card_of_the_catalogue_can_be_played(subtests):
    for name, row in GPUS.items():
        with subtests.test(gpu=name):
            text = card.variable(row, 3)
            fields = dict(part.split("=", 1) for part in text.split(" name=")[0].split())
            assert (int(fields["memory"]), fields["count"]) == (row.memory_bytes, "3")
            assert (int(fields["major"]), int(fields["minor"])) == row.compute_capability
            assert text.endswith(f"name={row.title} (emulated)")
            assert recognize_gpu(card.name_on_a_card(row), row.memory_bytes) == row
            assert int(fields["threads"]) in (1024, 1536, 2048)
            assert int(fields["shared_bytes_of_a_block"]) <= int(fields["shared_bytes"])
