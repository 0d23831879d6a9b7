"""A limit in time for what may never end: a hub that is silent, an expression of a tokenizer, a template of a chat."""

import ctypes
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

import psutil

T = TypeVar("T")

LOOK_S = 1.0  # time between two looks at the progress of a call
NOTICE_S = 2.0  # time after which a line says what is being waited for


def call_within(seconds: float, act: Callable[[], T], notice: str = "") -> T:
    """Return what `act()` returns, or raise what it raises. It runs in a thread, which is told to end when its time is
    over.

    Args:
        notice: a line for standard error, if the call takes longer than NOTICE_S; empty for none.

    Raises:
        TimeoutError: it takes longer. A thread that is then inside a library of another language than Python goes on
            until that returns, or until the process ends.
    """
    call = _Call(act)
    left_s = seconds
    try:
        if notice and seconds > NOTICE_S:
            with suppress(Empty):
                return call.result(NOTICE_S)
            print(f"{notice} ({seconds:g} s at most)", file=sys.stderr, flush=True)
            left_s -= NOTICE_S
        return call.result(left_s)
    except Empty:
        raise TimeoutError(f"it takes longer than {seconds:g} s") from None
    finally:
        call.stop()


def call_while_it_moves(seconds: float, act: Callable[[], T], count_bytes: Callable[[], int], notice: str) -> T:
    """Return what `act()` returns, or raise what it raises, however long that takes, as long as it moves on: bytes
    arrive, or its thread computes.

    Args:
        seconds: the longest time without a new byte and without a second of computing.
        count_bytes: returns the bytes that are there so far.
        notice: a line for standard error, if the call takes longer than NOTICE_S.

    Raises:
        TimeoutError: nothing moved for so long.
    """
    began = time.monotonic()
    call = _Call(act)
    is_noticed = False
    last_state = (0, 0)
    moved_at = began
    try:
        while True:
            try:
                return call.result(min(LOOK_S, seconds / 2))
            except Empty:
                now = time.monotonic()
                state = (count_bytes(), call.count_computed_s())
            if state != last_state:
                last_state = state
                moved_at = now
            if now - moved_at >= seconds:
                raise TimeoutError(f"nothing has come for {seconds:g} s")
            if not is_noticed and now - began >= NOTICE_S:
                is_noticed = True
                print(notice, file=sys.stderr, flush=True)
    finally:
        call.stop()


class _Call(Generic[T]):
    """A call of a function in a thread of its own."""

    def __init__(self, act: Callable[[], T]) -> None:
        self.answers = SimpleQueue[tuple[T | None, BaseException | None]]()
        self.is_done = False
        self.thread = Thread(target=self._work, args=[act], daemon=True)
        self.thread.start()

    def _work(self, act: Callable[[], T]) -> None:
        try:
            self.answers.put((act(), None))
        except BaseException as error:  # the caller raises it, whatever it is
            self.answers.put((None, error))

    def result(self, seconds: float) -> T:
        """Return or raise what the function did. Raises Empty if it is not done within so many seconds."""
        result, error = self.answers.get(timeout=seconds)
        self.is_done = True
        if error is not None:
            # A library in Rust raises errors that are no Exception, which nobody would catch.
            raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        return result  # type: ignore[return-value]

    def count_computed_s(self) -> int:
        """Return the whole seconds that the thread has computed; 0 where the system does not tell."""
        try:
            threads = psutil.Process().threads()
        except psutil.Error:
            return 0
        times = [thread.user_time + thread.system_time for thread in threads if thread.id == self.thread.native_id]
        return int(sum(times))

    def stop(self) -> None:
        """Tell the thread to end, if it is not done: after a time-out, and after Ctrl-C in the caller."""
        if not self.is_done:
            ended = ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident or 0), ended)
