"""The Trainer on one of several ranks: its part of the batch, DDP or shards, and checkpoints that are whole."""

import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from workbench.measure.categories import Category
from workbench.ranks.shard import cut_like, whole
from workbench.ranks.shards import shared
from workbench.run.trainer import SeamTrainer


def added_up(meter: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """What DDP does with a bucket of gradients anyway; the meter is told what the bucket is for."""
    meter.buckets[bucket.index()] = weakref.ref(buffer := bucket.buffer())
    meter.tracker.label([buffer], Category.GRADIENTS)
    adding: Any = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    sent = adding.get_future().then(lambda _: buffer)  # a fake process group promises nothing better
    return cast("torch.futures.Future[torch.Tensor]", sent)


class RankTrainer(SeamTrainer):
    """The Trainer of one rank. The process group decides how many there are; a model with shards is left as it is, any
    other is wrapped in DistributedDataParallel.

    Accelerate would refuse shards that it has not made, and on a CPU it takes FSDP for DDP: so both are done here. All
    ranks evaluate all of the held-out text, so that its loss does not depend on their number.
    """

    def __init__(self, *, model: Any, args: Any, **kwargs: Any) -> None:
        self.sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        names = "per_device_train_batch_size", "gradient_accumulation_steps"
        parts = shared({name: getattr(args, name) for name in names}, dist.get_world_size())
        vars(args).update(zip(names, parts, strict=True))
        # or the logits of an evaluation would be those of all ranks' batches, on each of them
        args.per_device_eval_batch_size = min(args.per_device_eval_batch_size, parts[0])
        super().__init__(model=model, args=self._settled(args, model), **kwargs)
        accelerator: Any = self.accelerator
        self._prepare = accelerator.prepare_model
        accelerator.prepare_model = self._prepared
        self._kept: tuple[dict[str, Any], dict[str, Any]] = {}, {}

    def _settled(self, args: Any, model: Any) -> Any:
        """With what an engine wants to be told through them."""
        return args

    def _prepared(self, model: Any, evaluation_mode: bool = False, **_: Any) -> Any:
        prepared = self._prepare(model, device_placement=False, evaluation_mode=True)
        if self.sharded or evaluation_mode:
            return prepared
        wrapped = DistributedDataParallel(prepared)
        wrapped.register_comm_hook(self._meter, added_up)
        return wrapped

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """It is there, or waits on the host."""

    def get_eval_dataloader(self, *args: Any) -> DataLoader[Any]:
        alone = {"device": self.args.device, "put_on_device": True, "num_processes": 1, "process_index": 0}
        with patch.object(self.accelerator, "prepare", partial(prepare_data_loader, **alone)):
            return super().get_eval_dataloader(*args)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As one process would: every rank has all batches, so nothing is gathered, nor averaged over ranks."""
        alone = patch.object(self.args, "average_tokens_across_devices", False)
        with alone, patch.object(self.accelerator, "gather", lambda losses: losses):
            return super().evaluation_loop(*args, **kwargs)

    # ---- checkpoints: those of one process, so that any number of ranks can go on with them ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._kept = self._whole()
        if self.is_world_process_zero():
            super()._save_checkpoint(model, trial)
        self._kept = ({}, {})

    def _whole(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states of model and optimizer, in host memory: all ranks must ask."""
        trained: Any = self
        return whole(trained.model.state_dict()), whole(trained.optimizer.state_dict())

    def store_flos(self) -> None:
        """Would ask all ranks, of which only the first saves; no record has them."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._save(output_dir, state_dict=self._kept[0])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with patch.object(self.optimizer, "state_dict", lambda: self._kept[1]):
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        """The first rank's: the others draw anew when they go on, which only dropout notices."""
        super()._save_rng_state(output_dir)
        for numbered in Path(output_dir).glob("rng_state_0.pth"):
            numbered.rename(numbered.with_name("rng_state.pth"))

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        model = model or self.model
        like = model.state_dict()
        load = model.load_state_dict

        def cut(values: Mapping[str, Any], *rest: Any, **options: Any) -> Any:
            return load({name: cut_like(value, like.get(name)) for name, value in values.items()}, *rest, **options)

        with patch.object(model, "load_state_dict", cut):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint is None:
            return
        optimizer: Any = self.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        load = optimizer.load_state_dict

        def cut(saved: dict[str, Any]) -> None:
            states = saved["state"].items()
            parts = {}
            for number, state in states:
                parts[number] = {name: cut_like(value, parameters[number]) for name, value in state.items()}
            load({**saved, "state": parts})

        with patch.object(optimizer, "load_state_dict", cut):
            super()._load_optimizer_and_scheduler(checkpoint)
