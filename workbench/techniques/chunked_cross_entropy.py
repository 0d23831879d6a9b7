"""Chunked cross-entropy: the loss from the last hidden states, without all logits at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.models.family import on_meta
from workbench.techniques.base import Call, Stage, Technique

# Settings of configs whose models change their logits after the head: Gemma, Granite and Cohere.
CHANGES_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


@cache
def linear_cross_entropy() -> Any:
    """Define the autograd function on first use, so that torch is imported no earlier than it is needed."""
    import torch

    class LinearCrossEntropy(torch.autograd.Function):
        """Sum of the cross-entropies of N tokens, of which `chunk` rows of logits exist at a time.

        hidden (N, C), weight (V, C), labels (N,), where -100 is ignored. The backward pass computes the logits again;
        the chunks add to one gradient of the weight, in fp32, and to none at all if the weight is frozen.
        """

        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any, labels: Any, chunk: int) -> Any:
            ctx.save_for_backward(hidden, weight, labels)
            ctx.chunk = chunk
            loss = torch.zeros((), device=hidden.device)
            for rows, targets in zip(hidden.split(chunk), labels.split(chunk), strict=True):
                logits = (rows @ weight.t()).float()
                loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
                del logits  # before the next chunk is made
            return loss

        @staticmethod
        def backward(ctx: Any, grad_loss: Any) -> Any:
            hidden, weight, labels = ctx.saved_tensors
            grad_hidden = torch.empty_like(hidden)
            grad_weight = None
            if ctx.needs_input_grad[1]:
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
            for start in range(0, len(labels), ctx.chunk):
                piece = slice(start, start + ctx.chunk)
                rows = hidden[piece]
                targets = labels[piece]
                counts = targets != -100
                # The gradient of the logits is softmax minus the one-hot labels, computed in place of the logits. The
                # label -100 is no index: it becomes 0 here, and its row is multiplied by 0 below.
                grad = (rows @ weight.t()).float()
                grad.sub_(grad.amax(-1, keepdim=True)).exp_()
                grad.div_(grad.sum(-1, keepdim=True))
                grad.scatter_add_(1, (targets * counts)[:, None], torch.full_like(grad[:, :1], -1))
                grad = grad.mul_((counts * grad_loss)[:, None]).to(weight.dtype)
                torch.mm(grad, weight, out=grad_hidden[piece])
                if grad_weight is not None and grad_weight.dtype == grad.dtype:
                    grad_weight.addmm_(grad.t(), rows)
                elif grad_weight is not None:
                    grad_weight += grad.t() @ rows
                del grad  # before the next chunk is made
            if grad_weight is not None:
                grad_weight = grad_weight.to(weight.dtype)
            return grad_hidden, grad_weight, None, None

    return LinearCrossEntropy


@contextmanager
def without_logits(model: Any, chunk: int) -> Iterator[None]:
    """Within this context, the head returns the hidden states unchanged, and the loss multiplies them by it in chunks.

    All else in `model.forward` still runs: its autocast, and what an adapter does to inputs, labels and positions.
    """
    import torch

    model = getattr(model, "module", model)  # DistributedDataParallel wraps it
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    plain_loss = base.loss_function
    sum_of_losses = linear_cross_entropy().apply

    def loss(
        logits: Any,
        labels: Any,
        vocab_size: int,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> Any:
        hidden = logits  # transformers' name for what comes out of the head
        # Labels are shifted as in transformers: token t predicts token t + 1, the last token none. The sum of the
        # losses is divided by the number of labels that count: in this batch, or in all micro-batches of a step.
        labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100).flatten()
        count = num_items_in_batch
        if count is None:
            count = (labels != -100).sum()
        device_type = hidden.device.type
        dtype = head.weight.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            rows = hidden.flatten(0, 1).to(dtype)
            weight = head.weight.to(dtype)
            return sum_of_losses(rows, weight, labels.to(rows.device), chunk) / count

    head.forward = lambda hidden: hidden
    base.loss_function = loss
    try:
        yield
    finally:
        del head.forward  # uncovers the method of its class
        base.loss_function = plain_loss


def chunk_loss(trainer: Any, chunk: int) -> None:
    """Let the trainer compute its loss from `chunk` rows of logits at a time.

    Where the logits themselves are needed, as for `compute_metrics` and by `predict`, they are computed as ever.
    """
    plain_compute_loss = trainer.compute_loss
    plain_prediction_step = trainer.prediction_step

    def compute_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
        with without_logits(model, chunk):
            return plain_compute_loss(model, *args, **kwargs)

    def prediction_step(
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        chunked_compute_loss = trainer.compute_loss
        if not prediction_loss_only:
            trainer.compute_loss = plain_compute_loss
        try:
            return plain_prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            trainer.compute_loss = chunked_compute_loss

    trainer.compute_loss = compute_loss
    trainer.prediction_step = prediction_step


@dataclass(frozen=True)
class ChunkedCrossEntropy(Technique):
    """The logits (B·T, V) never exist as a whole: each chunk is computed, used and dropped.

    The backward pass computes the chunks again: it is gradient checkpointing for the head and the loss. Wijmans et
    al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009. PyTorch 2.13 has
    `torch.nn.functional.linear_cross_entropy`, which makes the gradients in the forward pass and keeps them until the
    backward pass.
    """

    chunk: int = setting(256, "rows of logits that exist at a time", minimum=1)

    retired = MappingProxyType({"kernel": "recompute"})
    stage = Stage.WRAP

    def check_config(self, config: Any) -> None:
        for name in CHANGES_LOGITS:
            if getattr(config, name, None) not in (None, 1.0):
                raise ConfigurationError(
                    f"{self.name}: a {config.model_type!r} changes its logits after the head "
                    f"({name}), which this loss does not do. Leave {self.name} out."
                )
        self.check_model(on_meta(config))

    def check_model(self, model: Any) -> None:
        import torch

        head = model.get_output_embeddings()
        if type(head) is not torch.nn.Linear or head.bias is not None:
            fault = "has a bias" if type(head) is torch.nn.Linear else f"is {type(head).__name__}"
            raise ConfigurationError(
                f"{self.name}: the head must be a plain linear layer without bias, and {fault}. "
                f"Leave {self.name} out, or the head out of what is quantized or adapted."
            )

    def trainer(self) -> Call:
        return Call(chunk_loss, self.settings())

    def check_loss(self, model: Any, trainer: Any = None) -> None:
        """Refuse a loss that may use the logits: inside this technique there are none."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        loss_name = getattr(base.loss_function, "__name__", "a loss function of its own")
        maker = ""
        if not _is_of_transformers(type(base).forward):
            maker = f"forward() of {type(base).__name__}"
        elif loss_name != "ForCausalLMLoss":
            maker = loss_name
        elif trainer is not None:
            maker = _maker_of_loss(trainer)
        if maker:
            raise ConfigurationError(
                f"{self.name}: here {maker} makes the loss, in a way that may look at logits, and "
                "there would be none. Leave one of the two out."
            )


def _maker_of_loss(trainer: Any) -> str:
    """Name the part of a Trainer that computes the loss in another way; empty if transformers' own method does."""
    if trainer.label_smoother is not None:
        return "label smoothing"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    if getattr(trainer.args, "use_liger_kernel", False):
        return "Liger's kernel"
    if not _is_of_transformers(type(trainer).compute_loss):
        return f"compute_loss() of {type(trainer).__name__}"
    return ""


def _is_of_transformers(function: Any) -> bool:
    return str(function.__module__).startswith("transformers.")
