"""For tests that look on at a run, or end it, while it goes on."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class EveryStep(TrainerCallback):
    """Acts after every step, once the run's own callback has noted it."""

    def __init__(self, act: Callable[[], Any] = lambda: None) -> None:
        self.act = act

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.act()
