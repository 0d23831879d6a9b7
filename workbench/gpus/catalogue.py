"""GPUs by name (`catalogue.json`): the memory that PyTorch can have of each, and what follows from its capability.

`memory_bytes` is what CUDA calls the total (`torch.cuda.mem_get_info()[1]`, "total capacity" in PyTorch's
out-of-memory message): less than the data sheet says, since error correction and the driver take their part. Where it
was read off such a card, or somebody has posted such a message, `measured` is True. Elsewhere it is an estimate on the
safe side: what NVML reports less 3 %, more than any measured row lacks against NVML (at most 2.9 %, the T4; the H100
lacks 0.6 %, the H200 0.4 %), or, where only the data sheet is known, that less 5 %, and less 7.5 % where error
correction takes a part of the same memory. On a machine that has the GPU, ask
PyTorch instead.

Compute capabilities: https://developer.nvidia.com/cuda-gpus. Data sheets: the vendor's page of each GPU, as named;
multiprocessors: the same, and NVIDIA's architecture white papers (of two forms of one card, the one with more memory
bandwidth: SXM). What follows from the capability: table "Technical Specifications per Compute Capability" of the CUDA
C++ Programming Guide. `l2_bytes` is the card's L2 cache: torch.compile takes as much while it times kernels (256 MiB
where a card tells 0). TechPowerUp's page of the card has it, or its `l2_source`; what a card says of itself goes
before.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace

from workbench.base.device import CPU, Device
from workbench.base.errors import ConfigurationError, brief
from workbench.base.paths import beside
from workbench.base.settings import plain, unknown

KIB = 2**10
MIB = 2**20
GIB = 2**30
CONTEXT_BYTES_ESTIMATE = 512 * MIB
ENOUGH_BYTES = 2**43  # more than any GPU has
# what is written around the name of a card: who sells it, and how it is built in
AROUND = re.compile(
    r"\b(nvidia|geforce|tesla|sxm\d?|pcie|hbm\d\w?|gpu|generation|blackwell|(workstation|server) edition)\b"
)
WITH_MEMORY = re.compile(r"(.*?)[\s-]+(\d+) ?gi?b\s*")


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    `data_sheet` is what the vendor sells it as; `memory_bytes` what PyTorch can have, from `source`; `context_bytes`
    the least and the most that CUDA's context took of such a card, from program to program, by `context_source`;
    without one it is a guess.
    `is_common`: it stands in tables of all cards; the others are there for whoever names them.
    """

    name: str
    title: str
    data_sheet: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    measured: bool
    source: str
    context_bytes: tuple[int, int] = (CONTEXT_BYTES_ESTIMATE, CONTEXT_BYTES_ESTIMATE)
    context_source: str | None = None
    l2_bytes: int = 0
    l2_source: str = "https://www.techpowerup.com/gpu-specs"
    is_common: bool = True

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
    def cublas_workspace_bytes(self) -> int:
        """Per cuBLAS handle, inside the allocator (`parseChosenWorkspaceSize` in `ATen/cuda/CublasHandlePool.cpp`).

        One handle is made by every thread that multiplies: the one of the forward pass and the one of autograd.
        """
        return 32 * MIB if self.compute_capability[0] in (9, 10, 12) else 2 * 4 * MIB + 16 * 8 * KIB

    @property
    def context_bytes_estimate(self) -> int:
        """CUDA's context and loaded kernels, outside the allocator: 0.3 to 0.8 GiB are common. The most that is known
        of this card, and a guess where there is no `context_source`."""
        return self.context_bytes[1]

    @property
    def context_seen_bytes(self) -> tuple[int, int]:
        """The least and the most that a context took of such a card; of any card, where nobody has told it of this."""
        if self.context_source is not None:
            return self.context_bytes
        sourced = [row.context_bytes for row in GPUS.values() if row.context_source is not None]
        lows, highs = zip(*sourced, strict=True)
        return min(lows), max(highs)


_MULTIPROCESSORS = beside(__file__, "multiprocessors.json")
GPUS: dict[str, Gpu] = {}
for _name, _row_of_file in beside(__file__, "catalogue.json").items():
    _pairs = {key: tuple(value) for key, value in _row_of_file.items() if isinstance(value, list)}
    GPUS[_name] = Gpu(**{**_row_of_file, **_pairs, "name": _name})
COMMON = {name: row for name, row in GPUS.items() if row.is_common}


def gpu(name: str) -> Gpu:
    """A GPU by its name, as people write it: `"rtx4090"`, `"RTX 4090"`, `"4090"`, `"NVIDIA A100-SXM4-80GB"`.

    Raises:
        ConfigurationError: unknown, with the known ones; the beginning of several names; or a form of a known card that
            has another amount of memory.
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"gpu: {brief(name)} is not a name. Write for example 'rtx4090'.")
    card_name = AROUND.sub("", name.lower().replace("_", " "))
    row = _row(card_name)
    sized = WITH_MEMORY.fullmatch(card_name)
    if row is None and sized:
        row = _row(sized[1])
        if row and row.data_sheet != f"{sized[2]} GB":
            raise ConfigurationError(
                f"gpu: {name!r} is not known; the {row.title} that is has {row.data_sheet}. "
                f"Name {row.name}, and give the memory of your card as the budget."
            )
    if row:
        return row
    key = plain(card_name)
    several = [row.name for row in GPUS.values() if plain(row.name).startswith(key)]
    if several and key:
        raise ConfigurationError(f"gpu: {name!r} may be {' or '.join(several)}. Name one.")
    raise unknown("gpu: there is no", name, GPUS)


def _row(card_name: str) -> Gpu | None:
    """Of a GPU's whole name, or with or without the letters RTX: the RTX A6000 is the A6000."""
    rows = {plain(row.name): row for row in GPUS.values()}
    key = plain(card_name)
    return rows.get(key) or rows.get(f"rtx{key}") or rows.get(key.removeprefix("rtx"))


def device_name(name: str) -> str:
    """What predictions are for: `"cpu"`, or the catalogue's name of a GPU, however it is written. Raises as `gpu`."""
    if isinstance(name, str) and name.lower() == CPU:
        return CPU
    return gpu(name).name


def room_bytes(name: str, limit_bytes: int | None = None) -> int:
    """What a program may take of a device, its reserved memory and CUDA's context together (`Prediction.need_bytes`).

    That is the limit, and never more than the device has: `name` is the catalogue's, or "cpu" for this machine.
    """
    if name in GPUS:
        has_bytes = GPUS[name].memory_bytes
    else:
        import psutil

        has_bytes = int(psutil.virtual_memory().total)
    return has_bytes if limit_bytes is None else min(limit_bytes, has_bytes)


def of_device(name: str, total_bytes: int | None = None) -> Gpu | None:
    """The known GPU of this product name; of two, or if none is named so, that whose memory is nearest."""
    longest: list[Gpu] = []
    most = 0
    for row in GPUS.values():
        without_memory = re.sub(r"-\d+gb$", "", row.name)
        # "rtx4060-laptop" is written "RTX 4060 Laptop"
        model = re.findall(r"[a-z]+|\d+", without_memory)
        if len(model) >= most and re.search(r"\b" + " ?".join(model) + r"(?!\d)", name.lower()):
            longest = [*longest, row] if len(model) == most else [row]
            most = len(model)
    if total_bytes is None:
        return longest[0] if longest else None
    return min(longest or GPUS.values(), key=lambda row: abs(row.memory_bytes - total_bytes))
