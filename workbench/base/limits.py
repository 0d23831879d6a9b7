"""A limit in time for what may never end: a hub that is silent, an expression of a tokenizer, a template of a chat."""

import ctypes
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float, act: Callable[[], T]) -> T:
    """Return what `act()` returns, or raise what it raises. It runs in a thread, which is told to end when its time is
    over.

    Raises:
        TimeoutError: it takes longer. A thread that is then inside a library of another language than Python goes on
            until that returns, or until the process ends.
    """
    answers = SimpleQueue[tuple[T | None, BaseException | None]]()

    def work() -> None:
        try:
            answers.put((act(), None))
        except BaseException as error:  # the caller raises it, whatever it is
            answers.put((None, error))

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        result, error = answers.get(timeout=seconds)
    except Empty:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        raise TimeoutError(f"it takes longer than {seconds:g} s") from None
    if error is not None:
        # A library in Rust raises errors that are no Exception, which nobody would catch.
        raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
    return result  # type: ignore[return-value]
