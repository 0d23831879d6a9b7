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
    """Peak, categories and phases of one prediction."""
    p = prediction
    gpu = GPUS[p.gpu].title if p.gpu in GPUS else "this machine's kernels"
    reserved = f", {format_bytes(p.peak_reserved_bytes)} reserved" if p.peak_reserved_bytes is not None else ""
    lines = [
        f"{p.label} on {p.model}, {p.micro_batch_size} × {p.recipe['sequence_length']} tokens at a time"
        f"{' with padding' if p.padding else ''}{_ranks(p)}: predicted for {gpu} by "
        f"{engine_words(p.source)}, not measured",
        f"  peak   {format_bytes(p.peak_allocated_bytes)} allocated{reserved}, in the {p.peak_phase.replace('_', ' ')}",
        f"         at {p.peak_operation}",
        f"  fits   {_fit(p)}",
        f"  work   {p.flops / 1e12:,.2f} × 10¹² floating-point operations per step, recomputation included",
        "",
        f"  {'':18}{'at the peak':>12}{'at most':>12}",
    ]
    most = {name: format_bytes(size) for name, size in p.maximum_by_category.items()}
    lines += [_line(name, size, most[name], p) for name, size in p.by_category.items()]
    lines += [f"  note   {note}" for note, here in ((ROUTING, p.has_experts), (MESSAGES, p.ranks > 1)) if here]
    lines += ["", f"  {'':18}{'peak':>12}"]
    return "\n".join([*lines, *(_line(name, size, "", p) for name, size in p.by_phase.items())])


def _ranks(p: Prediction) -> str:
    """Whose memory it is, of several ranks."""
    return f", on each of {p.ranks:,} ranks (shard {p.shard})" if p.shard else ""


def fitting(found: dict[str, Prediction | WorkbenchError]) -> str:
    """On which of these GPUs it fits, with what each would reserve, and why not on the others."""
    predicted = {name: p for name, p in found.items() if isinstance(p, Prediction)}
    fits = [
        f"    {name:14}{format_bytes(p.peak_reserved_bytes or 0):>12}{format_bytes(p.capacity_bytes or 0):>12}"
        for name, p in predicted.items()
        if p.fits
    ]
    too_small = [name for name, p in predicted.items() if not p.fits]
    head = f"  {'fits on':16}{'reserves':>12}{'has':>12}"
    lines = [head, *fits] if fits else ["  fits on          none of the known GPUs"]
    lines += [f"  does not fit on  {', '.join(too_small)}"] if too_small else []
    errors = {name: error for name, error in found.items() if isinstance(error, WorkbenchError)}
    return "\n".join([*lines, *(f"  cannot run on    {name}: {error}" for name, error in errors.items())])


def _fit(p: Prediction) -> str:
    if p.capacity_bytes is None or p.peak_reserved_bytes is None:
        return "no limit known"
    need = f"{format_bytes(p.peak_reserved_bytes)} and about {format_bytes(p.context_bytes)} of CUDA context"
    return f"{'yes' if p.fits else 'NO'}: {need}, of {format_bytes(p.capacity_bytes)}"


def _line(name: str, size: int, most: str, p: Prediction) -> str:
    bar = "█" * round(BAR_WIDTH * size / p.peak_allocated_bytes)
    return f"  {name.replace('_', ' '):18}{format_bytes(size):>12}{most:>12}  {bar}".rstrip()
