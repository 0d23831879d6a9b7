"""Under torchrun: every rank brings a recipe of its own."""

import os

from workbench.base.errors import ConfigurationError
from workbench.ranks.run import run_as_rank
from workbench.recipe import Recipe

try:
    run_as_rank(Recipe(model="gpt2-tiny", steps=2, seed=int(os.environ["RANK"])), device="cpu")
except ConfigurationError as error:
    print(f"refused: {error}", flush=True)
