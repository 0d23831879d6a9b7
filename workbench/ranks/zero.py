"""Sharding with DeepSpeed's ZeRO: the Trainer of a rank whose engine it is, through accelerate's own configuration."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from filelock import FileLock
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers import trainer as transformers_trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from workbench.errors import UnavailableError
from workbench.measure.categories import Category, Phase
from workbench.measure.emulated import emulated
from workbench.paths import no_disk
from workbench.ranks.shards import SHARDS
from workbench.ranks.trainer import RankTrainer
from workbench.run.trainer import SeamTrainer

ENGINES: list[Any] = []  # of this process, until they are told to go
SCRATCH: list[tempfile.TemporaryDirectory[str]] = []  # for what waits on a disk, as long as they


def set_accelerator(device_kind: str) -> None:
    """DeepSpeed for this kind of device, without kernels of its own: it would compile them for a minute."""
    os.environ["DS_ACCELERATOR"] = device_kind
    from deepspeed import ops
    from deepspeed.accelerator import real_accelerator
    from deepspeed.runtime.zero import utils

    real_accelerator.ds_accelerator = None  # it has chosen, if accelerate has imported it before
    ops.__compatible_ops__ = {}
    if emulated():  # whether all ranks gather the same, it asks tensors, which have no values there
        utils.get_lst_from_rank0, utils.assert_lst_len_same_as_other_ranks = list, len


def open_disk(shard: str) -> None:
    """Load what DeepSpeed reads and writes with, if anything waits on a disk: compiled once, which takes minutes.

    Raises:
        UnavailableError: it cannot be compiled here, or the folder for it is not on a disk.
    """
    if "nvme" not in str(SHARDS[shard]["settings"]):
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import get_default_build_root

    if emulated():
        raise UnavailableError(f"shard: {shard} was never tried on an emulated GPU. Take zero3_offload there.")
    if not AsyncIOBuilder().is_compatible():
        raise UnavailableError(f"shard: {shard} needs libaio and a C++ compiler. On Debian: apt install libaio-dev g++")
    if why := no_disk():
        raise UnavailableError(f"shard: {why}")
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # ninja's
    with FileLock(root / "workbench.lock"):
        for left in chain(root.rglob("async_io/lock"), root.rglob("pin_memory/lock")):
            left.unlink()  # of a compilation that was ended: PyTorch would wait for it for ever
        if not any(root.rglob("async_io.so")):
            print(f"shard: DeepSpeed compiles what {shard} reads and writes with: minutes, once", file=sys.stderr)
        AsyncIOBuilder().load(verbose=False)


def let_go() -> None:
    """Of the weights that an engine has gathered, or begun to gather for the next layer: all ranks must."""
    for engine in ENGINES:
        engine.empty_partition_cache()


def forget() -> None:
    """The engines of this process, which would keep their models, and the process group that they knew."""
    while SCRATCH:
        SCRATCH.pop().cleanup()
    if not ENGINES:
        return
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.utils import groups

    while ENGINES:
        engine = ENGINES.pop()
        engine.destroy()
        parameters, optimizer = list(engine.module.parameters()), engine.optimizer
        for thing in (*parameters, optimizer.optimizer, optimizer, engine):  # they hold each other where nobody looks
            vars(thing).clear()
        for parameter in parameters:
            parameter.data = torch.empty(0)
    FWD_MODULE_STACK.clear()
    comm.cdb = None
    groups._release_process_group_references(group=None)


def settings_of(shard: str, model: torch.nn.Module, disk: str = "") -> dict[str, Any]:
    """Those of `shards.toml`, with the folder for what waits on a disk, by default one of this process, and the size of
    the buffers through which it comes."""
    given: dict[str, Any] = deepcopy(SHARDS[shard]["settings"])
    largest = max(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    for part in given["zero_optimization"].values():
        if isinstance(part, dict) and "nvme_path" in part:
            if not disk and not SCRATCH:
                SCRATCH.append(tempfile.TemporaryDirectory(prefix="zero-"))
            part["nvme_path"] = disk or SCRATCH[0].name
        if isinstance(part, dict) and "buffer_size" in part:
            part["buffer_size"] = largest + 2**20  # files are read in whole pages
    return given


def configuration(shard: str, bf16: bool, model: torch.nn.Module, disk: str = "") -> dict[str, Any]:
    """DeepSpeed's, as `TrainingArguments(deepspeed=…)` takes it; the Trainer fills in what is "auto".

    Args:
        bf16: compute in it, by autocast as one process does: weights stay in fp32, and so do messages. The Trainer's
            own `bf16=True` would mean bf16 weights to DeepSpeed.
    """
    told = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"
    given = settings_of(shard, model, disk)
    if bf16:
        given["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return dict.fromkeys(told, "auto") | given


def partitioned(model: PreTrainedModel, shard: str) -> PreTrainedModel:
    """The model with each parameter cut among the ranks, one after the other: no GPU ever has all of it. Of a stage
    that leaves weights whole, the model as it is."""
    import deepspeed

    settings = settings_of(shard, model)["zero_optimization"]
    if settings["stage"] == 3:
        known = {name: value for name, value in settings.items() if value != "auto"}
        told = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": known}
        deepspeed.zero.Init(model, config_dict_or_path=told)
    return model


def unpartitioned(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model in host memory, every parameter of it whole: all ranks must ask."""
    import deepspeed

    found = {}
    let_go()
    for name, value in model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([value]):
            found[name] = value.detach().cpu().clone()
    return found


