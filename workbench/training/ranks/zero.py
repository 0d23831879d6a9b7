"""Sharding with DeepSpeed's ZeRO: the Trainer of a rank whose engine it is, through the Trainer's own `deepspeed=`.

Three things stay by hand. Mixed precision: the Trainer's `bf16=True` means weights in bf16 to DeepSpeed, which is
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
from workbench.base.device import emulated
from workbench.base.patches import deepspeed as patches
from workbench.training.ranks.shards import SHARDS
from workbench.training.ranks.trainer import RankTrainer

AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
BF16 = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
ENGINES: list[Any] = []  # of this process, until they are forgotten


def set_accelerator(device_kind: str) -> None:
    """DeepSpeed for this kind of device."""
    patches.on_device(device_kind)
    if emulated():
        patches.believe_own_lists()


def configuration(shard: str, bf16: bool) -> dict[str, Any]:
    """DeepSpeed's, as `TrainingArguments(deepspeed=…)` takes it; the Trainer fills in what is "auto".

    Args:
        bf16: compute in it, by autocast as one process does: weights stay in fp32, and so do messages.
    """
    settings = {**dict.fromkeys(AUTO, "auto"), **deepcopy(SHARDS[shard]["settings"])}
    if bf16:
        settings["torch_autocast"] = BF16
    return settings


def partitioned(model: PreTrainedModel, shard: str) -> PreTrainedModel:
    """The model with each parameter cut among the ranks, one after the other: no GPU ever has all of it. Of a stage
    that leaves weights whole, the model as it is."""
    import deepspeed

    stage = SHARDS[shard]["settings"]["zero_optimization"]
    if stage["stage"] == 3:
        settings = {name: value for name, value in stage.items() if value != "auto"}
        asked_for = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings}
        deepspeed.zero.Init(model, config_dict_or_path=asked_for)
    return model


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model in host memory, every parameter of it whole: all ranks must ask."""
    import deepspeed

    let_go()
    weights = {}
    for name, value in model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([value]):
            weights[name] = value.detach().cpu().clone()
    return weights


def let_go() -> None:
    """Of the weights that an engine has gathered, or begun to gather for the next layer: all ranks must."""
    for engine in ENGINES:
        engine.empty_partition_cache()


def forget() -> None:
    """The engines of this process."""
    while ENGINES:
        patches.take_apart(ENGINES.pop())


class ZeroTrainer(RankTrainer):
    """The Trainer of a rank under DeepSpeed, whose engine adds up, clips and steps within its backward pass.

    Args:
        shard: a way to shard whose engine is DeepSpeed.
    """

    def __init__(self, *, shard: str, **kwargs: Any) -> None:
        self.shard = shard
        super().__init__(**kwargs)
        # accelerate's note to itself; the next run is another's
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        unset_hf_deepspeed_config()  # or transformers would cut what is loaded from now on

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
        patches.tell_of_steps(engine, partial(meter.enter_phase, Phase.OPTIMIZER_STEP), meter.label_now)
        return prepared


def tensors_of(optimizer: Any) -> dict[Category, list[torch.Tensor]]:
    """What DeepSpeed's optimizer has beside the model: the weights that it steps, and gradients on their way there."""
    # This rank's part of the weights, in one flat tensor for each group of parameters: of stage 3, and of stage 2.
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
    """What makes the Trainer of a rank."""
    if SHARDS[shard]["engine"] == "deepspeed":
        return partial(ZeroTrainer, shard=shard)
    return RankTrainer
