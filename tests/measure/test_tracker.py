from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from workbench.base.categories import Category, Phase
from workbench.measure.meter import Meter
from workbench.measure.tracker import StorageTracker

FLOAT = 4
V = 512  # vocabulary of the model below


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=V, n_layer=2, n_embd=32, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def parameter_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())  # tied parameters come once


def now(tracker):
    """Live bytes by category at this moment, without those that are empty."""
    return {category: size for category, size in tracker.timeline().by_category(-1).items() if size}


def one_step(model, optimizer):
    """A metered training step."""
    ids = torch.randint(V, (4, 16))
    with Meter(model, optimizer) as meter:
        with meter.phase(Phase.FORWARD):
            loss = model(input_ids=ids, labels=ids).loss
        with meter.phase(Phase.BACKWARD):
            loss.backward()
        with meter.phase(Phase.OPTIMIZER_STEP):
            optimizer.step()
    return meter


def test_a_new_tensor_is_booked_with_its_size():
    with StorageTracker("cpu") as tracker:
        kept = torch.zeros(1000)
    assert now(tracker) == {Category.TEMPORARIES: kept.numel() * FLOAT}


def test_views_are_not_counted_again():
    with StorageTracker("cpu") as tracker:
        kept = torch.zeros(1000)
        views = [kept.view(10, 100), kept[5:], kept.view(20, 50).T, kept.detach()]
    assert len(views) == 4
    assert now(tracker) == {Category.TEMPORARIES: 1000 * FLOAT}


def test_a_view_keeps_its_whole_storage_alive():
    with StorageTracker("cpu") as tracker:
        view = torch.zeros(1000)[:1]
        assert view.numel() == 1
        assert now(tracker) == {Category.TEMPORARIES: 1000 * FLOAT}


def test_an_operation_in_place_books_nothing():
    with StorageTracker("cpu") as tracker:
        kept = torch.zeros(1000)
        kept.add_(1)
        torch.add(kept, 1, out=kept)
    assert now(tracker) == {Category.TEMPORARIES: 1000 * FLOAT}


def test_a_freed_tensor_leaves():
    with StorageTracker("cpu") as tracker:
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
    assert now(tracker) == {Category.TEMPORARIES: second.numel() * FLOAT}
    assert tracker.timeline().total.max() == 1500 * FLOAT


def test_a_tensor_freed_after_the_tracker_stopped_leaves_too():
    with StorageTracker("cpu") as tracker:
        kept = torch.zeros(1000)
    del kept
    assert now(tracker) == {}


def test_the_tracker_keeps_nothing_alive():
    import weakref

    with StorageTracker("cpu"):
        kept = torch.zeros(1000)
        watcher = weakref.ref(kept.untyped_storage())
        del kept
        assert watcher() is None


def test_another_device_is_not_counted():
    with StorageTracker("cpu") as tracker:
        elsewhere = torch.zeros(1000, device="meta")
    assert elsewhere.numel() == 1000
    assert now(tracker) == {}


def test_tied_weights_are_counted_once(model):
    tracker = StorageTracker("cpu", V)
    tracker.label([*model.transformer.wte.parameters(), *model.lm_head.parameters()], Category.WEIGHTS)
    assert now(tracker) == {Category.WEIGHTS: V * 32 * FLOAT}
    tracker.label(model.parameters(), Category.WEIGHTS)
    assert now(tracker) == {Category.WEIGHTS: parameter_bytes(model)}


def test_what_outlives_the_forward_pass_was_an_activation_and_the_rest_was_temporary():
    x = torch.ones(1000, requires_grad=True)
    with StorageTracker("cpu") as tracker:
        tracker.enter_phase(Phase.FORWARD)
        y = (x + 1).exp()  # exp keeps its result for the backward pass; the sum is not needed again
        tracker.enter_phase(Phase.BACKWARD)
        assert now(tracker) == {Category.ACTIVATIONS: y.numel() * FLOAT}
    timeline = tracker.timeline()
    assert timeline.live[list(Category).index(Category.TEMPORARIES)].max() == 1000 * FLOAT
    assert timeline.total.max() == 2000 * FLOAT


