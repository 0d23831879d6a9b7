"""The Trainer on one of several ranks: its part of the batch, DDP or shards, and checkpoints that are whole."""

import weakref
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from workbench.base.categories import Category
from workbench.base.patches import replaced
from workbench.base.patches.accelerate import all_batches_for_every_rank, nothing_gathered, prepare_models_with
from workbench.journal import checkpoints
from workbench.ranks.shard import cut_like, whole
from workbench.ranks.shards import shared
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
        self._whole_model: dict[str, Any] = {}
        self._whole_optimizer: dict[str, Any] = {}
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

    # ---- checkpoints: those of one process, so that any number of ranks can go on with them ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Written by the first rank, after all have gathered the states of model and optimizer in host memory."""
        trained: Any = self
        self._whole_model = whole(trained.model.state_dict())
        self._whole_optimizer = whole(trained.optimizer.state_dict())
        if self.is_world_process_zero():
            super()._save_checkpoint(model, trial)
        self._whole_model = {}
        self._whole_optimizer = {}

    def store_flos(self) -> None:
        """Would ask all ranks, of which only the first saves; no record has them."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._save(output_dir, state_dict=self._whole_model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        torch.save(self._whole_optimizer, Path(output_dir, OPTIMIZER_NAME))
        torch.save(cast("Any", self.lr_scheduler).state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        """The first rank's: the others draw anew when they go on, which only dropout notices."""
        super()._save_rng_state(output_dir)
        for numbered in Path(output_dir).glob("rng_state_0.pth"):
            numbered.rename(numbered.with_name("rng_state.pth"))

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Of each state of the optimizer this rank's part. The model's weights are cut as they are loaded."""
        if checkpoint is None:
            return
        optimizer: Any = self.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with checkpoints.unusable(checkpoint, torch.OutOfMemoryError):
            optimizer_file = Path(checkpoint, OPTIMIZER_NAME)
            saved = torch.load(optimizer_file, map_location="cpu", weights_only=True)
            for number, state in saved["state"].items():
                for name, value in state.items():
                    state[name] = cut_like(value, parameters[number])
            optimizer.load_state_dict(saved)
            schedule_file = Path(checkpoint, SCHEDULER_NAME)
            schedule = torch.load(schedule_file, map_location="cpu", weights_only=True)
            cast("Any", self.lr_scheduler).load_state_dict(schedule)


def added_up(meter: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """What DDP does with a bucket of gradients anyway; the meter is told what the bucket is for."""
    buffer = bucket.buffer()
    meter.buckets[bucket.index()] = weakref.ref(buffer)
    meter.tracker.label([buffer], Category.GRADIENTS)
    adding: Any = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True)
    sent = adding.get_future().then(lambda _: buffer)  # a fake process group promises nothing better
    return cast("torch.futures.Future[torch.Tensor]", sent)