def scattered(model: torch.nn.Module, values: Mapping[str, torch.Tensor], *_: Any, **__: Any) -> Any:
    """The reverse: `load_state_dict` of a model whose parameters may be cut."""
    import deepspeed

    for name, value in model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([value], modifier_rank=0), torch.no_grad():
            value.copy_(values.get(name, value))
    return SimpleNamespace(missing_keys=[], unexpected_keys=[])


def held(optimizer: Any) -> dict[Category, list[torch.Tensor]]:
    """What DeepSpeed's optimizer has beside the model: the weights that it steps, and gradients on their way there."""
    masters = masters_of(optimizer)
    names = "averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer"
    kept = [getattr(optimizer, name, None) for name in names] + [master.grad for master in masters]
    kept += [bucket.buffer for bucket in optimizer.ipg_buckets.values()]
    gradients = [leaf for leaf in tree_leaves(kept) if isinstance(leaf, torch.Tensor)]
    return {Category.OPTIMIZER_STATES: masters, Category.GRADIENTS: gradients}


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    """This rank's part of the weights as the optimizer steps it: one flat tensor for each group of parameters."""
    names = "fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"
    return list(next(getattr(optimizer, name) for name in names if hasattr(optimizer, name)))


@contextmanager
def whole_group(optimizer: Any, number: int) -> Iterator[None]:
    """With a group of parameters that waits on a disk in memory, with its states, which are written back."""
    waits = getattr(optimizer, "swap_optimizer", False) and optimizer._swappable_optimizer_subgroup(number)
    if waits:
        optimizer._optimizer_states_and_gradient_swap_in(number)
    yield
    if waits:
        optimizer._optimizer_states_and_gradient_swap_out(number)


def is_large(state: Any) -> bool:
    """Whether a state has a number for each of a parameter, and not one for all."""
    return isinstance(state, torch.Tensor) and bool(state.ndim)


