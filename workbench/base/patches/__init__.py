"""Patches of other libraries while a run or a prediction lasts: one file a library, each patch with its reason.

A patch is a bet on a name that its owner may change. It says until which version, or until what, it is needed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module, a class or an object, and put the old one back in the end.

    Raises:
        AttributeError: the owner has no such attribute: the library has changed, and the patch must follow.
    """
    getattr(owner, name)
    is_its_own = name in vars(owner)
    before = vars(owner).get(name)  # `getattr` would bind a method, and unwrap a static one
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_its_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # the old one was inherited


@contextmanager
def change_environment(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set environment variables of this process; in the end, its whole environment is as it was before."""
    before = dict(os.environ)
    os.environ.update(variables or {})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
