"""The tracker of real runs, on fake tensors: it also notes who made what, workspaces, reductions' scratch and flops."""

from collections import Counter
from collections.abc import MutableMapping
from contextlib import suppress
from inspect import unwrap
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from workbench.base.categories import Category, Phase
from workbench.base.offloaded import DISK, HOST
from workbench.measure.tracker import Storage, StorageTracker, wrapped
from workbench.prediction.shadow.kernels import IN_FP32, MATRIX_PRODUCTS, NO_KERNEL, ORDERS, bytes_before
from workbench.prediction.shadow.reductions import Reduction, reduction_of
from workbench.prediction.shadow.trace import Trace
from workbench.training.ranks.shard import ResizableTracker

DEVICE_OF: Any = torch.ops.prim.device.default
# compiler shut out no more, as PyTorch 2.11 does
_book_results: Any = unwrap(StorageTracker.__torch_dispatch__)
# the maker of what was there before: weights, and states that an optimizer brought along
GIVEN = "given"


class ShadowTracker(ResizableTracker):
    """Books fake storages as the real ones would be.

    Args:
        cuda: also book what CUDA's kernels and libraries take unseen.

    Attributes:
        work: what training has asked of the device in this step, recomputation included: `half_flops` in 16 bits,
            `fp32_flops` in more, and `memory_bytes`, read and written by all operations that have no flops.
        untrained: micro-batches of the step that are like the last, and not trained.
        failed: the operation that could not be traced, and the module it ran in.
    """

    def __init__(self, vocabulary_size: int | None, cuda: bool) -> None:
        super().__init__("cpu", vocabulary_size)
        self.cuda = cuda
        self.untrained = 0
        self.begin_step()
        self.failed = ("", "")
        self.workspaces: dict[bool, int] = {}  # by whether it is the backward's
        self.shared: dict[int, Reduction] = {}  # by the first of the two storages that they take
        self._makers: list[tuple[Any, str]] = []
        self._names: MutableMapping[torch.nn.Module, str] = {}
        self._open: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to shut the compiler out in each operation takes a tenth of the time."""
        return False

    def name_modules(self, model: torch.nn.Module) -> None:
        self._names = WeakKeyDictionary((module, name) for name, module in model.named_modules())

    def __enter__(self) -> Self:
        super().__enter__()
        self._patches.callback(hooks.register_module_forward_pre_hook(self._open_module).remove)
        self._patches.callback(hooks.register_module_forward_hook(self._close_module).remove)
        return self

    def _open_module(self, module: torch.nn.Module, _: Any) -> None:
        self._open.append(self._names.get(module, type(module).__name__))

    def _close_module(self, *_: Any) -> None:
        del self._open[-1:]  # there may be none

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:  # two thirds of all calls, answered here without a detour
            return args[0].fake_device
        if wrapped(types):
            return NotImplemented
        self._fill_makers(GIVEN, "")
        if self._phase is Phase.BACKWARD and not torch.is_grad_enabled():
            # a recomputation stops in the middle of a module, as soon as it has what it needs
            self._open.clear()
        module = self._open[-1] if self._open else ""
        packet = getattr(func, "overloadpacket", None)
        before = bytes_before(packet, args)
        scratch = self._book_block(before) if self.cuda and before else None
        first = len(self.storages)
        try:
            out = _book_results(self, func, types, args, kwargs)
        except Exception:
            self.failed = (str(func), module)  # others may follow while contexts are left
            raise
        if self._phase is not Phase.EVALUATION:
            self._count(func, packet, args, kwargs or {}, out)
        if self.cuda:
            self._reorder(ORDERS.get(packet), self.storages[first:])
            for place in IN_FP32.get(packet, ()):
                self.storages[first + place].nbytes *= 4 // out[place].dtype.itemsize
            self._book_workspace(packet)
            self._book_reduction(func, args)
        if scratch:
            scratch.died = self._tick()
        self._fill_makers(func, module)
        return out

    def begin_step(self) -> None:
        """What was done before does not count."""
        self.work: Counter[str] = Counter(bus_bytes=-HOST.moved_bytes - DISK.moved_bytes)
        self._last = self._so_far = self.worked()

    def enter_phase(self, phase: Phase | None) -> None:
        """Every micro-batch ends with the phase in which, after the last one, the optimizer steps."""
        super().enter_phase(phase)
        if phase is Phase.OPTIMIZER_STEP:
            self._last = self.worked() - self._so_far
            self._so_far = self.worked()

    def worked(self) -> "Counter[str]":
        """`work`, and `bus_bytes`: what was moved to the host or a disk, and back."""
        return self.work + Counter(bus_bytes=HOST.moved_bytes + DISK.moved_bytes)

    def work_of_step(self) -> dict[str, int]:
        """What was trained, and as much as the last micro-batch for each of the untrained ones."""
        work = self.worked()
        for name in work:
            work[name] += self.untrained * self._last[name]
        return dict(work)

    def _count(self, func: Any, packet: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Nothing comes out of what changes a list in place: there, what goes in is also written."""
        if packet is torch.ops.aten.addmm_:  # PyTorch has it without flops
            packet = torch.ops.aten.addmm
        if packet in flop_registry:
            name = "fp32_flops"
            if args[0].dtype.itemsize == 2:
                name = "half_flops"
            with suppress(AssertionError):  # of grouped heads, which PyTorch counts from 2.12 on
                self.work[name] += flop_registry[packet](*args, **kwargs, out_val=out)
        elif not func.is_view and packet not in NO_KERNEL:
            if out is None:
                out = args
            for leaf in tree_leaves((args, kwargs, out)):
                if isinstance(leaf, torch.Tensor) and self._watches(leaf):
                    self.work["memory_bytes"] += leaf.nbytes

    def _watches(self, tensor: torch.Tensor) -> bool:
        """`tensor.device` of a fake tensor is an operation, and a slow one."""
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        return device.type == self.device_type and tensor.layout is torch.strided

    def _fill_makers(self, operation: Any, module: str) -> None:
        self._makers.extend([(operation, module)] * (len(self.storages) - len(self._makers)))

    def _reorder(self, order: tuple[int, ...] | None, results: list[Storage]) -> None:
        """The results in the order in which CUDA takes them; those that it has elsewhere take nothing."""
        if order is None or len(results) < len(order):
            return
        clock = [storage.born for storage in results]
        for place, storage in enumerate(results):
            if place in order:
                storage.born = clock[order.index(place)]
            else:
                storage.nbytes = 0

    def _book_workspace(self, packet: Any) -> None:
        # where autograd's own thread multiplies, with a handle of its own
        in_backward = self._phase is Phase.BACKWARD
        if packet in MATRIX_PRODUCTS and in_backward not in self.workspaces:
            self.workspaces[in_backward] = len(self.storages)
            self._book_block(0)

    def _book_reduction(self, func: Any, args: Any) -> None:
        """Two storages, whose sizes are those of a GPU: they are gone when the operation returns."""
        reduction = reduction_of(func, args)
        if reduction is None:
            return
        self.shared[len(self.storages)] = reduction
        blocks = [self._book_block(0), self._book_block(0)]
        for block in reversed(blocks):
            block.died = self._tick()

    def _book_block(self, nbytes: int) -> Storage:
        """A block that no tensor owns: on a GPU only the allocator's own peak shows it."""
        storage = Storage(nbytes, self._tick(), self._phase, None, Category.UNATTRIBUTED)
        self.storages.append(storage)
        return storage

    @property
    def events(self) -> int:
        return self._clock

    def trace(self) -> Trace:
        """Everything booked so far."""
        self._fill_makers(GIVEN, "")
        numbers: dict[Any, int] = {}
        for maker in self._makers:
            numbers.setdefault(maker, len(numbers))
        operations = []
        for func, module in numbers:
            operations.append(f"{func} in {module}" if module else str(func))
        return Trace(
            **self.lives(),
            maker=np.array(list(map(numbers.__getitem__, self._makers)), dtype=np.int32),
            operations=tuple(operations),
            phase_starts=tuple(self._phase_starts),
            workspaces=tuple(self.workspaces.values()),
            shared=self.shared,
            work=self.work_of_step(),
        )