def test_what_is_made_in_the_backward_pass_is_temporary():
    x = torch.ones(1000, requires_grad=True)
    y = x.exp()
    with StorageTracker("cpu") as tracker:
        tracker.enter_phase(Phase.BACKWARD)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.shape == x.shape
    assert {tracker.category(s) for s in tracker.storages if s.nbytes == 1000 * FLOAT} == {Category.TEMPORARIES}


def test_activations_recomputed_under_checkpointing_are_activations(subtests):
    for use_reentrant in (False, True):
        x = torch.ones(1000, requires_grad=True)
        with StorageTracker("cpu") as tracker:
            tracker.enter_phase(Phase.FORWARD)
            loss = checkpoint(lambda t: t.exp().exp().exp(), x, use_reentrant=use_reentrant).sum()
            tracker.enter_phase(Phase.BACKWARD)
            loss.backward()
            tracker.enter_phase(None)
        large = [s for s in tracker.storages if s.nbytes == 1000 * FLOAT]
        activations = [s for s in large if tracker.category(s) is Category.ACTIVATIONS]
        recomputed = [s for s in activations if s.phase is Phase.BACKWARD]
        with subtests.test(use_reentrant=use_reentrant):
            assert len(recomputed) == 3
            assert len(activations) - len(recomputed) <= 1  # of the first pass the result alone may be kept


def test_without_checkpointing_no_activation_is_made_in_the_backward_pass(model):
    tracker = one_step(model, torch.optim.AdamW(model.parameters())).tracker
    born_late = [
        s for s in tracker.storages if s.phase is Phase.BACKWARD and tracker.category(s) is Category.ACTIVATIONS
    ]
    assert all(s.nbytes == FLOAT for s in born_late)  # the number 1 from which the backward pass starts


def test_logits_and_their_gradient_are_recognised():
    hidden, head = torch.ones(4, 16, 32, requires_grad=True), torch.ones(V, 32)
    with StorageTracker("cpu", V) as tracker:
        tracker.label([head], Category.WEIGHTS)
        tracker.enter_phase(Phase.FORWARD)
        logits = torch.nn.functional.linear(hidden, head)
        assert now(tracker)[Category.LOGITS_AND_LOSS] == 4 * 16 * V * FLOAT
        loss = torch.nn.functional.cross_entropy(logits.view(-1, V), torch.zeros(64, dtype=torch.long))
        assert now(tracker)[Category.LOGITS_AND_LOSS] == 2 * 4 * 16 * V * FLOAT  # with the log-probabilities
        tracker.enter_phase(Phase.BACKWARD)
        loss.backward()
    made_in_backward = [
        s.nbytes for s in tracker.storages
        if s.phase is Phase.BACKWARD and tracker.category(s) is Category.LOGITS_AND_LOSS
    ]  # fmt: skip
    assert set(made_in_backward) == {4 * 16 * V * FLOAT}


def test_a_copy_of_the_embedding_in_lower_precision_is_no_logits():
    """Autocast makes one for the output layer and multiplies by its transpose, (C, V)."""
    hidden, head = torch.ones(4, 16, 32), torch.ones(V, 32)
    with StorageTracker("cpu", V) as tracker:
        tracker.label([head], Category.WEIGHTS)
        tracker.enter_phase(Phase.FORWARD)
        with torch.autocast("cpu", torch.bfloat16):
            logits = torch.nn.functional.linear(hidden, head)
    logit_bytes = [s.nbytes for s in tracker.storages if tracker.category(s) is Category.LOGITS_AND_LOSS]
    assert logit_bytes == [logits.numel() * 2]


def test_the_gradient_of_the_tied_embedding_is_a_gradient_from_birth(model):
    meter = one_step(model, torch.optim.AdamW(model.parameters()))
    assert model.lm_head.weight.grad is model.transformer.wte.weight.grad
    tied = meter.tracker._alive[model.lm_head.weight.grad.untyped_storage()._cdata]
    assert tied.label is Category.GRADIENTS
    assert tied.phase is Phase.BACKWARD
    assert meter.timeline().by_category(tied.born)[Category.GRADIENTS] >= V * 32 * FLOAT
    assert now(meter.tracker)[Category.GRADIENTS] == parameter_bytes(model)


