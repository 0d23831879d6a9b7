"""`FakeTensorMode` with a shorter way to its own cache: a step asks the same few hundred questions thousands of times.

PyTorch's key reads seventeen facts of a tensor, most of them of kinds of tensors that do not occur here, and takes half
of the time of a trace. What an operation gives is still PyTorch's to say: here stands only which of its entries.
"""

from contextlib import suppress
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_Unknown, _Known = fake_tensor._BypassDispatchCache, fake_tensor._DispatchCacheValidEntry
_state: Any = fake_tensor._CacheKeyState(None)  # type: ignore[attr-defined]
_entries: dict[Any, Any] = {}  # PyTorch's, by keys of ours


class QuickFakeMode(FakeTensorMode):
    """Fake tensors as PyTorch makes them; dense ones of fixed shapes are looked up quickly."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._common = vars(FakeTensor(self, torch.empty(0, device="meta"), torch.device("cpu")))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            asked = func, _described(args), _described(tuple(kwargs.items()))
            found = _entries.get(asked, asked)
        except (_Unknown, TypeError):  # TypeError: an argument that cannot be a key
            found = None
        if found is None:  # PyTorch does not keep it
            return super()._cached_dispatch_impl(func, types, args, kwargs)
        if found is not asked:
            made = [self._made(info, func, args) for info in found.output_infos]
            return tuple(made) if found.is_output_tuple else made[0]
        out = super()._cached_dispatch_impl(func, types, args, kwargs)
        with suppress(_Unknown):
            entry = FakeTensorMode.cache.get(self._cache_key(_state, func, args, kwargs))
            _entries[asked] = entry if isinstance(entry, _Known) else None
        return out

    def _made(self, info: Any, func: Any, args: Any) -> Any:
        """As `_get_output_tensor_from_cache_entry`, for fixed shapes."""
        if info.inplace_idx is not None:
            return args[info.inplace_idx]
        if (facts := info.metadata) is None:
            return info.constant_value
        with fake_tensor.in_kernel_invocation_manager(self):
            plain = torch.empty_strided(
                facts.shape, facts.stride, dtype=facts.dtype, device="meta", requires_grad=facts.requires_grad
            )
            if func.is_view:
                plain.set_(args[info.view_idx].untyped_storage(), facts.storage_offset, facts.shape, facts.stride)
        made = torch.Tensor._make_subclass(
            FakeTensor, plain, facts.requires_grad, dispatch_device=True, device_for_backend_keys=facts.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self._common, fake_device=facts.device)
        return made


def _described(value: Any) -> Any:
    """What of an argument decides the result."""
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            raise _Unknown("constant")
        place = value.storage_offset(), value.untyped_storage().nbytes()
        return value.dtype, value.shape, value.stride(), place, value.fake_device, value.requires_grad
    if isinstance(value, (list, tuple)):
        return tuple([_described(one) for one in value])
    if isinstance(value, torch.Tensor):
        raise _Unknown("true tensor")
    return type(value), value
