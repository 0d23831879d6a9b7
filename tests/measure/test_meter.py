"""The meter against the PyTorch profiler, which sees every allocation by another way, and against its own promises."""

import gc
import weakref
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

from workbench.base.categories import Category, Phase
from workbench.measure.allocators import allocator_for, live_tensor_bytes
from workbench.measure.meter import Meter, find_attached_tensors
from workbench.techniques import GradientCheckpointing, Lora

B, T, V, LAYERS = 4, 64, 2048, 2
SCALARS = 64  # bytes: eight numbers that operations wrap as tensors of 8 bytes, below the level that is tracked
CONFIGURATIONS = {
    "baseline": (None, None),
    "checkpointing": (GradientCheckpointing(), None),
    "reentrant": (GradientCheckpointing(use_reentrant=True), None),
    "lora": (Lora(), None),
    "bf16": (None, torch.bfloat16),
}


def prepared(technique):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V, n_layer=LAYERS, n_embd=64, n_head=4, n_positions=T, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    model = technique.apply_to(model) if technique else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return model.train(), optimizer, torch.randint(V, (B, T))


def step(model, optimizer, ids, dtype, phase=lambda _: nullcontext()):
    """One training step; `phase` wraps each of its three parts."""
    with phase(Phase.FORWARD), torch.autocast("cpu", dtype) if dtype else nullcontext():
        loss = model(input_ids=ids, labels=ids).loss
    with phase(Phase.BACKWARD):
        loss.backward()
    with phase(Phase.OPTIMIZER_STEP):
        optimizer.step()


def allocations(trace):
    """(time, signed bytes) of every allocation and release on the CPU. `events()` would miss most of them."""
    found, waiting = [], list(trace.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.typed[1].alloc_size))
    return sorted(found, key=lambda entry: entry[0])


def profiled_peak(technique, dtype):
    model, optimizer, ids = prepared(technique)
    owned = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), ids)
    }
    live = peak = sum(owned.values())
    gc.collect()
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as trace:
        step(model, optimizer, ids, dtype)
    for _, size in allocations(trace):
        live += size
        peak = max(peak, live)
    return peak


def metered(technique=None, dtype=None):
    model, optimizer, ids = prepared(technique)
    gc.collect()
    with Meter(model, optimizer) as meter:
        step(model, optimizer, ids, dtype, meter.phase)
    return meter


@cache
def reported(name="baseline"):
    return metered(*CONFIGURATIONS[name]).report()


def test_the_peak_is_that_of_the_profiler(subtests):
    """All but scalars, and but the generator's state, which each checkpoint keeps without an operation for it."""
    for name, (technique, dtype) in CONFIGURATIONS.items():
        with subtests.test(configuration=name):
            unseen = LAYERS * torch.get_rng_state().nbytes if isinstance(technique, GradientCheckpointing) else 0
            difference = profiled_peak(technique, dtype) - reported(name).peak_allocated_bytes
            assert 0 <= difference - unseen <= SCALARS


def test_the_configurations_above_do_differ():
    peaks = {name: reported(name).peak_allocated_bytes for name in CONFIGURATIONS}
    assert peaks["checkpointing"] < peaks["baseline"]
    assert peaks["lora"] < peaks["baseline"]
    assert peaks["bf16"] != peaks["baseline"]


def test_the_categories_sum_to_the_peak_and_the_phases_reach_it(subtests):
    for name in CONFIGURATIONS:
        with subtests.test(configuration=name):
            report = reported(name)
            assert set(report.by_category) == set(Category)
            assert sum(report.by_category.values()) == report.peak_allocated_bytes
            assert report.by_category[Category.UNATTRIBUTED] == 0
            assert max(report.by_phase.values()) == report.by_phase[report.peak_phase] == report.peak_allocated_bytes
            assert set(report.by_phase) == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP}


def test_no_category_is_larger_at_the_peak_than_its_own_maximum():
    report = reported()
    assert all(report.by_category[category] <= report.maximum_by_category[category] for category in Category)


