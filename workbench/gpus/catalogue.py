"""GPUs by name: how much memory PyTorch can have of each, and what follows from the compute capability.

`memory_bytes` is what CUDA calls the total (`torch.cuda.mem_get_info()[1]`, "total capacity" in PyTorch's
out-of-memory message): less than the data sheet says, since error correction and the driver take their part. Where it
was read off such a card, or somebody has posted such a message, `measured` is True. Elsewhere it is an estimate on the
safe side: what NVML reports less 3 %, more than any measured row lacks against NVML (at most 2.9 %, the T4; the H100
lacks 0.6 %), or, where only the data sheet is known, that less 5 %. On a machine that has the GPU, ask PyTorch instead.

Compute capabilities: https://developer.nvidia.com/cuda-gpus. Data sheets: the vendor's page of each GPU, as named;
multiprocessors: the same, and NVIDIA's architecture white papers (of two forms of one card, the one with more memory
bandwidth: SXM). What follows from the capability: table "Technical Specifications per Compute Capability" of the CUDA
C++ Programming Guide.
"""

import re
from dataclasses import dataclass

from workbench.errors import ConfigurationError

GIB, MIB, KIB = 2**30, 2**20, 2**10
PAGES = "https://www.nvidia.com/en-us"
NVML = "NVML's total as listed on https://thundergolfer.com/blog/nvidia-gpu-memory-capacity, less 3 %"
SHEET = "data sheet, less 5 %"
CONTEXT_BYTES_ESTIMATE = 512 * MIB
CONTEXT_BYTES = {"h100": 787_283_968}  # read off one after a training step: data/reference/h100/card.json


@dataclass(frozen=True)
class Multiprocessor:
    """What one of a GPU's multiprocessors has; kernels and their scratch are chosen by it."""

    threads: int
    blocks: int  # at once
    shared_bytes: int
    shared_bytes_of_a_block: int  # at most


MULTIPROCESSORS = {  # by compute capability
    (7, 5): Multiprocessor(1024, 16, 64 * KIB, 64 * KIB),
    (8, 0): Multiprocessor(2048, 32, 164 * KIB, 163 * KIB),
    (8, 6): Multiprocessor(1536, 16, 100 * KIB, 99 * KIB),
    (8, 9): Multiprocessor(1536, 24, 100 * KIB, 99 * KIB),
    (9, 0): Multiprocessor(2048, 32, 228 * KIB, 227 * KIB),
    (10, 0): Multiprocessor(2048, 32, 228 * KIB, 227 * KIB),
    (12, 0): Multiprocessor(1536, 24, 100 * KIB, 99 * KIB),
}


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    `data_sheet` is what the vendor sells it as; `memory_bytes` what PyTorch can have, from `source`.
    """

    name: str
    title: str
    data_sheet: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    measured: bool
    source: str

    @property
    def multiprocessor(self) -> Multiprocessor:
        return MULTIPROCESSORS[self.compute_capability]

    @property
    def native_bf16(self) -> bool:
        """bf16 in hardware: from Ampere on (`torch.cuda.is_bf16_supported(including_emulation=False)`)."""
        return self.compute_capability >= (8, 0)

    @property
    def flash_attention(self) -> bool:
        """PyTorch's flash attention kernel runs: from 8.0 on (`aten/native/transformers/cuda/sdp_utils.cpp`)."""
        return self.compute_capability >= (8, 0)

    @property
    def cublas_workspace_bytes(self) -> int:
        """Per cuBLAS handle, inside the allocator (`parseChosenWorkspaceSize` in `ATen/cuda/CublasHandlePool.cpp`).

        One handle is made by every thread that multiplies: the one of the forward pass and the one of autograd.
        """
        return 32 * MIB if self.compute_capability[0] in (9, 10, 12) else 2 * 4 * MIB + 16 * 8 * 2**10

    @property
    def context_bytes_estimate(self) -> int:
        """CUDA's context and loaded kernels, outside the allocator: 0.3 to 0.8 GiB are common. A guess, not a sum,
        but for the H100, where it is a measurement."""
        return CONTEXT_BYTES.get(self.name, CONTEXT_BYTES_ESTIMATE)


def _measured(gib: float, where: str) -> tuple[int, bool, str]:
    """A total that PyTorch printed, in GiB with two digits."""
    return int(gib * GIB), True, f"PyTorch's message in https://github.com/{where}"


def _read(nbytes: int, name: str) -> tuple[int, bool, str]:
    return nbytes, True, f"CUDA's total, read off one: data/reference/{name}/card.json"


def _nvml(mib: int) -> tuple[int, bool, str]:
    return int(mib * MIB * 0.97), False, NVML


def _sheet(gib: float, page: str) -> tuple[int, bool, str]:
    return int(gib * GIB * 0.95), False, f"{SHEET}: {PAGES}/{page}"


