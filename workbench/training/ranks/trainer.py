"""The Trainer on one of several ranks: it trains on its part of the batch, with DDP or shards."""

import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from workbench.base.categories import Category
from workbench.base.patches import replace_attribute
from workbench.base.patches.accelerate import gather_nothing, give_every_rank_all_batches, prepare_models_with
from workbench.training.ranks.shards import split_batch
from workbench.training.trainer import MeteredTrainer


class RankTrainer(MeteredTrainer):
    """The Trainer of one rank. The process group decides how many there are; a model with shards is left as it is, any
    other is wrapped in DistributedDataParallel.

    Accelerate would refuse shards that it has not made, and on a CPU it takes FSDP for DDP: so both are done here. All
    ranks evaluate all of the held-out text, so that its loss does not depend on their number.
    """

    def __init__(self, *, model: Any, args: Any, **kwargs: Any) -> None:
        micro_batch, micro_batches = split_batch(vars(args), dist.get_world_size())
        args.per_device_train_batch_size = micro_batch
        args.gradient_accumulation_steps = micro_batches
        # Every rank evaluates all batches. A batch of full size would put the logits of all ranks' micro-batches on
        # each rank.
        args.per_device_eval_batch_size = min(args.per_device_eval_batch_size, micro_batch)
        self.sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        super().__init__(model=model, args=self.arguments_for_engine(args), **kwargs)
        self._prepare_model = prepare_models_with(self.accelerator, self._wrap_model_in_ddp)

    def arguments_for_engine(self, args: Any) -> Any:
        """Return the `TrainingArguments`, changed as an engine needs them."""
        return args

    def _wrap_model_in_ddp(self, model: Any, evaluation_mode: bool = False, **_: Any) -> Any:
        prepared = self._prepare_model(model, device_placement=False, evaluation_mode=True)
        if self.sharded or evaluation_mode:
            return prepared
        wrapped = DistributedDataParallel(prepared)
        wrapped.register_comm_hook(self._meter, average_bucket)
        return wrapped

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave the model where it is: on the device, or on the host if its shards wait there."""

    def get_eval_dataloader(self, *args: Any) -> DataLoader[Any]:
        with give_every_rank_all_batches(self.accelerator, self.args.device):
            return super().get_eval_dataloader(*args)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as one process would: every rank has all batches, so nothing is gathered, nor averaged over
        ranks."""
        with replace_attribute(self.args, "average_tokens_across_devices", False), gather_nothing(self.accelerator):
            return super().evaluation_loop(*args, **kwargs)


def average_bucket(meter: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients over the ranks, as DDP does by default, and tell the meter what the bucket is
    for."""
    buffer = bucket.buffer()
    meter.buckets[bucket.index()] = weakref.ref(buffer)
    meter.tracker.label([buffer], Category.GRADIENTS)
    adding: Any = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    # The future's own value is not used: that of a fake process group, in a prediction, is not the buffer.
    sent = adding.get_future().then(lambda _: buffer)
    return cast("torch.futures.Future[torch.Tensor]", sent)