def test_optimizer_states_are_labelled(model, subtests):
    tensors_per_parameter = {torch.optim.AdamW: 2, torch.optim.SGD: 0, torch.optim.Adagrad: 1}
    for kind, tensors in tensors_per_parameter.items():
        with subtests.test(kind=kind.__name__):
            optimizer = kind(model.parameters(), lr=1e-3)
            meter = one_step(model, optimizer)
            counters = sum("step" in state for state in optimizer.state.values()) * FLOAT
            expected = tensors * parameter_bytes(model) + counters
            assert now(meter.tracker).get(Category.OPTIMIZER_STATES, 0) == expected
            model.zero_grad()


def test_a_state_made_in_the_step_was_a_state_from_birth(model):
    meter = one_step(model, torch.optim.AdamW(model.parameters()))
    born = [s.phase for s in meter.tracker.storages if meter.tracker.category(s) is Category.OPTIMIZER_STATES]
    assert set(born) == {Phase.OPTIMIZER_STEP}


def test_categories_sum_to_the_live_bytes_at_every_event(model):
    meter = one_step(model, torch.optim.AdamW(model.parameters()))
    timeline, storages = meter.timeline(), meter.tracker.storages
    assert timeline.live.min() == 0
    assert timeline.live.dtype == np.int64
    events = len(timeline.total)
    assert events > 200
    for event in range(events):
        alive = sum(s.nbytes for s in storages if s.born <= event and (s.died is None or event < s.died))
        assert sum(timeline.by_category(event).values()) == timeline.total[event] == alive


def test_every_event_has_its_phase(model):
    timeline = one_step(model, torch.optim.AdamW(model.parameters())).timeline()
    order = [phase for phase, before in zip(timeline.phases, (None, *timeline.phases), strict=False) if phase != before]
    assert [p for p in order if p is not None] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP]
    assert timeline.peak(Phase.EVALUATION) == -1
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP):
        assert timeline.phases[timeline.peak(phase)] is phase
        assert timeline.total[timeline.peak(phase)] == max(
            total for total, p in zip(timeline.total, timeline.phases, strict=True) if p is phase
        )


def test_tracking_changes_no_number():
    torch.manual_seed(0)
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    plain = torch.autograd.grad((x @ w).softmax(-1).square().sum(), w)[0]
    with StorageTracker("cpu", 64):
        tracked = torch.autograd.grad((x @ w).softmax(-1).square().sum(), w)[0]
    assert torch.equal(plain, tracked)


def test_live_bytes_follow_every_storage():
    with StorageTracker("cpu") as tracker:
        one = torch.zeros(1000)
        assert tracker.live_bytes == 4000
        two = one + 1
        assert tracker.live_bytes == 8000
        del one
        assert tracker.live_bytes == 4000
    del two
    assert tracker.live_bytes == 0


def test_an_operation_beyond_the_cap_is_refused_inside_a_phase_and_said_in_bytes():
    with StorageTracker("cpu", cap_bytes=10_000) as tracker:
        kept = torch.zeros(2000)
        outside = torch.zeros(2000)  # no phase yet: whoever loads a model is not refused half-way
        assert tracker.live_bytes == 16_000
        del outside
        tracker.enter_phase(Phase.BACKWARD)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            kept + 1
    words = "the backward phase would hold 15.6 KiB of tensors; the memory cap is 9.8 KiB."
    assert str(caught.value) == words
    del caught
    assert tracker.live_bytes == 8000


def test_up_to_the_cap_and_not_one_byte_more():
    for cap, fits in ((8000, True), (7999, False)):
        with StorageTracker("cpu", cap_bytes=cap) as tracker:
            tracker.enter_phase(Phase.FORWARD)
            with nullcontext() if fits else pytest.raises(torch.OutOfMemoryError):
                torch.zeros(2000)