def test_weights_gradients_and_states_are_what_the_formula_says():
    """fp32 AdamW: 4 bytes of weight, 4 of gradient, 8 of state for every parameter, and 4 of counter for a tensor."""
    model, _, _ = prepared(None)
    parameters, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
    maximum = reported().maximum_by_category
    assert maximum[Category.WEIGHTS] == 4 * parameters
    assert maximum[Category.GRADIENTS] == 4 * parameters
    assert maximum[Category.OPTIMIZER_STATES] == 8 * parameters + 4 * tensors


def test_a_report_without_a_measurement_is_an_error():
    model, optimizer, _ = prepared(None)
    with Meter(model, optimizer) as meter:
        pass
    with pytest.raises(ValueError, match=r"nothing was measured: put the training step inside `with meter.phase"):
        meter.report()


def test_what_was_there_before_is_reported_and_not_part_of_the_peak():
    plain = metered().report()
    ballast = torch.zeros(5_000_000)
    loaded = metered().report()
    assert loaded.before_bytes - plain.before_bytes == ballast.numel() * 4
    assert loaded.peak_allocated_bytes == plain.peak_allocated_bytes


def test_a_reading_taken_before_the_model_was_loaded_is_kept():
    model, optimizer, ids = prepared(None)
    with Meter(model, optimizer, before_bytes=123) as meter:
        step(model, optimizer, ids, None, meter.phase)
    assert meter.report().before_bytes == 123


def test_the_source_on_a_machine_without_gpu_is_the_tracker():
    report = reported()
    assert report.memory_source == "cpu-tracker"
    assert report.peak_reserved_bytes is None


