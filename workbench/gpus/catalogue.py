"""GPUs by name (`catalogue.json`): the memory that PyTorch can have of each, and what follows from its capability.

`memory_bytes` is what CUDA calls the total (`torch.cuda.mem_get_info()[1]`, "total capacity" in PyTorch's
out-of-memory message): less than the data sheet says, since error correction and the driver take their part. Where it
was read off such a card, or somebody has posted such a message, `measured` is True. Elsewhere it is an estimate on the
safe side: what NVML reports less 3 %, more than any measured row lacks against NVML (at most 2.9 %, the T4; the H100
lacks 0.6 %, the H200 0.4 %), or, where only the data sheet is known, that less 5 %. On a machine that has the GPU, ask
PyTorch instead.

Compute capabilities: https://developer.nvidia.com/cuda-gpus. Data sheets: the vendor's page of each GPU, as named;
multiprocessors: the same, and NVIDIA's architecture white papers (of two forms of one card, the one with more memory
bandwidth: SXM). What follows from the capability: table "Technical Specifications per Compute Capability" of the CUDA
C++ Programming Guide.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace

from workbench.base.errors import ConfigurationError
from workbench.base.paths import beside
from workbench.base.settings import unknown
from workbench.measure.device import Device

KIB = 2**10
MIB = 2**20
GIB = 2**30
CONTEXT_BYTES_ESTIMATE = 512 * MIB


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    `data_sheet` is what the vendor sells it as; `memory_bytes` what PyTorch can have, from `source`; `context_bytes`
    what CUDA's context took on such a card after a training step (`data/reference/<name>/card.json`), where known.
    """

    name: str
    title: str
    data_sheet: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    measured: bool
    source: str
    context_bytes: int | None = None

    @property
    def device(self) -> Device:
        """The card as the device of a run."""
        return Device("cuda", self.title, self.memory_bytes, self.compute_capability)

    @property
    def multiprocessor(self) -> SimpleNamespace:
        """What one of them has: `threads`, `blocks` at once, `shared_bytes`, and at most `shared_bytes_of_a_block`.
        Kernels and their scratch are chosen by it."""
        major, minor = self.compute_capability
        return SimpleNamespace(**_MULTIPROCESSORS[f"{major}.{minor}"])

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
        return 32 * MIB if self.compute_capability[0] in (9, 10, 12) else 2 * 4 * MIB + 16 * 8 * KIB

    @property
    def context_bytes_estimate(self) -> int:
        """CUDA's context and loaded kernels, outside the allocator: 0.3 to 0.8 GiB are common. A guess, not a sum,
        but for the H100 and the H200, where it is a measurement."""
        return self.context_bytes or CONTEXT_BYTES_ESTIMATE


_MULTIPROCESSORS = beside(__file__, "multiprocessors.json")
GPUS: dict[str, Gpu] = {
    name: Gpu(**{**row, "name": name, "compute_capability": tuple(row["compute_capability"])})
    for name, row in beside(__file__, "catalogue.json").items()
}


def gpu(name: str) -> Gpu:
    """A GPU by its name, `"rtx4090"`; case, blanks, hyphens and underscores do not matter.

    Raises:
        ConfigurationError: unknown, with the known ones; or the beginning of several names.
    """
    key = _letters(name)
    rows = {_letters(row.name): row for row in GPUS.values()}
    if key in rows:
        return rows[key]
    several = [row.name for letters, row in rows.items() if letters.startswith(key)]
    if key and several:
        raise ConfigurationError(f"gpu: {name!r} may be {' or '.join(several)}. Name one.")
    raise unknown("gpu: there is no", name, GPUS)


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def of_device(name: str, total_bytes: int | None = None) -> Gpu | None:
    """The known GPU of this product name; of two, or if none is named so, that whose memory is nearest."""
    longest: list[Gpu] = []
    most = 0
    for row in GPUS.values():
        model = re.findall(r"[a-z]+|\d+", row.name.split("-")[0])  # "rtx4060ti" is written "RTX 4060 Ti"
        if len(model) >= most and re.search(r"\b" + " ?".join(model) + r"(?!\d)", name.lower()):
            longest = [*longest, row] if len(model) == most else [row]
            most = len(model)
    if total_bytes is None:
        return longest[0] if longest else None
    return min(longest or GPUS.values(), key=lambda row: abs(row.memory_bytes - total_bytes))
