"""The Trainer on one of several ranks: its part of the batch, and DDP or shards."""

import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from workbench.base.categories import Category
from workbench.base.patches import replaced
from workbench.base.patches.accelerate import all_batches_for_every_rank, nothing_gathered, prepare_models_with
from workbench.training.ranks.shards import shared
from workbench.training.trainer import SeamTrainer


class RankTrainer(SeamTrainer):
    """The Trainer of one rank. The process group decides how many there are; a model with shards is left as it is, any
    other is wrapped in DistributedDataParallel.

    Accelerate would refuse shards that it has not made, and on a CPU it takes FSDP for DDP: so both are done here. All
    ranks evaluate all of the held-out text, so that its loss does not depend on their number.
    """

    def __init__(self, *, model: Any, args: Any, **kwargs: Any) -> None:
        micro_batch, micro_batches = shared(vars(args), dist.get_world_size())
        args.per_device_train_batch_size = micro_batch
        args.gradient_accumulation_steps = micro_batches
        # or the logits of an evaluation would be those of all ranks' batches, on each of them
        args.per_device_eval_batch_size = min(args.per_device_eval_batch_size, micro_batch)
        self.sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        super().__init__(model=model, args=self.arguments_for_engine(args), **kwargs)
        self._prepare_model = prepare_models_with(self.accelerator, self._prepared)

    def arguments_for_engine(self, args: Any) -> Any:
        """`TrainingArguments`, with what an engine wants to be told through them."""
        return args

    def _prepared(self, model: Any, evaluation_mode: bool = False, **_: Any) -> Any:
        prepared = self._prepare_model(model, device_placement=False, evaluation_mode=True)
        if self.sharded or evaluation_mode:
            return prepared
        wrapped = DistributedDataParallel(prepared)
        wrapped.register_comm_hook(self._meter, added_up)
        return wrapped

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """It is there, or waits on the host."""

    def get_eval_dataloader(self, *args: Any) -> DataLoader[Any]:
        with all_batches_for_every_rank(self.accelerator, self.args.device):
            return super().get_eval_dataloader(*args)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As one process would: every rank has all batches, so nothing is gathered, nor averaged over ranks."""
        with replaced(self.args, "average_tokens_across_devices", False), nothing_gathered(self.accelerator):
            return super().evaluation_loop(*args, **kwargs)


def added_up(meter: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """What DDP does with a bucket of gradients anyway; the meter is told what the bucket is for."""
    buffer = bucket.buffer()
    meter.buckets[bucket.index()] = weakref.ref(buffer)
    meter.tracker.label([buffer], Category.GRADIENTS)
    adding: Any = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    # a fake process group promises nothing better
    sent = adding.get_future().then(lambda _: buffer)
    return cast("torch.futures.Future[torch.Tensor]", sent)
