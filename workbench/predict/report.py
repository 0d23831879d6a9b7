"""A prediction as text: a table with bars, and the GPUs it fits on."""

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS
from workbench.measure.categories import format_bytes
from workbench.predict.engine import engine_words
from workbench.predict.prediction import Prediction

BAR_WIDTH = 40
ROUTING = "a mixture of experts: which of them a token goes to depends on values, so real peaks differ"
MESSAGES = "what NCCL takes for its messages comes beside this, outside of PyTorch's allocator"


def prediction_text(prediction: Prediction) -> str:
    """Peak, categories and phases of one prediction: what `print(prediction)` shows."""
    p = prediction
    gpu = GPUS[p.gpu].title if p.gpu in GPUS else "this machine's kernels"
    padding = " with padding" if p.padding else ""
    ranks = f", on each of {p.ranks:,} ranks (shard {p.shard})" if p.shard else ""
    reserved = f", {format_bytes(p.peak_reserved_bytes)} reserved" if p.peak_reserved_bytes is not None else ""
    lines = [
        f"{p.label} on {p.model}, {p.micro_batch_size} × {p.recipe['sequence_length']} tokens at a time"
        f"{padding}{ranks}: predicted for {gpu} by {engine_words(p.source)}, not measured",
        f"  peak   {format_bytes(p.peak_allocated_bytes)} allocated{reserved}, in the {p.peak_phase.replace('_', ' ')}",
        f"         at {p.peak_operation}",
        f"  fits   {_fit(p)}",
        f"  work   {p.flops / 1e12:,.2f} × 10¹² floating-point operations per step, recomputation included",
        "",
        f"  {'':18}{'at the peak':>12}{'at most':>12}",
    ]
    for category, size in p.by_category.items():
        lines.append(_line(category, size, format_bytes(p.maximum_by_category[category]), p))
    if p.has_experts:
        lines.append(f"  note   {ROUTING}")
    if p.ranks > 1:
        lines.append(f"  note   {MESSAGES}")
    lines += ["", f"  {'':18}{'peak':>12}"]
    for phase, size in p.by_phase.items():
        lines.append(_line(phase, size, "", p))
    return "\n".join(lines)


def _fit(p: Prediction) -> str:
    if p.capacity_bytes is None or p.peak_reserved_bytes is None:
        return "no limit known"
    need = f"{format_bytes(p.peak_reserved_bytes)} and about {format_bytes(p.context_bytes)} of CUDA context"
    return f"{'yes' if p.fits else 'NO'}: {need}, of {format_bytes(p.capacity_bytes)}"


def _line(name: str, size: int, most: str, p: Prediction) -> str:
    bar = "█" * round(BAR_WIDTH * size / p.peak_allocated_bytes)
    return f"  {name.replace('_', ' '):18}{format_bytes(size):>12}{most:>12}  {bar}".rstrip()


def fitting(answers: dict[str, Prediction | WorkbenchError]) -> str:
    """On which of these GPUs it fits, with what each would reserve, and why not on the others."""
    fits = []
    too_small = []
    cannot = []
    for gpu, answer in answers.items():
        if isinstance(answer, WorkbenchError):
            cannot.append(f"  cannot run on    {gpu}: {answer}")
        elif answer.fits:
            reserves = format_bytes(answer.peak_reserved_bytes or 0)
            fits.append(f"    {gpu:14}{reserves:>12}{format_bytes(answer.capacity_bytes or 0):>12}")
        else:
            too_small.append(gpu)
    lines = ["  fits on          none of the known GPUs"]
    if fits:
        lines = [f"  {'fits on':16}{'reserves':>12}{'has':>12}", *fits]
    if too_small:
        lines.append(f"  does not fit on  {', '.join(too_small)}")
    return "\n".join([*lines, *cannot])
