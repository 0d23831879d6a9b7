"""A recipe for several ranks as files: the script, accelerate's configuration, and the command that starts both."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import yaml
from transformers.modeling_layers import GradientCheckpointingLayer

from workbench import models
from workbench.errors import ConfigurationError
from workbench.export.script import WORDS, script
from workbench.measure.device import pick_device
from workbench.models.family import on_meta
from workbench.ranks.shards import SHARDS, Ranks
from workbench.ranks.zero import configuration
from workbench.recipe import Recipe

SCRIPT, CONFIGURATION, ZERO = "train.py", "accelerate.yaml", "deepspeed.json"
DISK = "offloaded"  # folder for what waits there


def accelerate_configuration(recipe: Recipe, ranks: Ranks, folder: Path = Path()) -> str:
    """YAML for `accelerate launch --config_file`: DDP, FSDP2 or DeepSpeed on so many GPUs of one machine.

    FSDP2 needs GPUs: on a CPU accelerate takes this for DDP, and shards nothing. DeepSpeed's own configuration is
    another file in the folder.
    """
    words, row = WORDS["accelerate"], SHARDS[ranks.shard]
    head, told = words["head"].format(title=row["title"]), {**words[ranks.engine], "num_processes": ranks.count}
    if ranks.engine == "fsdp":
        head += words["only_gpus"]
        model = on_meta(models.load_config(models.locate(recipe.model)))
        blocks = {type(module).__name__ for module in model.modules() if isinstance(module, GradientCheckpointingLayer)}
        told["fsdp_config"] = words["fsdp_config"] | {
            "fsdp_transformer_layer_cls_to_wrap": ",".join(sorted(blocks)),
            "fsdp_reshard_after_forward": row["settings"]["reshard_after_forward"],
            "fsdp_offload_params": row.get("offload", False),
        }
    if ranks.engine == "deepspeed":
        told["deepspeed_config"] = {"deepspeed_config_file": str(folder / ZERO), "zero3_init_flag": False}
    return f"{head}{yaml.safe_dump(told, sort_keys=False)}"


def save_script(recipe: Recipe, folder: Path, flavour: str = "trainer", ranks: Ranks | None = None) -> str:
    """Write the script into a folder, for several ranks accelerate's configuration beside it.

    Returns:
        The command that starts it, in the folder where this was called: the script names files as seen from there.

    Raises:
        ConfigurationError, UnavailableError: as `script`; or a file is there already.
    """
    recipe = replace(recipe, model=models.resolve_auto(recipe.model, pick_device().type))
    texts = {SCRIPT: script(recipe, flavour, ranks)}
    if ranks:
        texts[CONFIGURATION] = accelerate_configuration(recipe, ranks, folder)
    if ranks and ranks.engine == "deepspeed":
        bf16, model = "bf16" in recipe.training_arguments(), on_meta(models.load_config(models.locate(recipe.model)))
        texts[ZERO] = json.dumps(configuration(ranks.shard, bf16, model, str(folder / DISK)), indent=2)
    for name in texts:
        if (folder / name).exists():
            raise ConfigurationError(f"script: {folder / name} is there already. Name another folder, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    start = ["accelerate", "launch", "--config_file", str(folder / CONFIGURATION)] if ranks else ["python"]
    return shlex.join([*start, str(folder / SCRIPT)])
