"""A callback for recipes: the second rank fails after its first step."""

import os

from transformers import TrainerCallback


class SecondRankFails(TrainerCallback):
    def on_step_end(self, *args, **others):
        if os.environ["RANK"] == "1":
            raise LookupError("the data of this rank")
