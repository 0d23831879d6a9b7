from dataclasses import replace

import pytest
import torch
import torch._functorch.config
from every_step import EveryStep
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import predict
from workbench.base.categories import Category
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.measure.tracker import StorageTracker
from workbench.techniques import Padding, TorchCompile
from workbench.techniques.torch_compile import make_allocation_visible
from workbench.training.run import run
from workbench.training.stopwatch import WARM_UP_STEPS

ROUNDING = 1e-5  # relative; 2.3e-07 was seen
SIZES = (Category.ACTIVATIONS, Category.WEIGHTS, Category.OPTIMIZER_STATES, Category.LOGITS_AND_LOSS)


@pytest.mark.usefixtures("cpp_compiler")
def test_the_losses_are_the_same_up_to_rounding_and_nothing_is_compiled_in_a_timed_step(recipe, fine_tuned):
    counters.clear()
    compiled: list[int] = []
    before = fine_tuned(recipe)
    looking = EveryStep(lambda: compiled.append(counters["frames"]["total"]))
    after = run(recipe | TorchCompile(), device="cpu", callbacks=[looking])
    assert after.losses == pytest.approx(before.losses, rel=ROUNDING)
    assert after.held_out_loss == pytest.approx(before.held_out_loss, rel=ROUNDING)
    assert after.losses[-1] != after.losses[0]
    assert (len(set(compiled)), min(compiled) > 0, after.timed_steps) == (1, True, recipe.steps - WARM_UP_STEPS)
    kept = {category: after.maximum_by_category[category] / before.maximum_by_category[category] for category in SIZES}
    assert kept.pop(Category.ACTIVATIONS) < 0.7
    assert set(kept.values()) == {1.0}


@pytest.mark.usefixtures("cpp_compiler")
def test_another_budget_makes_another_graph_and_the_process_is_left_as_it_was(recipe, fine_tuned):
    """The second would get the first one's, or none, as after eight models, were these not forgotten."""
    guards, config = torch._C._dynamo.guards, torch._functorch.config
    taken, budget = guards._empty_strided_cpu, config.activation_memory_budget
    kept = []
    with torch._dynamo.config.patch(recompile_limit=1):
        for share in (1.0, 0.0):
            record = run(replace(recipe, steps=1) | TorchCompile(memory_budget=share), device="cpu")
            kept.append(record.maximum_by_category[Category.ACTIVATIONS])
    assert kept[1] < 0.1 * kept[0]
    assert (guards._empty_strided_cpu, config.activation_memory_budget) == (taken, budget)


@pytest.mark.usefixtures("cpp_compiler")
def test_what_a_compiled_function_takes_is_what_its_graph_says():
    """One kernel with two results and nothing between them; as it is written, there are five tensors."""
    numbers = torch.ones(1000, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin().cos() * 2).exp()

    taken = {}
    for name, called in (("as written", function), ("compiled", torch.compile(function))):
        with TorchCompile().run_context(), StorageTracker("cpu") as tracker:
            called(numbers)
            taken[name] = sum(storage.nbytes for storage in tracker.storages)
    assert taken["as written"] == 4 * 4000
    assert taken["compiled"] == 4000


def test_memory_is_taken_through_the_dispatcher_only_while_something_watches(monkeypatch):
    asked = []

    def plain(*request):
        asked.append(request)
        return torch.empty(0)

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            watched.append(str(function))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", plain)
    watched, take = [], make_allocation_visible("cpu")
    take((2, 3), (3, 1), torch.float32)
    with Watching():
        made = take((2, 3), (1, 2), torch.bfloat16)
    assert asked == [((2, 3), (3, 1), torch.float32)]
    assert watched == ["aten.empty_strided.default"]
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.bfloat16)


def test_what_is_not_there_is_said(monkeypatch, subtests):
    for device, variable, words in (
        ("mps", "", "needs a CPU or CUDA, not mps: use --device cpu"),
        ("cpu", "CXX", "needs the compiler no-such-compiler: install it, or name another by CC and CXX"),
        ("cuda", "CC", "needs compute capability 7.0 and Triton: pip install triton"),
    ):
        with subtests.test(device), monkeypatch.context() as patch:
            if variable:
                patch.setenv(variable, "no-such-compiler")
            capability = (6, 1) if device == "cuda" else None  # a card from before Triton's
            assert words in TorchCompile().missing(Device(device, compute_capability=capability))


def test_it_is_said_before_anything_is_loaded(recipe, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnavailableError, match="torch_compile needs the compiler no-such-comp"):
        run(recipe | TorchCompile(), device="cpu")


def test_what_cannot_go_together_or_be_predicted_is_refused_with_the_cure(recipe):
    assert recipe | Padding(dynamic=False) | TorchCompile()
    with pytest.raises(ConfigurationError, match="memory_budget must be .* at most 1, got 1.5"):
        TorchCompile(memory_budget=1.5)
    with pytest.raises(
        ConfigurationError, match="arguments cannot have torch_compile. Use the technique torch_compile"
    ):
        replace(recipe, arguments={"torch_compile": True})
    for gpu in ("cpu", "h100"):
        words = "predict: torch_compile needs an emulated GPU and Triton. Or measure it with `run`"
        with pytest.raises(ConfigurationError, match=words):
            predict(recipe | TorchCompile(), gpu, engine="shadow")