_GEFORCE = "geforce/graphics-cards"
_40, _50 = f"{_GEFORCE}/40-series", f"{_GEFORCE}/50-series"
_4060 = f"{_40}/rtx-4060-4060ti/"

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4", "NVIDIA T4", "16 GB", (7, 5), 40, *_measured(14.56, "Zheng-Chong/CatVTON/issues/133")),
        Gpu("l4", "NVIDIA L4", "24 GB", (8, 9), 58, *_nvml(23034)),
        Gpu("a10", "NVIDIA A10", "24 GB", (8, 6), 72, *_nvml(23028)),
        Gpu("a100-40gb", "NVIDIA A100 40 GB", "40 GB", (8, 0), 108, *_measured(39.50, "TianheWu/CoSeR/issues/10")),
        Gpu("a100-80gb", "NVIDIA A100 80 GB", "80 GB", (8, 0), 108,
            *_measured(79.14, "lianqi1008/Control-GIC/issues/6")),
        Gpu("l40s", "NVIDIA L40S", "48 GB", (8, 9), 142, *_measured(44.53, "Wan-Video/Wan2.1/issues/205")),
        Gpu("rtx3060", "GeForce RTX 3060", "12 GB", (8, 6), 28, *_measured(11.76, "TencentARC/PhotoMaker/issues/47")),
        Gpu("rtx3070", "GeForce RTX 3070", "8 GB", (8, 6), 46, *_measured(7.76, "sshan-zhao/GASDA/issues/19")),
        Gpu("rtx3080", "GeForce RTX 3080", "10 GB", (8, 6), 68, *_measured(9.78, "zai-org/CogVideo/issues/34")),
        Gpu("rtx3090", "GeForce RTX 3090", "24 GB", (8, 6), 82, *_measured(23.70, "GaoLii/DSP/issues/10")),
        Gpu("rtx4060", "GeForce RTX 4060", "8 GB", (8, 9), 24, *_sheet(8, _4060)),
        Gpu("rtx4060ti-16gb", "GeForce RTX 4060 Ti 16 GB", "16 GB", (8, 9), 34, *_sheet(16, _4060)),
        Gpu("rtx4070", "GeForce RTX 4070", "12 GB", (8, 9), 46, *_sheet(12, f"{_40}/rtx-4070-family/")),
        Gpu("rtx4080", "GeForce RTX 4080", "16 GB", (8, 9), 76, *_sheet(16, f"{_40}/rtx-4080-family/")),
        Gpu("rtx4090", "GeForce RTX 4090", "24 GB", (8, 9), 128,
            *_measured(23.64, "3DTopia/Phidias-Diffusion/issues/8")),
        Gpu("rtx5070", "GeForce RTX 5070", "12 GB", (12, 0), 48, *_sheet(12, f"{_50}/rtx-5070-family/")),
        Gpu("rtx5080", "GeForce RTX 5080", "16 GB", (12, 0), 84, *_sheet(16, f"{_50}/rtx-5080/")),
        Gpu("rtx5090", "GeForce RTX 5090", "32 GB", (12, 0), 170, *_measured(31.37, "Wan-Video/Wan2.1/issues/465")),
        Gpu("h100", "NVIDIA H100 80 GB", "80 GB", (9, 0), 132, *_read(85_017_493_504, "h100")),
        Gpu("h200", "NVIDIA H200", "141 GB", (9, 0), 132, *_nvml(143771)),
        Gpu("b200", "NVIDIA B200", "180 GB", (10, 0), 148, *_sheet(180e9 / GIB, "data-center/dgx-b200/")),
    )
}  # fmt: skip


def gpu(name: str) -> Gpu:
    """A GPU by its name, `"rtx4090"`; case, blanks, hyphens and underscores do not matter.

    Raises:
        ConfigurationError: unknown; lists the known ones.
    """
    key = "".join(character for character in name.lower() if character.isalnum())
    found = {"".join(c for c in known if c.isalnum()): row for known, row in GPUS.items()}.get(key)
    if found is None:
        raise ConfigurationError(f"gpu: {name!r} is not known. Known: {', '.join(GPUS)}.")
    return found


def of_device(name: str, total_bytes: int | None = None) -> Gpu | None:
    """The known GPU of this product name; of two, or if none is named so, that whose memory is nearest."""
    named: dict[Gpu, int] = {}
    for known, row in GPUS.items():
        model = re.findall(r"[a-z]+|\d+", known.split("-")[0])  # "rtx4060ti" is written "RTX 4060 Ti"
        if re.search(r"\b" + " ?".join(model) + r"(?!\d)", name.lower()):
            named[row] = len(model)
    longest = [row for row, length in named.items() if length == max(named.values())]
    if total_bytes is None:
        return longest[0] if longest else None
    return min(longest or GPUS.values(), key=lambda row: abs(row.memory_bytes - total_bytes))