def fill(parameter: Any, name: str, whole_state: torch.Tensor) -> None:
    """Put this rank's part of a parameter's state where the optimizer has it; the last part is filled up with zeros."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if not hasattr(parameter, "ds_tensor"):
        safe_set_full_optimizer_state(parameter, whole_state, name)
        return
    size = parameter.ds_tensor.ds_numel
    filled = torch.nn.functional.pad(whole_state.flatten(), (0, size * dist.get_world_size() - whole_state.numel()))
    safe_set_local_optimizer_state(parameter, filled.narrow(0, size * dist.get_rank(), size), name)


def in_turn(*calls: Callable[..., Any]) -> Callable[..., None]:
    """All of them with the same arguments, one after the other."""

    def called(*args: Any, **kwargs: Any) -> None:
        for call in calls:
            call(*args, **kwargs)

    return called


class ZeroTrainer(RankTrainer):
    """The Trainer of a rank under DeepSpeed, whose engine adds up, clips and steps within its backward pass."""

    shard: ClassVar[str]

    def __init__(self, **kwargs: Any) -> None:
        self._trained: list[list[torch.Tensor]] = []  # parameters, in the optimizer's groups
        super().__init__(**kwargs)
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # accelerate's note to itself; the next run is another's
        unset_hf_deepspeed_config()  # or transformers would cut what is loaded from now on

    def _settled(self, args: Any, model: Any) -> Any:
        if args.bf16:
            self.dtype = "autocast bf16"
        return replace(args, deepspeed=configuration(self.shard, args.bf16, model), bf16=False)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        if not self._trained:  # asked again, when DeepSpeed has put flat parameters in their place
            self._trained = [list(group["params"]) for group in optimizer.param_groups]
        return optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        trainer: Any = super()
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)  # into the model, which the engine takes over
        with patch.object(transformers_trainer, "deepspeed_load_checkpoint", lambda *_, **__: None):
            prepared = trainer._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._tell_meter(cast("Any", self).deepspeed, self._meter)
        return prepared

    @property
    def _zero(self) -> Any:
        return cast("Any", self).deepspeed.optimizer

    def _tell_meter(self, engine: Any, meter: Any) -> None:
        """When the engine steps, and what its tensors are for, as they come: many are gone when a phase ends."""
        ENGINES.append(engine)
        meter.others = partial(held, engine.optimizer)
        engine.step = in_turn(lambda: meter.enter_phase(Phase.OPTIMIZER_STEP), engine.step)
        telling = [(engine.optimizer, "reduce_independent_p_g_buckets_and_remove_grads")]
        if offload := getattr(engine.optimizer, "parameter_offload", None):
            telling.append((offload.get_param_coordinator(), "fetch_sub_module"))
        for its, name in telling:
            setattr(its, name, in_turn(getattr(its, name), meter.label_now))

    # ---- checkpoints: those of one process, as RankTrainer has them ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with patch.object(self, "is_deepspeed_enabled", False):  # or the engine would write a folder of its own
            super()._save_checkpoint(model, trial)

    def _whole(self) -> tuple[dict[str, Any], dict[str, Any]]:
        numbers = count()
        groups = [
            {**group, "params": [next(numbers) for _ in its]}
            for group, its in zip(self._zero.optimizer.param_groups, self._trained, strict=True)
        ]
        states = dict(enumerate(map(self._whole_state, chain.from_iterable(self._trained))))
        return unpartitioned(cast("Any", self).model), {"state": states, "param_groups": groups}

    def _whole_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """What the optimizer keeps of one parameter. A number that all parameters share is on every rank."""
        from deepspeed.utils import safe_get_full_optimizer_state

        zero, shape = self._zero, getattr(parameter, "ds_shape", parameter.shape)
        found = dict(zero.optimizer.state[masters_of(zero)[0]])
        for name, value in found.items():
            if is_large(value):
                found[name] = safe_get_full_optimizer_state(parameter, name).cpu().view(shape)
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        model = model or self.model
        with patch.object(model, "load_state_dict", partial(scattered, model)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        optimizer = patch.object(self.optimizer, "load_state_dict", self._load_states)
        with optimizer, patch.object(self, "is_deepspeed_enabled", False):
            SeamTrainer._load_optimizer_and_scheduler(self, checkpoint)

    def _load_states(self, saved: dict[str, Any]) -> None:
        """Make the states, which would come with the first step, and fill this rank's part of them."""
        zero, first = self._zero, saved["state"].get(0, {})
        for number, master in enumerate(masters_of(zero)):  # each counts its steps
            with whole_group(zero, number):
                large = {name: torch.zeros_like(master) for name, value in first.items() if is_large(value)}
                zero.optimizer.state[master] = deepcopy(first) | large
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._lazy_init_hp_params_optimizer_state()
        for group, its in zip(zero.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update({name: value for name, value in its.items() if name != "params"})
        for number, parameter in enumerate(chain.from_iterable(self._trained)):
            for name, value in saved["state"].get(number, {}).items():
                if is_large(value):
                    fill(parameter, name, value)


def trainer_of(shard: str) -> type[RankTrainer]:
    if SHARDS[shard]["engine"] == "deepspeed":
        return type("ZeroTrainer", (ZeroTrainer,), {"shard": shard})
    return RankTrainer
