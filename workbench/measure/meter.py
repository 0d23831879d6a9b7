"""Measuring the memory of a training run: one `with` block, phases inside it, a report at the end.

    with Meter(model, optimizer) as meter:
        with meter.phase(Phase.FORWARD):
            loss = model(input_ids=x, labels=x).loss
        with meter.phase(Phase.BACKWARD):
            loss.backward()
    meter.report().peak_allocated_bytes

On a GPU the peak comes from the allocator and holds for the whole run. Attribution to categories comes from the
tracker, which costs Python time at every operation; so the training loop switches it on for the untimed warm-up steps
and for evaluations only (`set_tracking`). On the CPU the tracker is also the source of the peak: there it is that of
the warm-up steps and the evaluations.

Weights, gradients and optimizer states are labelled whenever a phase begins or ends. A gradient may be used and freed
before the backward phase ends, so gradients are also labelled one by one as they arrive, by a hook on every parameter.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from workbench.base.categories import Category, Phase
from workbench.base.offloaded import DISK, HOST
from workbench.measure.allocators import allocator_for, parts, storage_bytes
from workbench.measure.timeline import Timeline
from workbench.measure.tracker import StorageTracker


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one run, in bytes. `by_category` is read at the instant of the peak and sums to it exactly.

    `maximum_by_category` is each category's own maximum, whenever that was; only `unattributed`, which no tracker sees,
    is again that of the peak. `peak_reserved_bytes` is None where the allocator has no such number.

    `peak_host_bytes` and `peak_disk_bytes` are what a technique held there, `moved_bytes` what it moved there and back;
    None: nothing. On a GPU, model, gradients and optimizer states that lay in host memory count as held there too.
    """

    memory_source: str
    before_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_phase: Phase
    by_category: dict[Category, int]
    maximum_by_category: dict[Category, int]
    by_phase: dict[Phase, int]
    peak_host_bytes: int | None
    peak_disk_bytes: int | None
    moved_bytes: int | None


