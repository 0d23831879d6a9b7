"""Traces that were made before: GPUs that choose the same kernels share one."""

from collections import OrderedDict

from workbench.gpus.catalogue import Gpu
from workbench.predict.shadow.attention import choose_backend
from workbench.predict.shadow.step import refuse_precision, trace
from workbench.predict.shadow.trace import Trace
from workbench.recipe import Recipe

TRACES_KEPT = 8

_traces: OrderedDict[tuple[Recipe, bool, bool], list[Trace]] = OrderedDict()


def trace_for(recipe: Recipe, gpu: Gpu | None, padding: bool) -> Trace:
    """A trace of this recipe in which every choice is the one this GPU makes. Raises as `trace` does."""
    key = (recipe, padding, gpu is None)
    known = _traces.setdefault(key, [])
    _traces.move_to_end(key)
    asked = (one for one in known if all(gpu and choose_backend(gpu, q) is a for q, a in one.attention.items()))
    found = next(asked, None)
    if found is None:
        found = trace(recipe, gpu, padding)
        known.append(found)
        if len(_traces) > TRACES_KEPT:
            _traces.popitem(last=False)
    else:
        refuse_precision(gpu, found.uses_bf16)
    return found
