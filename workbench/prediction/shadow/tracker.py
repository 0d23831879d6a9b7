"""The tracker of real runs, on fake tensors.

Beside what that books, this one books workspaces and reductions' scratch, and counts operations and who made what.
"""

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
from workbench.measure.tracker import Storage, StorageTracker, has_wrapper
from workbench.prediction.shadow.kernels import IN_FP32, MATRIX_PRODUCTS, NO_KERNEL, ORDERS, bytes_before
from workbench.prediction.shadow.reductions import Reduction, reduction_of
from workbench.prediction.shadow.trace import Trace
from workbench.training.ranks.shard import ResizableTracker

DEVICE_OF: Any = torch.ops.prim.device.default
# PyTorch from 2.11 on wraps a mode's method, to shut the compiler out. Nothing is compiled here.
_book_results: Any = unwrap(StorageTracker.__torch_dispatch__)
# The maker of storages that no operation made: weights, and states that an optimizer brought along.
GIVEN = "given"


class ShadowTracker(ResizableTracker):
    """A tracker that books fake storages as the real ones would be.

    Args:
        cuda: whether to book too what CUDA's kernels and libraries take without PyTorch's dispatcher.

    Attributes:
        work: what training has asked of the device in this step, recomputation included: `half_flops` in 16 bits,
            `fp32_flops` in more, and `memory_bytes`, read and written by all operations that have no flops.
        untrained: how many micro-batches of the step are not trained, since they are like the last.
        failed: the operation that could not be traced, and the module that it ran in.
        workspaces: cuBLAS' storages, by whether autograd's thread has them for the backward pass.
        shared: reductions, by the first of the two storages that each takes.
    """

    def __init__(self, vocabulary_size: int | None, cuda: bool) -> None:
        super().__init__("cpu", vocabulary_size)
        self.cuda = cuda
        self.untrained = 0
        self.begin_step()
        self.failed = ("", "")
        self.workspaces: dict[bool, int] = {}
        self.shared: dict[int, Reduction] = {}
        self._makers: list[tuple[Any, str]] = []
        self._names: MutableMapping[torch.nn.Module, str] = {}
        self._open: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch shuts the compiler out of each operation.

        That takes a tenth of the time, and nothing is compiled here.
        """
        return False

    def name_modules(self, model: torch.nn.Module) -> None:
        """Note the names of the model's modules, under which makers are shown."""
        self._names = WeakKeyDictionary((module, name) for name, module in model.named_modules())

    def __enter__(self) -> Self:
        super().__enter__()
        self._patches.callback(hooks.register_module_forward_pre_hook(self._open_module).remove)
        self._patches.callback(hooks.register_module_forward_hook(self._close_module).remove)
        return self

    def _open_module(self, module: torch.nn.Module, _: Any) -> None:
        self._open.append(self._names.get(module, type(module).__name__))

    def _close_module(self, *_: Any) -> None:
        del self._open[-1:]  # the list may be empty, and this raises nothing then

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:  # two thirds of all calls, answered here without a detour
            return args[0].fake_device
        if has_wrapper(types):
            return NotImplemented
        self._fill_makers(GIVEN, "")
        if self._phase is Phase.BACKWARD and not torch.is_grad_enabled():
            # A recomputation stops in the middle of a module, as soon as it has what it needs.
            self._open.clear()
        module = self._open[-1] if self._open else ""
        packet = getattr(func, "overloadpacket", None)
        before = bytes_before(packet, args)
        scratch = self._book_block(before) if self.cuda and before else None
        first = len(self.storages)
        try:
            out = _book_results(self, func, types, args, kwargs)
        except Exception:
            # Noted here: while contexts are left, other operations follow, in other modules.
            self.failed = (str(func), module)
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
        """Set the counters of work to zero."""
        self.work: Counter[str] = Counter(bus_bytes=-HOST.moved_bytes - DISK.moved_bytes)
        self._work_of_last_micro_batch = self._work_until_now = self.work_so_far()

    def enter_phase(self, phase: Phase | None) -> None:
        """Enter a phase, and take the work of the micro-batch that ends with it.

        Every micro-batch is followed by the optimizer's phase, although the optimizer steps after the last one alone.
        """
        super().enter_phase(phase)
        if phase is Phase.OPTIMIZER_STEP:
            self._work_of_last_micro_batch = self.work_so_far() - self._work_until_now
            self._work_until_now = self.work_so_far()

    def work_so_far(self) -> "Counter[str]":
        """Return `work` of this step, with `bus_bytes`: what was moved to the host or a disk, and back."""
        return self.work + Counter(bus_bytes=HOST.moved_bytes + DISK.moved_bytes)

    def work_of_step(self) -> dict[str, int]:
        """Return the work of the whole step: an untrained micro-batch counts as much as the last trained one."""
        work = self.work_so_far()
        for name in work:
            work[name] += self.untrained * self._work_of_last_micro_batch[name]
        return dict(work)

    def _count(self, func: Any, packet: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add an operation's flops to the work, or the bytes that it reads and writes if it has none.

        An operation that changes a list in place returns nothing: what it reads, it also writes.
        """
        if packet is torch.ops.aten.addmm_:  # PyTorch counts no flops for the form in place
            packet = torch.ops.aten.addmm
        if packet in flop_registry:
            name = "fp32_flops"
            if args[0].dtype.itemsize == 2:
                name = "half_flops"
            with suppress(AssertionError):  # PyTorch before 2.12 cannot count attention with grouped heads
                self.work[name] += flop_registry[packet](*args, **kwargs, out_val=out)
        elif not func.is_view and packet not in NO_KERNEL:
            if out is None:
                out = args
            for leaf in tree_leaves((args, kwargs, out)):
                if isinstance(leaf, torch.Tensor) and self._watches(leaf):
                    self.work["memory_bytes"] += leaf.nbytes

    def _watches(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device. Of a fake one, `tensor.device` would be an operation, and a slow one."""
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        return device.type == self.device_type and tensor.layout is torch.strided

    def _fill_makers(self, operation: Any, module: str) -> None:
        """Note this operation and module as the maker of every storage that has none yet."""
        self._makers.extend([(operation, module)] * (len(self.storages) - len(self._makers)))

    def _reorder(self, order: tuple[int, ...] | None, results: list[Storage]) -> None:
        """Book the results in the order in which CUDA allocates them. Those that it has off the GPU take nothing."""
        if order is None or len(results) < len(order):
            return
        clock = [storage.born for storage in results]
        for place, storage in enumerate(results):
            if place in order:
                storage.born = clock[order.index(place)]
            else:
                storage.nbytes = 0

    def _book_workspace(self, packet: Any) -> None:
        """Book the workspace of cuBLAS at the first matrix product of a thread.

        The backward pass runs in autograd's thread, which has a handle of its own, and so another workspace.
        """
        in_backward = self._phase is Phase.BACKWARD
        if packet in MATRIX_PRODUCTS and in_backward not in self.workspaces:
            self.workspaces[in_backward] = len(self.storages)
            self._book_block(0)

    def _book_reduction(self, func: Any, args: Any) -> None:
        """Book the scratch of a reduction: two storages of sizes that the GPU decides, freed as it returns."""
        reduction = reduction_of(func, args)
        if reduction is None:
            return
        self.shared[len(self.storages)] = reduction
        blocks = [self._book_block(0), self._book_block(0)]
        for block in reversed(blocks):
            block.died = self._tick()

    def _book_block(self, nbytes: int) -> Storage:
        """Book a block that no tensor owns. On a GPU only the allocator's own peak shows it."""
        storage = Storage(nbytes, self._tick(), self._phase, None, Category.UNATTRIBUTED)
        self.storages.append(storage)
        return storage

    @property
    def events(self) -> int:
        """The reading of the event clock."""
        return self._clock

    def trace(self) -> Trace:
        """Return everything that was booked so far."""
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
