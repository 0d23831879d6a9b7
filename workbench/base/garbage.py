"""The control of Python's garbage collector, all in one place.

The libraries bring half a million objects that live as long as the process. A collection walks all of them, and the
`Trainer` and accelerate ask for several in a run.
"""

import gc
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def collect_garbage() -> None:
    """Call `gc.collect()`, so that tensors in reference cycles are freed now, and not some time later."""
    gc.collect()


@contextmanager
def freeze_living_objects() -> Iterator[None]:
    """Keep the collector from walking the objects that live now, by `gc.freeze()`.

    Nothing happens if the caller has frozen objects already, because `gc.unfreeze()` would thaw those too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def frames_of(error: BaseException | None) -> Iterator[types.FrameType]:
    """Yield every frame of an exception and of those that led to it."""
    while error is not None:
        yield from (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        error = error.__context__


def clear_frames(error: BaseException | None) -> None:
    """Delete the local variables in the frames that an exception, and those that led to it, keep."""
    for frame in frames_of(error):
        with suppress(RuntimeError):  # a frame that is still executing cannot be cleared
            frame.clear()
        # A frame whose variables were read before keeps a copy of them; reading them again brings the copy up to date.
        _ = frame.f_locals
