"""GPUs by name (`catalogue.json`): the memory that PyTorch can have of each, and what follows from its capability.

`memory_bytes` is what CUDA calls the total (`torch.cuda.mem_get_info()[1]`, "total capacity" in PyTorch's
out-of-memory message): less than the data sheet says, since error correction and the driver take their part. A row's
`source` says whether the number was read off such a card, or stands in such a message that somebody has posted. The
others are estimates on the safe side: NVML's number less 3 %, which is more than any measured row lacks against NVML
(at most 2.9 %, the T4; the H100 lacks 0.6 %, the H200 0.4 %); or, where only the data sheet is known, its number less
5 %, and less 7.5 % where error correction takes a part of the same memory. On a machine that has the GPU, ask PyTorch
instead.

The sources: compute capabilities are from https://developer.nvidia.com/cuda-gpus; data sheets are the vendor's page of
each GPU; multiprocessors are from there too, and from NVIDIA's architecture white papers (if a card has two forms, of
the one with more memory bandwidth: SXM). The facts of a capability are from the table "Technical Specifications per
Compute Capability" of the CUDA C++ Programming Guide. `l2_bytes` is the card's L2 cache: torch.compile takes as much
while it times kernels (256 MiB where a card tells 0). It is from TechPowerUp's page of the card, or from `l2_source`;
what a card says of itself goes before.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace

from workbench.base.device import CPU, Device
from workbench.base.errors import ConfigurationError, brief
from workbench.base.paths import read_beside
from workbench.base.settings import normalize_name, unknown_name_error

KIB = 2**10
MIB = 2**20
GIB = 2**30
CONTEXT_BYTES_ESTIMATE = 512 * MIB
ENOUGH_BYTES = 2**43  # 8 TiB: more than any GPU has
# These words stand around the name of a card, and say who sells it and how it is built in.
AROUND = re.compile(
    r"\b(nvidia|geforce|tesla|sxm\d?|pcie|hbm\d\w?|gpu|generation|blackwell|(workstation|server) edition)\b"
)
WITH_MEMORY = re.compile(r"(.*?)[\s-]+(\d+) ?gi?b\s*")


@dataclass(frozen=True)
class Gpu:
    """One GPU model.

    Attributes:
        data_sheet: the memory that the vendor sells it with, as "24 GB".
        memory_bytes: the memory that PyTorch can have, from `source`.
        context_bytes: the least and the most that CUDA's context took of such a card, from program to program, by
            `context_source`; a guess if that is None.
        is_common: whether tables of all cards show it. The others are for users who name them.
    """

    name: str
    title: str
    data_sheet: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    source: str
    context_bytes: tuple[int, int] = (CONTEXT_BYTES_ESTIMATE, CONTEXT_BYTES_ESTIMATE)
    context_source: str | None = None
    l2_bytes: int = 0
    l2_source: str = "https://www.techpowerup.com/gpu-specs"
    is_common: bool = True

    def describe(self) -> str:
        """Return a line for a list of GPUs."""
        major, minor = self.compute_capability
        memory = f"{self.memory_bytes / GIB:6.1f} GiB"
        return f"{self.name:20} {self.title:30} {memory}  compute capability {major}.{minor}  {self.source}"

    @property
    def device(self) -> Device:
        """The card as the device of a run."""
        return Device("cuda", self.title, self.memory_bytes, self.compute_capability)

    @property
    def multiprocessor(self) -> SimpleNamespace:
        """The limits of one multiprocessor: `threads`, `blocks` at once, `shared_bytes`, and of these at most
        `shared_bytes_of_a_block`. Libraries choose kernels and their scratch by them."""
        major, minor = self.compute_capability
        return SimpleNamespace(**_MULTIPROCESSORS[f"{major}.{minor}"])

    @property
    def cublas_workspace_bytes(self) -> int:
        """The bytes of scratch for one cuBLAS handle, which PyTorch's allocator holds (`parseChosenWorkspaceSize` in
        `ATen/cuda/CublasHandlePool.cpp`).

        Every thread that multiplies has a handle: that of the forward pass and that of autograd.
        """
        return 32 * MIB if self.compute_capability[0] in (9, 10, 12) else 2 * 4 * MIB + 16 * 8 * KIB

    @property
    def context_bytes_estimate(self) -> int:
        """The bytes of CUDA's context and loaded kernels, outside the allocator: 0.3 to 0.8 GiB are common. It is the
        most that is known of this card, and a guess where there is no `context_source`."""
        return self.context_bytes[1]

    @property
    def context_seen_bytes(self) -> tuple[int, int]:
        """The least and the most bytes that a context took of such a card, or of any card if it has no
        `context_source`."""
        if self.context_source is not None:
            return self.context_bytes
        sourced = [row.context_bytes for row in GPUS.values() if row.context_source is not None]
        lows, highs = zip(*sourced, strict=True)
        return min(lows), max(highs)


_MULTIPROCESSORS = read_beside(__file__, "multiprocessors.json")
GPUS: dict[str, Gpu] = {}
for _name, _row_of_file in read_beside(__file__, "catalogue.json").items():
    _pairs = {key: tuple(value) for key, value in _row_of_file.items() if isinstance(value, list)}
    GPUS[_name] = Gpu(**{**_row_of_file, **_pairs, "name": _name})
COMMON = {name: row for name, row in GPUS.items() if row.is_common}


def gpu(name: str) -> Gpu:
    """Return a GPU by its name, as people write it: `"rtx4090"`, `"RTX 4090"`, `"4090"`, `"NVIDIA A100-SXM4-80GB"`.

    Raises:
        ConfigurationError: the name is unknown (the message has the known ones), or the beginning of several names, or
            names a known card with another amount of memory.
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
    key = normalize_name(card_name)
    several = [row.name for row in GPUS.values() if normalize_name(row.name).startswith(key)]
    if several and key:
        raise ConfigurationError(f"gpu: {name!r} may be {' or '.join(several)}. Name one.")
    raise unknown_name_error("gpu: there is no", name, GPUS)