class Meter:
    """A meter for the memory of the device that the model is on.

    Args:
        model: its parameters and buffers, and tensors that hang on them when it comes, such as the scales of quantized
            weights, are the weights; `model.config.vocab_size`, if any, tells logits apart.
        optimizer: its state tensors are the optimizer states. `Trainer` makes its optimizer late: give that to `watch`.
        tracker: another than the device's own, as in a prediction.
        device: the one that computes, if the model's parameters wait on another.

    The peak is that of the run itself: what was in use before the model came is `before_bytes`, not part of it. Pass
    `before_bytes` when the model was loaded after that reading was taken, as the training loop does.

    `cap_bytes` is a limit for the bytes of tensors, watched by the tracker while it is switched on; on CUDA, where the
    allocator keeps to a limit by itself (`workbench.measure.allocators.cap_memory`), it is ignored here. What failed
    or was refused, the `tracker` says.
    """

    tracker_kind: type[StorageTracker] = StorageTracker

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        before_bytes: int | None = None,
        cap_bytes: int | None = None,
        tracker: StorageTracker | None = None,
        device: torch.device | None = None,
    ) -> None:
        parameters = list(model.parameters())
        device = device or parameters[0].device
        self._allocator = allocator_for(device)
        self.enforces_cap = cap_bytes is not None and not self._allocator.enforces_caps
        if not self.enforces_cap:
            cap_bytes = None
        vocabulary_size = getattr(getattr(model, "config", None), "vocab_size", None)
        self.tracker = tracker or self.tracker_kind(device.type, vocabulary_size, cap_bytes=cap_bytes)
        self._model = model
        self._optimizer = optimizer
        self._device_type = device.type
        self._attached = [weakref.ref(tensor) for tensor in find_attached_tensors(model)]
        self._before = before_bytes or 0
        self._reads_before = before_bytes is None
        self._peaks: dict[Phase, int] = {}
        self._reserved: int | None = None
        self._host_bytes = 0  # the most that model, gradients and optimizer states of a GPU had on the host
        self._phase: Phase | None = None
        self._is_tracking = False
        # Hooks run in the order in which they were registered: an optimizer's, which frees the gradient, runs later.
        self._hooks = ExitStack()
        for parameter in parameters:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._label_gradient)
                self._hooks.callback(hook.remove)

    def __enter__(self) -> Self:
        self._allocator.prepare()
        for account in (HOST, DISK):
            account.reset()
        if self._reads_before:
            tensors = chain.from_iterable(self._tensors_by_category().values())
            self._before = max(self._allocator.in_use() - storage_bytes(tensors, self._device_type), 0)
        self.set_tracking(True)
        return self

    def __exit__(self, *_: object) -> None:
        self.enter_phase(None)
        self.set_tracking(False)
        self._hooks.close()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Take this optimizer's state tensors for the optimizer states from now on."""
        self._optimizer = optimizer

    def label_inputs(self, inputs: Iterable[Any]) -> None:
        """Label the tensors that a step trains on, which were made while the tracker was off.

        They are temporaries: nobody keeps a batch after its step.
        """
        if self._is_tracking:
            tensors = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
            self.tracker.label(tensors, Category.TEMPORARIES)

    def set_tracking(self, on: bool) -> None:
        """Switch the tracker on or off. Calls must nest with other dispatch modes."""
        if on and not self._is_tracking:
            self._label_tensors()
            self.tracker.__enter__()  # type: ignore[no-untyped-call]
        elif not on and self._is_tracking:
            self.tracker.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_tracking = on

    def enter_phase(self, phase: Phase | None) -> None:
        """Read off the peak of the phase that ends, and begin another. None: what follows is in no phase."""
        allocated, reserved = self._allocator.take_peaks()
        if self._phase is not None:
            self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), allocated - self._before)
        if reserved is not None:
            self._reserved = max(self._reserved or 0, reserved)
        if self._is_tracking:
            self._label_tensors()
            self.tracker.enter_phase(phase)
        self._phase = phase

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Let the memory of a `with` block belong to a phase."""
        self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(None)

    def _tensors_by_category(self) -> dict[Category, list[torch.Tensor]]:
        """Return the tensors that the model and the optimizer hold now, on any device."""
        parameters = list(self._model.parameters())
        weights: list[torch.Tensor] = [*parameters, *self._model.buffers()]
        for reference in self._attached:
            tensor = reference()
            if tensor is not None:
                weights.append(tensor)
        states: list[torch.Tensor] = []
        if self._optimizer:
            for state in self._optimizer.state.values():
                for value in state.values():
                    states += parts(value)
        return {
            Category.WEIGHTS: weights,
            Category.GRADIENTS: [parameter.grad for parameter in parameters if parameter.grad is not None],
            Category.OPTIMIZER_STATES: states,
        }

    def _label_tensors(self) -> None:
        by_category = self._tensors_by_category()
        for category, tensors in by_category.items():
            self.tracker.label(tensors, category)
        if self._device_type != "cpu":
            # Single numbers, such as Adam's count of steps, are on the host in any case.
            tensors = [tensor for tensor in chain.from_iterable(by_category.values()) if tensor.ndim]
            self._host_bytes = max(self._host_bytes, storage_bytes(tensors, "cpu"))

    def _label_gradient(self, parameter: torch.Tensor) -> None:
        if self._is_tracking and parameter.grad is not None:
            self.tracker.label([parameter.grad], Category.GRADIENTS)

    def timeline(self) -> Timeline:
        """Return the live bytes by category after every event that the tracker has seen."""
        return self.tracker.timeline()

    def report(self) -> MemoryReport:
        """Return the peak and its parts.

        Raises:
            ValueError: nothing was measured inside a phase.
        """
        timeline = self.tracker.timeline()
        tracked: dict[Phase, dict[Category, int]] = {}
        by_phase: dict[Phase, int] = {}
        for phase in Phase:
            if phase in self._peaks:
                event = timeline.peak(phase)
                tracked[phase] = dict.fromkeys(Category, 0)
                if event >= 0:
                    tracked[phase] = timeline.by_category(event)
                # A CPU has no allocator to ask, and MPS is read only where phases meet: there the tracker may see more.
                by_phase[phase] = max(self._peaks[phase], sum(tracked[phase].values()))
        if not any(by_phase.values()):
            raise ValueError("nothing was measured: put the training step inside `with meter.phase(...)` blocks")
        peak_phase = max(by_phase, key=lambda phase: by_phase[phase])
        # The allocator sees more than the tracker: scratch memory inside a kernel, for example.
        unattributed = by_phase[peak_phase] - sum(tracked[peak_phase].values())
        return MemoryReport(
            memory_source=self._allocator.source,
            before_bytes=self._before,
            peak_allocated_bytes=by_phase[peak_phase],
            peak_reserved_bytes=self._reserved,
            peak_phase=peak_phase,
            by_category=tracked[peak_phase] | {Category.UNATTRIBUTED: unattributed},
            maximum_by_category=timeline.maximum_by_category() | {Category.UNATTRIBUTED: unattributed},
            by_phase=by_phase,
            peak_host_bytes=HOST.peak_bytes + self._host_bytes or None,
            peak_disk_bytes=DISK.peak_bytes or None,
            moved_bytes=HOST.moved_bytes + DISK.moved_bytes or None,
        )


def find_attached_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors in the attributes of a model's modules and parameters, and in those of what these hold.

    Quantized weights keep their scales this way: they are neither parameters nor buffers, but memory all the same.
    Gradients are not among them. Call it before training: later a module may hold what it computed.
    """
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting: list[Any] = [*model.modules(), *model.parameters()]
    while waiting:
        thing = waiting.pop()
        # Classes, modules of Python and meshes of ranks belong to the process, not to the model.
        if id(thing) in seen or isinstance(thing, (type, ModuleType, DeviceMesh)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            tensors.append(thing)
        if isinstance(thing, (list, tuple)):
            waiting += thing
        elif isinstance(thing, dict):
            waiting += thing.values()
        else:
            waiting += getattr(thing, "__dict__", {}).values()
    return tensors
