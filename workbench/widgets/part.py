"""What the parts of the panel share: they answer in threads of their own, so that nobody waits for a prediction."""

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

# Held while somebody waits for a prediction: the worker makes one at a time.
URGENT = threading.Lock()
# Held while somebody waits for a search, which is many predictions.
SEARCH = threading.Lock()


class Background:
    """Of questions that come faster than answers, only the newest is answered; an older one is given up.

    Attributes:
        predictor: `predict`, or something that answers like it.
        answers: of a subclass: the answers to a question, each better or more than the one before it.
        put: of a subclass: shows an answer.
        quiet_s: how long no other question may come before answering begins: for what nobody is waiting for.
        waits_for: no prediction begins while somebody holds one of these.
    """

    answers: Callable[..., Iterator[Any]]
    put: Callable[[Any], None]
    quiet_s = 0.0
    waits_for: tuple[Any, ...] = (URGENT,)

    def __init__(self) -> None:
        self.predictor: Predictor = predict
        self._newest = 0  # the number of the newest question
        self._present = 0  # of the one that is being answered
        self._news = threading.Lock()  # no question comes while an answer is put
        self._turn = threading.Lock()  # one question is answered at a time
        self._thread = threading.Thread()

    def ask(self, *question: Any) -> None:
        """Answer this from now on. Returns at once."""
        self.stop()
        self._thread = threading.Thread(target=self._answer, args=(self._newest, question), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Give up the question, if there is one."""
        with self._news:
            self._newest += 1

    @property
    def is_working(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float = 60.0) -> bool:
        """Until the newest question is answered, for tests and for pages without a live kernel; False: it is not."""
        if self.is_working:
            self._thread.join(seconds)
        return not self.is_working

    # ---- in the thread ----

    def _answer(self, number: int, question: tuple[Any, ...]) -> None:
        time.sleep(self.quiet_s)
        with self._turn:
            self._present = number
            try:
                self.go_on()
                for answer in self.answers(*question):
                    self.give(answer)
            except InterruptedError:
                pass  # it was given up
            except Exception as error:
                self.fail(error)

    def go_on(self) -> None:
        """Raises InterruptedError: there is a newer question."""
        if self._present != self._newest:
            raise InterruptedError

    def give(self, answer: Any) -> None:
        """Put an answer to the present question. Raises as `go_on`."""
        with self._news:
            self.go_on()
            self.put(answer)

    def predict(self, recipe: Recipe, gpu: str) -> Prediction:
        """A prediction, after all that is more urgent. Raises as `go_on`, too."""
        for lock in self.waits_for:
            with lock:
                self.go_on()
        return self.predictor(recipe, gpu)

    def fail(self, error: Exception) -> None:
        """Tell what was raised by `answers`, or by `put`."""
        traceback.print_exception(error)


class Part(Background):
    """Its answers are pages. The first thing in a question is a recipe; None: there is no valid one."""

    def __init__(self) -> None:
        super().__init__()
        self.page = HTML()
        self.view = VBox([self.page], css="wb-part")

    def show(self, *question: Any) -> None:
        """Answer this from now on; on a tab a recipe, a GPU's name or "cpu", and what reserved memory and context may
        be together, in bytes. Returns at once."""
        if question[0] is None:
            self.refuse(ConfigurationError("The recipe cannot be used as it is: mend what its form says."))
        else:
            self.view.add_class("wb-old")  # dimmed, until there is something newer
            self.ask(*question)

    def refuse(self, error: Exception) -> None:
        """Say why there is no question, and give up the one before."""
        self.stop()
        self.fail(error)

    def forget(self) -> None:
        """Show nothing until something is asked."""
        self.stop()
        self.put("")

    def put(self, answer: Any) -> None:
        self.page.value = answer
        self.view.remove_class("wb-old")

    def fail(self, error: Exception) -> None:
        self.put(alarm(reason_of(error)))


def reason_of(error: Exception) -> str:
    """Why there is no answer: a refusal in its own words, anything else as a fault of ours."""
    if isinstance(error, WorkbenchError):
        return str(error)
    return f"no answer, a fault here: {type(error).__name__} {error}"