def _row(card_name: str) -> Gpu | None:
    """Return the row of a GPU's name, or of the name with or without the letters RTX: the RTX A6000 is the A6000."""
    rows = {normalize_name(row.name): row for row in GPUS.values()}
    key = normalize_name(card_name)
    return rows.get(key) or rows.get(f"rtx{key}") or rows.get(key.removeprefix("rtx"))


def device_name(name: str) -> str:
    """Return the device that a prediction is for: `"cpu"`, or the catalogue's name of a GPU, however it is written.
    Raises as `gpu` does."""
    if isinstance(name, str) and name.lower() == CPU:
        return CPU
    return gpu(name).name


def room_bytes(name: str, limit_bytes: int | None = None) -> int:
    """Return the bytes that a program may take of a device, its reserved memory and CUDA's context together
    (`Prediction.need_bytes`): the limit, and never more than the device has.

    Args:
        name: the catalogue's name of a GPU, or "cpu" for this machine.
    """
    if name in GPUS:
        has_bytes = GPUS[name].memory_bytes
    else:
        import psutil

        has_bytes = int(psutil.virtual_memory().total)
    return has_bytes if limit_bytes is None else min(limit_bytes, has_bytes)


def recognize_gpu(name: str, total_bytes: int | None = None) -> Gpu | None:
    """Return the GPU that a driver's product name contains, by the longest name of the catalogue: "NVIDIA H100 NVL" is
    an h100. If several rows have that name, or none has, the one with the nearest memory is taken.

    Args:
        total_bytes: the device's memory; without it, the first of several rows is taken, and None if there is none.
    """
    rows_by_words: dict[int, list[Gpu]] = {}
    for row in GPUS.values():
        # The row rtx4060-laptop is the words rtx, 4060 and laptop: drivers write "RTX 4060 Laptop".
        model_words = re.findall(r"[a-z]+|\d+", re.sub(r"-\d+gb$", "", row.name))
        if re.search(r"\b" + " ?".join(model_words) + r"(?!\d)", name.lower()):
            rows_by_words.setdefault(len(model_words), []).append(row)
    rows = rows_by_words[max(rows_by_words)] if rows_by_words else []
    if total_bytes is None:
        return rows[0] if rows else None
    return min(rows or GPUS.values(), key=lambda row: abs(row.memory_bytes - total_bytes))
