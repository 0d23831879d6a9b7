"""What is replaced in other libraries while a run or a prediction lasts: one file a library, each with its reason.

A patch is a bet on a name that its owner may change. It says `until` which version, or what, it is needed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """For the duration, an attribute of a module, a class or an object is another one.

    Raises:
        AttributeError: the owner has no such attribute: the library has changed, and the patch with it.
    """
    getattr(owner, name)
    is_its_own = name in vars(owner)
    before = vars(owner).get(name)  # not what `getattr` binds, such as a static method
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_its_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)  # it was inherited


@contextmanager
def changed_environment(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """The process's environment as it was, afterwards; with these variables meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables or {})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
