"""`Emulation`, the result of a program under the emulator: it prints itself, and is JSON-ready."""

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
TIMED_OUT = 124  # the exit status of timeout(1) when a program's time is over
LINES = 8  # lines of a program that a list shows
VIEWER = "https://pytorch.org/memory_viz"

Report = dict[str, Any]  # the JSON that a process leaves of itself, or of one of its devices


def banner(gpu: Gpu) -> str:
    """Write the sentence that stands above the program's own output."""
    return (
        f"emulated GPU: {gpu.title}, {format_bytes(gpu.memory_bytes)}. "
        "PyTorch's own allocator keeps the books; values are not computed (a loss reads 0), "
        f"times, speeds and MFU that the program prints are not the card's, and {NOT_MEASURED}."
    )


@dataclass(frozen=True)
class Emulation(Result):
    """The result of a program under the emulator: its exit status, and what it needs of a card. Bytes are integers.

    Attributes:
        processes: the reports of the processes that used a GPU, by rank.
        stuck_at: where the program was when its time was over; else empty.
        processes_without_report: the number of processes that were killed before they reported.
        host_was_full: why the program was ended before this machine's own memory was full; else empty.
        without_kernels: the names of the cards on which the program's PyTorch cannot run.
    """

    gpu: Gpu
    command: tuple[str, ...]
    exit_status: int
    processes: tuple[Report, ...]
    stuck_at: str = ""
    processes_without_report: int = 0
    snapshots: tuple[Path, ...] = ()
    host_was_full: str = ""
    without_kernels: tuple[str, ...] = ()
    json_fields = (
        "context_bytes",
        "command",
        "exit_status",
        "timed_out",
        "stuck_at",
        "peak_reserved_bytes",
        "reserved_at_once_bytes",
        "need_bytes",
        "processes_at_once",
        "lower_bound",
        "host_was_full",
        "without_kernels",
        "processes",
        "processes_without_report",
        "fits",
        "close",
        "not_measured",
        "sizes_by_values",
    )

    @property
    def timed_out(self) -> bool:
        return self.exit_status == TIMED_OUT and bool(self.stuck_at)

    @property
    def processes_and_devices(self) -> list[tuple[Report, Report]]:
        """The pairs of a process's report and the report of a device that it used."""
        pairs = []
        for process in self.processes:
            for device in process["devices"]:
                pairs.append((process, device))
        return pairs

    @property
    def devices(self) -> list[Report]:
        """The reports of all devices; the device that reserved most stands first."""
        return sorted(
            (device for _, device in self.processes_and_devices), key=lambda device: -device["peak_reserved_bytes"]
        )

    @property
    def peak_reserved_bytes(self) -> int:
        return self.devices[0]["peak_reserved_bytes"] if self.devices else 0

    @property
    def refusals(self) -> int:
        """The number of times that a card refused memory; a program may catch the error, and go on with less."""
        return sum(device["refusals"] for device in self.devices)

    @property
    def has_recovered(self) -> bool:
        """Whether memory was refused, and the program ended well all the same."""
        return self.refusals > 0 and self.exit_status == 0

    @property
    def at_once(self) -> list[tuple[Report, Report]]:
        """The processes that together needed most of one card at one time, each with its report of that card."""
        fullest: list[tuple[Report, Report]] = []
        for later, used in self.processes_and_devices:
            began = later.get("began", 0)
            card = used.get("card", used["index"])
            together = []
            for process, device in self.processes_and_devices:
                was_running = process.get("began", 0) <= began <= process.get("ended", began)
                if was_running and device.get("card", device["index"]) == card:
                    together.append((process, device))
            if _sum_of_needs(together) > _sum_of_needs(fullest):
                fullest = together
        return fullest

    @property
    def processes_at_once(self) -> int:
        return len(self.at_once)

    @property
    def contexts(self) -> int:
        """The number of CUDA contexts on the fullest card: each process on a card has one of its own."""
        return max(self.processes_at_once, 1)

    @property
    def reserved_at_once_bytes(self) -> int:
        """The most bytes that processes reserve together on one card; a process that went on after a refusal counts
        with what it reserved from then on."""
        return _sum_of_needs(self.at_once)

    @property
    def need_bytes(self) -> int:
        """All bytes that a card must give: those that are reserved together, and the most that contexts take."""
        return self.reserved_at_once_bytes + self.context_bytes[1]

    @property
    def context_bytes(self) -> tuple[int, int]:
        """The least and the most bytes that the contexts on the fullest card take."""
        low, high = self.gpu.context_bytes
        return self.contexts * low, self.contexts * high

    @property
    def lower_bound(self) -> list[str]:
        """The reasons why the peaks are lower bounds; empty if they are not."""
        reasons = []
        if self.not_measured:
            reasons.append(f"nobody has measured {', '.join(self.not_measured)}")
        if self.processes_without_report or any(process.get("was_killed") for process in self.processes):
            reasons.append("what a killed process would have taken later is not known")
        if self.stuck_at or self.host_was_full:
            reasons.append("it was ended before it was over")
        if self.refusals and not self.has_recovered:
            reasons.append("it ran out of memory, so that nobody knows what it would have taken next")
        return reasons

    @property
    def not_measured(self) -> list[str]:
        """The things that take memory of a real card in amounts that nobody knows; with any, the peaks are lower
        bounds."""
        names: set[str] = set()
        for process in self.processes:
            names.update(process.get("not_measured", ()))
        return sorted(names)

    @property
    def sizes_by_values(self) -> list[Report]:
        """The lines at which values would have decided a size, each as a dictionary: `line`, `operation`, how many
        `times`, the most that was `taken`, and `of` how many (None if nobody knows)."""
        notes: dict[tuple[str, str], Report] = {}
        for process in self.processes:
            for note in process.get("sizes_by_values", ()):
                merged = notes.setdefault((note["line"], note["operation"]), {**note, "times": 0})
                merged["times"] += note["times"]
        return sorted(notes.values(), key=lambda note: -note["taken"])

    @property
    def fits(self) -> dict[str, bool]:
        """The verdict for each card: whether it has room for the reserved memory beside the most that its context is
        known to take, and the program's PyTorch has kernels for it. Empty if the program ran out of memory, or used no
        GPU. Memory that nobody has measured is left out."""
        if not self.processes or (self.refusals and not self.has_recovered):
            return {}
        reserved = self.reserved_at_once_bytes
        contexts = self.contexts
        verdicts = {}
        for name, gpu in GPUS.items():
            has_room = reserved + contexts * gpu.context_bytes_estimate <= gpu.memory_bytes
            verdicts[name] = has_room and name not in self.without_kernels
        return verdicts

    @property
    def close(self) -> list[str]:
        """The cards on which CUDA's context decides: they have room beside the least that it is known to take, and none
        beside the most."""
        contexts = self.contexts
        reserved = self.reserved_at_once_bytes
        names = []
        for name in self.fits:
            least, most = GPUS[name].context_seen_bytes
            room = GPUS[name].memory_bytes - reserved
            if contexts * least <= room < contexts * most and name not in self.without_kernels:
                names.append(name)
        return names

    def __str__(self) -> str:
        """Write the peaks of each process, who holds most, and where the program fits."""
        lines = [f"emulated {self.gpu.title} ({format_bytes(self.gpu.memory_bytes)}): {NOT_MEASURED}"]
        for versions in sorted({_describe_versions(process) for process in self.processes if "torch" in process}):
            lines.append(f"  {versions}")
        for process, device in self.processes_and_devices:
            rank = f"rank {process['rank']}, " if len(self.processes) > 1 else ""
            lines.append(f"  {rank}{_describe_peaks(process, device, self.has_recovered)}")
        if self.processes_without_report:
            lines.append(
                f"  {self.processes_without_report} processes that used the GPU were killed and left no report"
            )
        if self.host_was_full:
            lines.append(f"  {self.host_was_full}")
        if self.processes:
            lines += _describe_holders(self.devices[0])
            lines += _describe_growth(self.devices[0])
            lines += self._describe_sharing()
            lines += self._describe_cards()
        elif not self.processes_without_report:
            lines.append("  no process used the GPU")
        lines += self._describe_sizes()
        if self.stuck_at:
            waited = "perhaps waiting for a value that is never computed"
            lines.append(f"  ended when its time was over (--timeout). It was here, {waited}:")
            lines.append(indent(self.stuck_at, "    "))
        for path in self.snapshots:
            lines.append(f"  snapshot  {path} (open it at {VIEWER})")
        return "\n".join(lines)

    def _describe_sizes(self) -> list[str]:
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

    def _describe_sharing(self) -> list[str]:
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

    def _describe_cards(self) -> list[str]:
        if not self.fits:
            for device in self.devices:
                if device["refusals"] and device.get("cap_bytes") is not None:
                    cap = format_bytes(device["cap_bytes"])
                    return [f"  it needs more than its own cap of {cap}, which set_per_process_memory_fraction has set"]
            return ["  it needs more than that, and how much is not known. Run it with enough, such as --memory 80GiB"]
        close = self.close
        is_any_close = False
        fitting = []
        others = []
        no_kernels = []
        for name, has_room in self.fits.items():
            if not GPUS[name].is_common and name != self.gpu.name:
                continue
            is_any_close |= name in close
            label = f"{name} (close)" if name in close else name
            if name in self.without_kernels:
                no_kernels.append(name)
            elif has_room:
                fitting.append(label)
            else:
                others.append(label)
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
        """Return all of it, JSON-ready; the card by its name, and bytes as integers."""
        return {
            "memory_source": f"{DEVICE}{self.gpu.name}",
            "measured_on_a_gpu": False,
            "gpu": self.gpu.name,
            "capacity_bytes": self.gpu.memory_bytes,
            "context_bytes_estimate": self.gpu.context_bytes_estimate,
            **super().to_dict(),
            "snapshots": [str(path) for path in self.snapshots],
        }


def _describe_peaks(process: Report, device: Report, has_recovered: bool) -> str:
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


def _describe_versions(process: Report) -> str:
    is_this_one = Path(process["executable"]).parent == Path(sys.executable).parent
    place = "" if is_this_one else f" ({process['executable']})"
    return f"PyTorch {process['torch']}, Python {process['python']}{place}"


def _describe_growth(device: Report) -> list[str]:
    """Write the lines of the program that hold more with every step, and which variables hold it."""
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


def _describe_holders(device: Report) -> list[str]:
    if not device.get("lines"):
        return []
    title = "  who holds most at the peak, by the innermost line of the program"
    if device["peak_in_history_bytes"] < 0.95 * device["peak_allocated_bytes"]:
        title += f" (of the history's end, {format_bytes(device['peak_in_history_bytes'])}; the peak was before)"
    lines = [title]
    for entry in device["lines"]:
        lines.append(f"    {format_bytes(entry['bytes']):>9}  {entry['line']}")
    return lines
