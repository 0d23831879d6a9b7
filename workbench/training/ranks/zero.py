"""Sharding with DeepSpeed's ZeRO: the Trainer of a rank whose engine it is, through the Trainer's own `deepspeed=`.

Three things are done by hand. Mixed precision: the Trainer's `bf16=True` means weights in bf16 to DeepSpeed, which is
another recipe, so its configuration asks for autocast instead. Kernels: it would compile some of its own for minutes
(`workbench.base.patches.deepspeed`). The meter: the engine adds up, clips and steps within the backward pass, where no
phase of the Trainer begins, and keeps gradients and weights of its own, which only it can show.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from workbench.base.categories import Category, Phase
from workbench.base.device import current_emulated_gpu
from workbench.base.patches import deepspeed as patches
from workbench.training.ranks.shards import SHARDS
from workbench.training.ranks.trainer import RankTrainer

AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
BF16 = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
ENGINES: list[Any] = []  # DeepSpeed's engines in this process that are still open


def set_accelerator(device_kind: str) -> None:
    """Tell DeepSpeed which kind of device it trains on."""
    patches.prepare_for_device(device_kind)
    if current_emulated_gpu():
        patches.believe_own_lists()


def configuration(shard: str, bf16: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration, as `TrainingArguments(deepspeed=…)` takes it: the Trainer fills in what is
    "auto".

    Args:
        bf16: compute in it, by autocast as one process does: weights stay in fp32, and so do messages between ranks.
    """
    settings = {**dict.fromkeys(AUTO, "auto"), **deepcopy(SHARDS[shard]["settings"])}
    if bf16:
        settings["torch_autocast"] = BF16
    return settings


def partition(model: PreTrainedModel, shard: str) -> PreTrainedModel:
    """Cut the parameters among the ranks, one after the other, so that no GPU ever has all of the model. Stages before
    the third leave weights whole: the model stays as it is."""
    import deepspeed

    stage = SHARDS[shard]["settings"]["zero_optimization"]
    if stage["stage"] == 3:
        settings = {name: value for name, value in stage.items() if value != "auto"}
        asked_for = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings}
        deepspeed.zero.Init(model, config_dict_or_path=asked_for)
    return model


def gather_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model in host memory, with every parameter whole. All ranks must call it."""
    import deepspeed

    release_gathered()
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([value]):
            weights[name] = value.detach().cpu().clone()
    return weights


def release_gathered() -> None:
    """Release the weights that an engine has gathered, or begun to gather for the next layer. All ranks must call
    it."""
    for engine in ENGINES:
        engine.empty_partition_cache()


def close_engines() -> None:
    """Take the engines of this process apart, so that the next run finds none."""
    while ENGINES:
        patches.free_engine(ENGINES.pop())


class ZeroTrainer(RankTrainer):
    """The Trainer of a rank under DeepSpeed, whose engine adds up, clips and steps within its backward pass.

    Args:
        shard: a way to shard whose engine is DeepSpeed.
    """

    def __init__(self, *, shard: str, **kwargs: Any) -> None:
        self.shard = shard
        super().__init__(**kwargs)
        # accelerate has noted here that it uses DeepSpeed, which the next run of this process may not.
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        # While transformers has this configuration, it partitions every model that it loads.
        unset_hf_deepspeed_config()

    def arguments_for_engine(self, args: Any) -> Any:
        if args.bf16:
            self.dtype = "autocast bf16"
        return replace(args, deepspeed=configuration(self.shard, args.bf16), bf16=False)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = cast("Any", super())._prepare_for_training(*args, **kwargs)
        engine = cast("Any", self).deepspeed
        ENGINES.append(engine)
        meter: Any = self._meter
        meter.others = partial(tensors_of, engine.optimizer)
        patches.hook_steps(engine, partial(meter.enter_phase, Phase.OPTIMIZER_STEP), meter.label_now)
        return prepared


def tensors_of(optimizer: Any) -> dict[Category, list[torch.Tensor]]:
    """Return what DeepSpeed's optimizer has beside the model: the weights that it steps, and gradients on their way
    there."""
    # These are the rank's part of the weights, one flat tensor for each group of parameters: of stage 3, else of
    # stage 2.
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    if masters is None:
        masters = optimizer.single_partition_of_fp32_groups
    holders = [master.grad for master in masters]
    holders += [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
    for name in ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer"):
        holders.append(getattr(optimizer, name, None))
    gradients = list(filter(torch.is_tensor, tree_leaves(holders)))
    return {Category.OPTIMIZER_STATES: list(masters), Category.GRADIENTS: gradients}


def trainer_of(shard: str) -> Callable[..., RankTrainer]:
    """Return what makes the Trainer of a rank, for a way to shard."""
    if SHARDS[shard]["engine"] == "deepspeed":
        return partial(ZeroTrainer, shard=shard)
    return RankTrainer
