"""On which cards a recipe fits, in words."""

from workbench.errors import WorkbenchError
from workbench.measure.categories import format_bytes
from workbench.predict.prediction import Prediction


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
