"""The files of an exported recipe: the script and, for several ranks, accelerate's configuration and the command."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from transformers.modeling_layers import GradientCheckpointingLayer

from workbench import models
from workbench.base.device import pick_device
from workbench.base.errors import ConfigurationError
from workbench.export.script import script
from workbench.models.family import on_meta
from workbench.recipe import Recipe
from workbench.training.ranks.shards import SHARDS, Ranks
from workbench.training.ranks.zero import configuration

SCRIPT = "train.py"
CONFIGURATION = "accelerate.yaml"
ZERO = "deepspeed.json"
HEAD = """\
# accelerate launch --config_file accelerate.yaml train.py
#
# {title}.
# Batch, accumulation, precision and checkpointing are the script's.
"""
ONLY_GPUS = "# On a CPU accelerate takes this for DDP, and shards nothing.\n"
# For each engine the answer in accelerate's own questionnaire. Without a GPU the script's use_cpu turns MULTI_GPU into
# ranks that speak by gloo.
TYPES = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}


def accelerate_configuration(recipe: Recipe, ranks: Ranks, folder: Path = Path()) -> str:
    """Write YAML for `accelerate launch --config_file`: DDP, FSDP2 or DeepSpeed on several GPUs of one machine.

    FSDP2 needs GPUs: on a CPU accelerate takes this for DDP, and shards nothing.

    Args:
        folder: the folder of DeepSpeed's own configuration, which is another file.
    """
    head = HEAD.format(title=SHARDS[ranks.shard]["title"])
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": TYPES[ranks.engine],
        "num_machines": 1,
        "main_process_port": 0,  # any free port
        "machine_rank": 0,
        "num_processes": ranks.count,
    }
    if ranks.engine == "fsdp":
        head += ONLY_GPUS
        settings["fsdp_config"] = fsdp_settings(recipe, ranks)
    if ranks.engine == "deepspeed":
        settings["deepspeed_config"] = {"deepspeed_config_file": str(folder / ZERO), "zero3_init_flag": False}
    return f"{head}{yaml.safe_dump(settings, sort_keys=False)}"


def fsdp_settings(recipe: Recipe, ranks: Ranks) -> dict[str, Any]:
    """Return accelerate's settings for FSDP2 around each transformer block, as a run has it."""
    model = on_meta(models.load_config(models.locate_config(recipe.model)))
    blocks = {type(module).__name__ for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
    row = SHARDS[ranks.shard]
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        # All ranks but the first would start from empty weights otherwise.
        "fsdp_cpu_ram_efficient_loading": False,
        # FULL_STATE_DICT has save_model() write one model, not each rank's shards.
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(sorted(blocks)),
        "fsdp_reshard_after_forward": row["settings"]["reshard_after_forward"],
        "fsdp_offload_params": row.get("offload", False),
    }


def save_script(
    recipe: Recipe, folder: Path, flavour: str = "trainer", count: int | None = None, shard: str = "none"
) -> str:
    """Write the script into a folder, and for several ranks accelerate's configuration beside it.

    Args:
        count: the number of ranks; None for one process.
        shard: the way in which the model is cut into shards; `none` for DDP.

    Returns:
        The command that starts it, in the folder where this was called: the script names files as seen from there.

    Raises:
        ConfigurationError, UnavailableError: as `script` raises them; or a file is there already.
    """
    ranks = Ranks(count, shard) if count else None
    recipe = replace(recipe, model=models.resolve_auto(recipe.model, pick_device().type))
    texts = {SCRIPT: script(recipe, flavour, ranks)}
    command = ["python"]
    if ranks:
        texts[CONFIGURATION] = accelerate_configuration(recipe, ranks, folder)
        command = ["accelerate", "launch", "--config_file", str(folder / CONFIGURATION)]
        if ranks.engine == "deepspeed":
            texts[ZERO] = json.dumps(configuration(ranks.shard, "bf16" in recipe.training_arguments()), indent=2)
    for name in texts:
        if (folder / name).exists():
            raise ConfigurationError(f"script: {folder / name} is there already. Name another folder, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return shlex.join([*command, str(folder / SCRIPT)])
