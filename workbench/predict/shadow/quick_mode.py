"""`FakeTensorMode` with shorter keys to its own cache: a step asks the same few hundred questions thousands of times.

PyTorch's key reads seventeen facts of a tensor, most of them of kinds of tensors that do not occur here, and takes half
of the time of a trace. What an operation gives is still PyTorch's to say: here stands only under which key.
"""

from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_Unknown = fake_tensor._BypassDispatchCache


class QuickFakeMode(FakeTensorMode):
    """Fake tensors as PyTorch makes them; dense ones of fixed shapes are looked up quickly."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            key = func, _described(args), _described(tuple(kwargs.items()))
            known = key in FakeTensorMode.cache
        except (_Unknown, TypeError):  # TypeError: an argument that cannot be in a key
            return super()._cache_key(state, func, args, kwargs)
        if not known:
            super()._cache_key(state, func, args, kwargs)  # raises for what PyTorch does not keep
        return key


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
