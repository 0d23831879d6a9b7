"""Answers in a thread of their own: neither the page nor a training waits for a prediction."""

import threading
from collections.abc import Callable, Iterable
from functools import partial, wraps
from itertools import chain
from typing import Generic, ParamSpec, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")
P = ParamSpec("P")

URGENT = threading.Lock()  # held while somebody waits for a prediction: the worker makes one at a time
SEARCH = threading.Lock()  # held while somebody waits for a search, which is many predictions


def patient(function: Callable[P, A], *others: threading.Lock) -> Callable[P, A]:
    """The function, which begins when nothing urgent is going on, and nothing that holds one of the other locks."""

    @wraps(function)
    def after_all_else(*args: P.args, **kwargs: P.kwargs) -> A:
        for lock in (URGENT, *others):
            with lock:
                pass
        return function(*args, **kwargs)

    return after_all_else


class Newest(Generic[Q, A]):
    """Of questions that come faster than answers, only the newest is answered; an older one is given up.

    Args:
        answers: the answers to a question, each better or more than the one before it; called in the thread.
        show: called there with every answer to the newest question, and with none to an older one.
        quiet_s: how long no other question may come before answering begins: for what nobody is waiting for.
    """

    def __init__(self, answers: Callable[[Q], Iterable[A]], show: Callable[[A], None], quiet_s: float = 0.0) -> None:
        self.answers, self.show, self.quiet_s = answers, show, quiet_s
        self._questions: list[Q] = []
        self._asked, self._news = 0, threading.Condition()
        self._thread: threading.Thread | None = None

    def ask(self, question: Q) -> None:
        with self._news:
            self._questions, self._asked = [question], self._asked + 1
            self._news.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._answer_all, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Give up the question, if there is one."""
        with self._news:
            self._questions, self._asked = [], self._asked + 1
            self._news.notify_all()

    def wait(self, seconds: float = 60.0) -> bool:
        """Until the newest question is answered, for tests and for pages without a live kernel; False: it is not."""
        with self._news:
            return self._news.wait_for(lambda: self._thread is None, seconds)

    def _newer_than(self, number: int) -> bool:
        return self._asked != number

    def _answer_all(self) -> None:
        while True:
            with self._news:
                number = self._asked
                if self.quiet_s and self._news.wait_for(partial(self._newer_than, number), self.quiet_s):
                    continue
                questions = self._questions
            for answer in chain.from_iterable(map(self.answers, questions)):
                with self._news:
                    if self._newer_than(number):
                        break
                    self.show(answer)
            with self._news:
                if self._asked == number:
                    self._thread = None
                    self._news.notify_all()
                    return
