"""What an emulation found, in words and as JSON."""

from typing import Any

from workbench.gpus.catalogue import GPUS, Gpu
from workbench.gpus.emulator.card import DEVICE
from workbench.gpus.emulator.launch import TIMED_OUT, Emulation
from workbench.measure.categories import format_bytes

NOT_MEASURED = "nothing here was measured on a GPU"
VIEWER = "https://pytorch.org/memory_viz"


def banner(gpu: Gpu) -> str:
    """What stands above the program's own output."""
    return (
        f"emulated GPU: {gpu.title}, {format_bytes(gpu.memory_bytes)}. PyTorch's own allocator keeps the books; values "
        f"are not computed (a loss reads 0), and {NOT_MEASURED}."
    )


def emulation_text(found: Emulation) -> str:
    """Peaks of each process, who holds most, where it fits."""
    lines = [f"emulated {found.gpu.title} ({format_bytes(found.gpu.memory_bytes)}): {NOT_MEASURED}"]
    for process in found.processes:
        for device in process["devices"]:
            lines.append(_device_line(process, device, several=len(found.processes) > 1))
    if not found.processes:
        lines.append("  no process used the GPU" if not found.silent else "")
    if found.silent:
        lines.append(f"  {found.silent} processes that used the GPU were killed and left no report")
    if found.processes:
        lines += _holders(found) + _fitting(found)
    if found.stuck_at:
        waited = "perhaps waiting for a value that is never computed"
        lines.append(f"  ended when its time was over (--timeout). It was here, {waited}:")
        lines += [f"    {line}" for line in found.stuck_at.splitlines()]
    lines += [f"  snapshot  {path} (open it at {VIEWER})" for path in found.snapshots]
    return "\n".join(line for line in lines if line)


def _device_line(process: dict[str, Any], device: dict[str, Any], several: bool) -> str:
    who = f"rank {process['rank']}, device {device['index']}" if several else f"device {device['index']}"
    refused = "; ran out of memory" if device["refusals"] else ""
    return (
        f"  {who}: peak {format_bytes(device['peak_allocated_bytes'])} allocated, "
        f"{format_bytes(device['peak_reserved_bytes'])} reserved{refused}; "
        f"host {format_bytes(process['peak_host_bytes'])}"
    )


def _holders(found: Emulation) -> list[str]:
    device = found.devices[0]
    if not device.get("lines"):
        return []
    lines = [f"    {format_bytes(entry['bytes']):>9}  {entry['line']}" for entry in device["lines"]]
    title = "  who holds most at the peak, by the innermost line of the program"
    if device["peak_in_history_bytes"] < 0.95 * device["peak_allocated_bytes"]:
        title += f" (of the history's end, {format_bytes(device['peak_in_history_bytes'])}; the peak was before)"
    return [title, *lines]


def fits(found: Emulation) -> dict[str, bool]:
    """By card, whether what was reserved and the card's context have room. Empty if the program ran out of memory."""
    if not found.processes or any(device["refusals"] for device in found.devices):
        return {}
    need = found.peak_reserved_bytes
    return {name: need + gpu.context_bytes_estimate <= gpu.memory_bytes for name, gpu in GPUS.items()}


def _fitting(found: Emulation) -> list[str]:
    known = fits(found)
    if not known:
        return ["  it needs more than that: which card has room is not known. Try a larger one (--gpu)"]
    yes, no = ([name for name, fit in known.items() if fit is wanted] for wanted in (True, False))
    need, context = format_bytes(found.peak_reserved_bytes), format_bytes(found.gpu.context_bytes_estimate)
    return [
        f"  needs {need} and about {context} of context, by the kernels of this card",
        f"  fits on          {', '.join(yes) or 'none of the known GPUs'}",
        *([f"  does not fit on  {', '.join(no)}"] if no else []),
    ]


def emulation_json(found: Emulation) -> dict[str, Any]:
    """JSON-ready; bytes are integers."""
    return {
        "memory_source": f"{DEVICE}{found.gpu.name}",
        "measured_on_a_gpu": False,
        "gpu": found.gpu.name,
        "capacity_bytes": found.gpu.memory_bytes,
        "context_bytes_estimate": found.gpu.context_bytes_estimate,
        "command": list(found.command),
        "exit_status": found.exit_status,
        "timed_out": found.exit_status == TIMED_OUT and bool(found.stuck_at),
        "stuck_at": found.stuck_at,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "processes": list(found.processes),
        "processes_without_report": found.silent,
        "fits": fits(found),
        "snapshots": [str(path) for path in found.snapshots],
    }
