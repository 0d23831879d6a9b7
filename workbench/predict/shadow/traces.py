"""Traces that were made before: GPUs that choose the same kernels share one."""

from functools import lru_cache

from workbench.gpus.catalogue import Gpu
from workbench.predict.shadow.attention import choose_backend
from workbench.predict.shadow.step import refuse_precision, trace
from workbench.predict.shadow.trace import Trace
from workbench.ranks.shards import Ranks
from workbench.recipe import Recipe


@lru_cache(maxsize=8)
def _kept(recipe: Recipe, on_gpu: bool, padding: bool, ranks: Ranks | None) -> list[Trace]:
    """Of this recipe, to be added to: one for each way in which GPUs choose their kernels."""
    return []


def trace_for(recipe: Recipe, gpu: Gpu | None, padding: bool, ranks: Ranks | None = None) -> Trace:
    """A trace of this recipe in which every choice is the one this GPU makes. Raises as `trace` does."""
    traces = _kept(recipe, gpu is not None, padding, ranks)
    for earlier in traces:
        if all(gpu and choose_backend(gpu, question) is backend for question, backend in earlier.attention.items()):
            refuse_precision(gpu, earlier.uses_bf16)
            return earlier
    new = trace(recipe, gpu, padding, ranks)
    traces.append(new)
    return new
