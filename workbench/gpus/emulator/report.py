"""What an emulation found: it prints itself, and is JSON-ready."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from workbench.base.categories import format_bytes
from workbench.base.result import Result
from workbench.gpus.catalogue import GPUS, Gpu
from workbench.gpus.emulator.card import DEVICE

NOT_MEASURED = "nothing here was measured on a GPU"
TIMED_OUT = 124  # the exit status that timeout(1) has
LINES = 8
VIEWER = "https://pytorch.org/memory_viz"

Report = dict[str, Any]  # of a process, or of one of its devices


def banner(gpu: Gpu) -> str:
    """What stands above the program's own output."""
    return (
        f"emulated GPU: {gpu.title}, {format_bytes(gpu.memory_bytes)}. "
        "PyTorch's own allocator keeps the books; values are not computed (a loss reads 0), "
        f"times, speeds and MFU that the program prints are not the card's, and {NOT_MEASURED}."
    )


@dataclass(frozen=True)
class Emulation(Result):
    """What became of a program. `processes` are the reports of those that used a GPU, by rank; bytes are integers."""

    gpu: Gpu
    command: tuple[str, ...]
    exit_status: int
    processes: tuple[Report, ...]
    stuck_at: str = ""  # where it was when its time was over
    silent: int = 0  # processes that ended without a report, being killed
    snapshots: tuple[Path, ...] = ()
    host_was_full: str = ""  # why it was ended before this machine's own memory was
    without_kernels: tuple[str, ...] = ()  # cards on which the program's PyTorch cannot run

    @property
    def users(self) -> list[tuple[Report, Report]]:
        """Every process with every device that it used."""
        users = []
        for process in self.processes:
            for device in process["devices"]:
                users.append((process, device))
        return users

    @property
    def devices(self) -> list[Report]:
        """The reports of all devices, that which reserved most first."""
        return sorted((device for _, device in self.users), key=lambda device: -device["peak_reserved_bytes"])

    @property
    def peak_reserved_bytes(self) -> int:
        return self.devices[0]["peak_reserved_bytes"] if self.devices else 0

    @property
    def refusals(self) -> int:
        """How often a card refused memory; a program may catch that, and go on with less."""
        return sum(device["refusals"] for device in self.devices)

    @property
    def has_recovered(self) -> bool:
        return self.refusals > 0 and self.exit_status == 0

    @property
    def at_once(self) -> list[tuple[Report, Report]]:
        """The processes that together needed most of one card at one time, each with its report of that card."""
        fullest: list[tuple[Report, Report]] = []
        for later, used in self.users:
            began = later.get("began", 0)
            card = used.get("card", used["index"])
            together = []
            for process, device in self.users:
                was_there = process.get("began", 0) <= began <= process.get("ended", began)
                if was_there and device.get("card", device["index"]) == card:
                    together.append((process, device))
            if _sum_of_needs(together) > _sum_of_needs(fullest):
                fullest = together
        return fullest

    @property
    def reserved_at_once_bytes(self) -> int:
        """What processes that run at once reserve at most on one card; of one that went on after a refusal, what it
        reserved from then on."""
        return _sum_of_needs(self.at_once)

    @property
    def need_bytes(self) -> int:
        """All that a card must give: that, and the most that contexts take."""
        return self.reserved_at_once_bytes + self.context_bytes[1]

    @property
    def context_bytes(self) -> tuple[int, int]:
        """The least and the most that CUDA takes beside: each process on a card has a context of its own there."""
        contexts = max(len(self.at_once), 1)
        low, high = self.gpu.context_bytes
        return contexts * low, contexts * high

    @property
    def lower_bound(self) -> list[str]:
        """Why the peaks are lower bounds; empty if they are not."""
        reasons = []
        if self.not_measured:
            reasons.append(f"nobody has measured {', '.join(self.not_measured)}")
        if self.silent or any(process.get("was_killed") for process in self.processes):
            reasons.append("what a killed process would have taken later is not known")
        if self.stuck_at or self.host_was_full:
            reasons.append("it was ended before it was over")
        return reasons

    @property
    def not_measured(self) -> list[str]:
        """What took memory in amounts that nobody knows: if there is any of it, the peaks are lower bounds."""
        names: set[str] = set()
        for process in self.processes:
            names.update(process.get("not_measured", ()))
        return sorted(names)

    @property
    def sizes_by_values(self) -> list[Report]:
        """Where values would have decided a size: `line`, `operation`, how many `times`, the most that was `taken`, and
        `of` how many (None: nobody knows)."""
        notes: dict[tuple[str, str], Report] = {}
        for process in self.processes:
            for note in process.get("sizes_by_values", ()):
                merged = notes.setdefault((note["line"], note["operation"]), {**note, "times": 0})
                merged["times"] += note["times"]
        return sorted(notes.values(), key=lambda note: -note["taken"])

    @property
    def fits(self) -> dict[str, bool]:
        """By card, whether what was reserved has room beside the most that the card's context is known to take. Empty
        if the program ran out of memory, or used no GPU. What was not measured is not in it."""
        if not self.processes or (self.refusals and not self.has_recovered):
            return {}
        reserved = self.reserved_at_once_bytes
        contexts = max(len(self.at_once), 1)
        verdicts = {}
        for name, gpu in GPUS.items():
            has_room = reserved + contexts * gpu.context_bytes_estimate <= gpu.memory_bytes
            verdicts[name] = has_room and name not in self.without_kernels
        return verdicts

    @property
    def close(self) -> list[str]:
        """The cards on which CUDA's context decides: there is room beside the least that it is known to take, and none
        beside the most."""
        contexts = max(len(self.at_once), 1)
        reserved = self.reserved_at_once_bytes
        names = []
        for name in self.fits:
            least, most = GPUS[name].context_seen_bytes
            room = GPUS[name].memory_bytes - reserved
            if contexts * least <= room < contexts * most and name not in self.without_kernels:
                names.append(name)
        return names

    def __str__(self) -> str:
        """Peaks of each process, who holds most, where it fits."""
        lines = [f"emulated {self.gpu.title} ({format_bytes(self.gpu.memory_bytes)}): {NOT_MEASURED}"]
        for versions in sorted({_versions(process) for process in self.processes if "torch" in process}):
            lines.append(f"  {versions}")
        for process, device in self.users:
            rank = f"rank {process['rank']}, " if len(self.processes) > 1 else ""
            lines.append(f"  {rank}{_peaks(process, device, self.has_recovered)}")
        if self.silent:
            lines.append(f"  {self.silent} processes that used the GPU were killed and left no report")
        if self.host_was_full:
            lines.append(f"  {self.host_was_full}")
        if self.processes:
            lines += _holders(self.devices[0])
            lines += _growth(self.devices[0])
            lines += self._shared_card()
            lines += self._cards()
        elif not self.silent:
            lines.append("  no process used the GPU")
        lines += self._decided_sizes()
        if self.stuck_at:
            waited = "perhaps waiting for a value that is never computed"
            lines.append(f"  ended when its time was over (--timeout). It was here, {waited}:")
            lines.append(indent(self.stuck_at, "    "))
        for path in self.snapshots:
            lines.append(f"  snapshot  {path} (open it at {VIEWER})")
        return "\n".join(lines)

    def _decided_sizes(self) -> list[str]:
        notes = self.sizes_by_values
        if not notes:
            return []
        lines = ["  sizes that follow from values, taken by a rule (--masks): all is an upper bound, none a lower one"]
        for note in notes[:LINES]:
            places = f"{note['of']:,}" if note["of"] is not None else "nobody knows how many"
            lines.append(f"    {note['taken']:>9,} of {places}  {note['operation']}, {note['line']}")
        if len(notes) > LINES:
            lines.append(f"    and {len(notes) - LINES} more places (--json has them)")
        return lines

    def _shared_card(self) -> list[str]:
        together = self.at_once
        if len(together) < 2:
            return []
        card = together[0][1].get("card", together[0][1]["index"])
        ranks = sorted({process["rank"] for process, _ in together})
        who = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"{len(together)} processes"
        lines = [f"  device {card} is shared: {who} are on it at once, so their peaks are added"]
        if len(ranks) > 1:
            lines.append("    a rank takes a card of its own with torch.cuda.set_device(int(os.environ['LOCAL_RANK']))")
        return lines

    def _cards(self) -> list[str]:
        if not self.fits:
            for device in self.devices:
                if device["refusals"] and device.get("cap_bytes") is not None:
                    cap = format_bytes(device["cap_bytes"])
                    return [f"  it needs more than its own cap of {cap}, which set_per_process_memory_fraction has set"]
            return ["  it needs more than that: which card has room is not known. Try a larger one (--gpu)"]
        close = self.close
        is_any_close = False
        fitting = []
        others = []
        no_kernels = []
        for name, has_room in self.fits.items():
            if not GPUS[name].is_common and name != self.gpu.name:
                continue
            is_any_close |= name in close
            written = f"{name} (close)" if name in close else name
            if name in self.without_kernels:
                no_kernels.append(name)
            elif has_room:
                fitting.append(written)
            else:
                others.append(written)
        reserved = format_bytes(self.reserved_at_once_bytes)
        low, high = self.context_bytes
        context = f"{format_bytes(low)} to {format_bytes(high)}"
        if low == high:
            context = f"about {format_bytes(high)}"
        least = "at least " if self.lower_bound else ""
        lines = [f"  needs {least}{reserved} and {context} of context, by the kernels of this card"]
        verdict = "may fit on     " if self.lower_bound else "fits on        "
        lines.append(f"  {verdict}  {', '.join(fitting) or 'none of the known GPUs'}")
        if others:
            lines.append(f"  does not fit on  {', '.join(others)}")
        if is_any_close:
            lines.append("  close            CUDA's context decides; it differs from program to program")
        if no_kernels:
            lines.append(f"  no kernels for   {', '.join(no_kernels)} in this PyTorch")
        if self.lower_bound:
            lines.append(f"  a lower bound: {'; '.join(self.lower_bound)}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes are integers."""
        return {
            "memory_source": f"{DEVICE}{self.gpu.name}",
            "measured_on_a_gpu": False,
            "gpu": self.gpu.name,
            "capacity_bytes": self.gpu.memory_bytes,
            "context_bytes_estimate": self.gpu.context_bytes_estimate,
            "context_bytes": list(self.context_bytes),
            "command": list(self.command),
            "exit_status": self.exit_status,
            "timed_out": self.exit_status == TIMED_OUT and bool(self.stuck_at),
            "stuck_at": self.stuck_at,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "reserved_at_once_bytes": self.reserved_at_once_bytes,
            "need_bytes": self.need_bytes,
            "processes_at_once": len(self.at_once),
            "lower_bound": self.lower_bound,
            "host_was_full": self.host_was_full,
            "without_kernels": list(self.without_kernels),
            "processes": list(self.processes),
            "processes_without_report": self.silent,
            "fits": self.fits,
            "close": self.close,
            "not_measured": self.not_measured,
            "sizes_by_values": self.sizes_by_values,
            "snapshots": [str(path) for path in self.snapshots],
        }


def _peaks(process: Report, device: Report, has_recovered: bool) -> str:
    allocated = format_bytes(device["peak_allocated_bytes"])
    reserved = format_bytes(device["peak_reserved_bytes"])
    refused = ""
    if device["refusals"]:
        refused = "; ran out of memory"
        if has_recovered:
            refused = f"; refused {_times(device['refusals'])}, recovered"
    host = format_bytes(process["peak_host_bytes"])
    killed = "; killed (as read at most a few seconds before)" if process.get("was_killed") else ""
    return f"device {device['index']}: peak {allocated} allocated, {reserved} reserved{refused}; host {host}{killed}"


def _sum_of_needs(together: Sequence[tuple[Report, Report]]) -> int:
    total = 0
    for _, device in together:
        after = device.get("reserved_after_refusals_bytes")
        total += device["peak_reserved_bytes"] if after is None else after
    return total


def _versions(process: Report) -> str:
    is_this_one = Path(process["executable"]).parent == Path(sys.executable).parent
    place = "" if is_this_one else f" ({process['executable']})"
    return f"PyTorch {process['torch']}, Python {process['python']}{place}"


def _growth(device: Report) -> list[str]:
    """What a program takes more of with every step, as long as it runs."""
    growth = device.get("growth")
    if not growth:
        return []
    lines = [f"  grows by {format_bytes(growth['bytes_a_step'])} a step, as seen over {growth['steps']} steps"]
    for entry in growth["lines"][:LINES]:
        lines.append(f"    {'+' + format_bytes(entry['bytes_a_step']):>9}  {entry['line']}")
    if device.get("holders"):
        lines.append(f"    held by {', '.join(device['holders'])}")
    return lines


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _holders(device: Report) -> list[str]:
    if not device.get("lines"):
        return []
    title = "  who holds most at the peak, by the innermost line of the program"
    if device["peak_in_history_bytes"] < 0.95 * device["peak_allocated_bytes"]:
        title += f" (of the history's end, {format_bytes(device['peak_in_history_bytes'])}; the peak was before)"
    lines = [title]
    for entry in device["lines"]:
        lines.append(f"    {format_bytes(entry['bytes']):>9}  {entry['line']}")
    return lines
