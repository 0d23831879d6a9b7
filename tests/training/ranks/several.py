"""Under torchrun: the recipes of a file one after the other, each on all ranks; the first rank writes the records."""

import sys
from pathlib import Path

import torch.distributed as dist

from workbench.recipe import read_recipe
from workbench.training.ranks.run import run_as_rank

place = Path(sys.argv[1])
dist.init_process_group("gloo")
for path in sorted(place.glob("*.toml")):
    shard = path.stem.partition("-")[2]
    run_as_rank(read_recipe(path), shard=shard, device="cpu", folder=place / "records" / path.stem)
dist.destroy_process_group()
