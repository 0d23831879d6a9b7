"""Parts of the panel answer in threads of their own, so that nobody waits for a prediction."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from workbench.advise.candidate import Predictor
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.prediction.predict import Prediction, predict
from workbench.recipe import Recipe
from workbench.widgets.light import HTML, VBox
from workbench.widgets.pages import alarm

# This lock is held while somebody waits for a prediction: the worker makes one at a time.
URGENT = threading.Lock()
# This lock is held while somebody waits for a search, which is many predictions.
SEARCH = threading.Lock()


class Background:
    """A thread that answers the newest question: one that is asked before an answer is there replaces the older one.

    Attributes:
        predictor: `predict`, or something that answers like it.
        answers: a subclass's method that yields the answers to a question, each better or more than the one before.
        show_answer: a subclass's method that shows an answer.
        quiet_s: seconds without another question, after which answering begins: more than 0 if nobody is waiting.
        waits_for: locks; no prediction begins while somebody holds one of them.
    """

    answers: Callable[..., Iterator[Any]]
    show_answer: Callable[[Any], None]
    quiet_s = 0.0
    waits_for: tuple[Any, ...] = (URGENT,)

    def __init__(self) -> None:
        self.predictor: Predictor = predict
        # questions are numbered
        self._newest = 0
        self._present = 0
        # no question comes while an answer is shown
        self._showing = threading.Lock()
        # one question is answered at a time
        self._answering = threading.Lock()
        self._thread = threading.Thread()

    def ask(self, *question: Any) -> None:
        """Answer this question from now on. Returns at once."""
        self.stop()
        self._thread = threading.Thread(target=self._answer, args=(self._newest, question), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give up the question, if there is one."""
        with self._showing:
            self._newest += 1

    @property
    def is_working(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float = 60.0) -> bool:
        """Wait until the newest question is answered: for tests, and for pages without a live kernel.

        Returns False if it is not answered after so many seconds.
        """
        if self.is_working:
            self._thread.join(seconds)
        return not self.is_working

    # ---- in the thread ----

    def _answer(self, number: int, question: tuple[Any, ...]) -> None:
        time.sleep(self.quiet_s)
        with self._answering:
            self._present = number
            try:
                self.check_newest()
                for answer in self.answers(*question):
                    self.publish(answer)
            except InterruptedError:
                pass  # a newer question was asked, or this one was given up
            except Exception as error:
                self.fail(error)

    def check_newest(self) -> None:
        """Raise InterruptedError if there is a newer question than the one that is being answered."""
        if self._present != self._newest:
            raise InterruptedError

    def publish(self, answer: Any) -> None:
        """Show an answer, unless there is a newer question (InterruptedError)."""
        with self._showing:
            self.check_newest()
            self.show_answer(answer)

    def predict(self, recipe: Recipe, gpu: str) -> Prediction:
        """Predict after all that is more urgent, unless there is a newer question (InterruptedError)."""
        for lock in self.waits_for:
            with lock:
                self.check_newest()
        return self.predictor(recipe, gpu)

    def fail(self, error: Exception) -> None:
        """Report what `answers` or `show_answer` raised."""
        traceback.print_exception(error)


class Part(Background):
    """A part of the panel whose answers are HTML. A question begins with a recipe, or None if there is no valid one."""

    def __init__(self) -> None:
        super().__init__()
        self.page = HTML()
        self.view = VBox([self.page], css="wb-part")

    def show(self, *question: Any) -> None:
        """Answer this question from now on. Returns at once.

        What the panel opens is asked with three arguments: a recipe, a GPU's name or "cpu", and the bytes that reserved
        memory and CUDA's context may have together.
        """
        if question[0] is None:
            self.refuse(ConfigurationError("The recipe cannot be used as it is: mend what its form says."))
        else:
            self.view.add_class("wb-old")  # dimmed, until there is an answer
            self.ask(*question)

    def refuse(self, error: Exception) -> None:
        """Say why there is no question, and give up the one before."""
        self.stop()
        self.fail(error)

    def forget(self) -> None:
        """Show nothing until something is asked."""
        self.stop()
        self.show_answer("")

    def show_answer(self, answer: Any) -> None:
        self.page.value = answer
        self.view.remove_class("wb-old")

    def fail(self, error: Exception) -> None:
        self.show_answer(alarm(reason_of(error)))


def reason_of(error: Exception) -> str:
    """Say why there is no answer: a refusal in its own words, any other error as a fault of the workbench."""
    if isinstance(error, WorkbenchError):
        return str(error)
    return f"no answer, a fault here: {type(error).__name__} {error}"