def test_what_runs_while_attribution_is_off_is_not_booked():
    model, optimizer, ids = prepared(None)
    with Meter(model, optimizer) as meter:
        step(model, optimizer, ids, None, meter.phase)
        peak = meter.report().peak_allocated_bytes
        meter.set_tracking(False)
        large = torch.zeros(100_000_000 // 4)
        meter.set_tracking(True)
        with meter.phase(Phase.EVALUATION):
            model(input_ids=ids[:1])
    assert large.numel() == 25_000_000
    assert meter.report().peak_allocated_bytes == peak


def test_gradients_of_a_step_that_was_not_attributed_are_booked_when_attribution_comes_back():
    model, optimizer, ids = prepared(None)
    with Meter(model, optimizer) as meter:
        meter.set_tracking(False)
        step(model, optimizer, ids, None, meter.phase)
        meter.set_tracking(True)
        with meter.phase(Phase.EVALUATION):
            model(input_ids=ids[:1])
    parameters = sum(p.numel() for p in model.parameters())
    maximum = meter.report().maximum_by_category
    assert maximum[Category.GRADIENTS] == 4 * parameters
    assert maximum[Category.OPTIMIZER_STATES] == 8 * parameters + 4 * len(list(model.parameters()))


def test_two_steps_have_the_peak_of_two_steps_not_their_sum():
    """The second step starts with the states of the first; without set_to_none its gradients would be there twice."""
    model, optimizer, ids = prepared(None)
    with Meter(model, optimizer) as meter:
        peaks = []
        for _ in range(4):
            step(model, optimizer, ids, None, meter.phase)
            optimizer.zero_grad()
            peaks.append(meter.report().peak_allocated_bytes)
    assert peaks[1] == peaks[2] == peaks[3]


class FreeingAdamW(torch.optim.AdamW):
    """Has no step of its own: each parameter's gradient is used and freed as soon as the backward pass has made it."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.freed_bytes = []
        for parameter in self.param_groups[0]["params"]:
            parameter.register_post_accumulate_grad_hook(self.use)

    def use(self, parameter):
        parameter.data.add_(parameter.grad, alpha=-1e-3)
        self.freed_bytes.append(parameter.grad.nbytes)
        parameter.grad = None


def metered_in_backward(dtype=None):
    model, _, ids = prepared(None)
    with Meter(model) as meter:
        optimizer = FreeingAdamW(model.parameters())
        meter.watch(optimizer)
        step(model, optimizer, ids, dtype, meter.phase)
    return meter, model, optimizer


def test_a_gradient_that_the_backward_pass_frees_is_a_gradient():
    meter, model, optimizer = metered_in_backward()
    assert len(optimizer.freed_bytes) == len(list(model.parameters()))
    report = meter.report()
    # the embedding's is the largest and comes last and alone
    assert report.maximum_by_category[Category.GRADIENTS] == max(optimizer.freed_bytes) == 4 * V * 64
    assert sum(report.by_category.values()) == report.peak_allocated_bytes
    assert report.by_category[Category.UNATTRIBUTED] == 0


def test_labels_in_the_backward_pass_change_no_number():
    model, _, ids = prepared(None)
    model(input_ids=ids, labels=ids).loss.backward()
    again, _, ids = prepared(None)
    with Meter(again) as meter:
        step(again, torch.optim.SGD(again.parameters(), lr=0), ids, None, meter.phase)
    for plain, labelled in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(plain.grad, labelled.grad)


def test_only_what_trains_has_a_hook_and_only_while_the_meter_is_entered():
    model, _, _ = prepared(Lora())
    hooked = lambda: [bool(p._post_accumulate_grad_hooks) for p in model.parameters()]  # noqa: E731
    with Meter(model):
        assert hooked() == [p.requires_grad for p in model.parameters()]
    assert not any(hooked())


def test_gradients_are_not_labelled_while_attribution_is_off(monkeypatch):
    asked = []
    model, optimizer, ids = prepared(None)
    with Meter(model, optimizer) as meter:
        monkeypatch.setattr(meter.tracker, "label", lambda *asked_for: asked.append(asked_for))
        meter.set_tracking(False)
        step(model, optimizer, ids, None, meter.phase)
    assert asked == []


def test_live_tensor_bytes_counts_a_storage_once():
    gc.collect()
    before = live_tensor_bytes("cpu")
    kept = torch.zeros(1000)
    views = [kept[:10], kept.view(10, 100)]
    assert len(views) == 2
    assert live_tensor_bytes("cpu") - before == 4000


class Scales:
    """As a quantized weight keeps them: neither parameters nor buffers."""

    def __init__(self, n):
        self.scales, self.inner = torch.ones(n), {"of the scales": [torch.ones(n // 4)]}


def test_tensors_that_hang_on_a_weight_are_weights():
    model = torch.nn.Linear(8, 8)
    model.weight.quant_state = Scales(1000)
    model.table = (torch.ones(50),)
    assert sorted(t.numel() for t in find_attached_tensors(model)) == [8, 50, 64, 250, 1000]
    with Meter(model) as meter:
        model.later = torch.ones(10_000)  # came during training: not a weight
        with meter.phase(Phase.FORWARD):
            model(torch.ones(4, 8)).sum().backward()
    report = meter.report()
    assert report.maximum_by_category[Category.WEIGHTS] == 4 * (8 + 50 + 64 + 250 + 1000)
    assert sum(report.by_category.values()) == report.peak_allocated_bytes


def test_the_meter_keeps_no_tensor_alive_that_hangs_on_a_weight():
    model = torch.nn.Linear(8, 8)
    model.weight.quant_state = Scales(1000)
    meter = Meter(model)
    with meter, meter.phase(Phase.FORWARD):
        del model.weight.quant_state
        gc.collect()
        model(torch.ones(4, 8))
    assert meter.report().peak_allocated_bytes < 4000


def test_what_only_a_circle_of_references_keeps_is_gone_before_a_run_is_measured(monkeypatch, subtests):
    """On CUDA and on Apple's GPUs: its memory would be in use before, and the cache could not give it back."""

    class Circle:
        def __init__(self):
            self.itself = self

    monkeypatch.setattr("torch._C._cuda_clearCublasWorkspaces", lambda: None, raising=False)
    for name in ("cuda", "mps"):
        with subtests.test(device=name):
            circle = Circle()
            kept = weakref.ref(circle)
            emptied = []
            for function in ("empty_cache", "reset_peak_memory_stats"):
                monkeypatch.setattr(f"torch.{name}.{function}", lambda: emptied.append(kept()), raising=False)  # noqa: B023
            gc.disable()
            try:
                del circle
                allocator_for(torch.device(name)).prepare()
            finally:
                gc.enable()
            assert emptied[0] is None
