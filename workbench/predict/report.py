"""A prediction as text: a table with bars, and the GPUs it fits on."""

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS
from workbench.measure.categories import format_bytes
from workbench.predict.prediction import Prediction

BAR_WIDTH = 40


def prediction_text(prediction: Prediction) -> str:
    """Peak, categories and phases of one prediction."""
    p = prediction
    gpu = GPUS[p.gpu].title if p.gpu in GPUS else "this machine's kernels"
    lines = [
        f"{p.label} on {p.model}, {p.micro_batch_size} × {p.recipe['sequence_length']} tokens at a time"
        f"{' with padding' if p.padding else ''}: predicted for {gpu}, not measured",
        f"  peak   {_reserved(p)}, in the {p.peak_phase.replace('_', ' ')}",
        f"         at {p.peak_operation}",
        f"  fits   {_fit(p)}",
        f"  work   {p.flops / 1e12:,.2f} × 10¹² floating-point operations per step, recomputation included",
        "",
        f"  {'':18}{'at the peak':>12}{'at most':>12}",
    ]
    lines += [
        f"  {name.replace('_', ' '):18}{format_bytes(now):>12}{format_bytes(p.maximum_by_category[name]):>12}  "
        f"{_bar(now, p.peak_allocated_bytes)}".rstrip()
        for name, now in p.by_category.items()
    ]
    lines += ["", f"  {'':18}{'peak':>12}"]
    lines += [
        f"  {name.replace('_', ' '):18}{format_bytes(peak):>12}{'':14}{_bar(peak, p.peak_allocated_bytes)}"
        for name, peak in p.by_phase.items()
    ]
    return "\n".join(lines)


def fitting(found: dict[str, Prediction | WorkbenchError]) -> str:
    """On which of these GPUs it fits, with what each would reserve, and why not on the others."""
    fits = [f"{name} ({format_bytes(p.peak_reserved_bytes or 0)} of {format_bytes(p.capacity_bytes or 0)})"
            for name, p in found.items() if isinstance(p, Prediction) and p.fits]  # fmt: skip
    too_small = [name for name, p in found.items() if isinstance(p, Prediction) and not p.fits]
    lines = [f"  fits on          {', '.join(fits) or 'none of the known GPUs'}"]
    lines += [f"  does not fit on  {', '.join(too_small)}"] if too_small else []
    lines += [
        f"  cannot run on    {name}: {error}" for name, error in found.items() if isinstance(error, WorkbenchError)
    ]
    return "\n".join(lines)


def _reserved(p: Prediction) -> str:
    reserved = f", {format_bytes(p.peak_reserved_bytes)} reserved" if p.peak_reserved_bytes is not None else ""
    return f"{format_bytes(p.peak_allocated_bytes)} allocated{reserved}"


def _fit(p: Prediction) -> str:
    if p.capacity_bytes is None or p.peak_reserved_bytes is None:
        return "no limit known"
    need = f"{format_bytes(p.peak_reserved_bytes)} and about {format_bytes(p.context_bytes)} of CUDA context"
    return f"{'yes' if p.fits else 'NO'}: {need}, of {format_bytes(p.capacity_bytes)}"


def _bar(part: int, whole: int) -> str:
    return "█" * round(BAR_WIDTH * part / whole)
