"""What can be seen of anybody's training, whatever the versions of Python, PyTorch and transformers.

It stands alone: `inside.py` takes it along into interpreters where the workbench cannot be imported. Run by one of
them, it says which card there is.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

ROWS = 10_000  # of a data set that must be read row by row to know their lengths
STRATEGY = "train_sampling_strategy"
BALANCED = "batch_rebalance"  # micro-batches of about equal cost, and of unequal numbers of rows


def is_causal(model: Any) -> bool:
    """Whether it is a language model of the kind that the techniques were written for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    classes = {entry.__name__ for entry in type(base).__mro__}
    is_known = not classes.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return is_known and not base.config.is_encoder_decoder


def about(model: Any) -> dict[str, Any]:
    """Facts about a model that is trained, of which each technique knows in its own file whether they mean it; and its
    class as `model`, its `config` and its `vocabulary`, if the techniques were written for its kind."""
    recomputes = False
    for module in model.modules():
        recomputes |= bool(getattr(module, "gradient_checkpointing", False))
    adapters = getattr(model, "peft_config", {}).values()
    facts: dict[str, Any] = {
        "recomputes": recomputes,
        "adapters": [str(adapter.peft_type.value).lower() for adapter in adapters],
        "trained_itemsizes": sorted({weight.itemsize for weight in model.parameters() if weight.requires_grad}),
    }
    if is_causal(model):
        config = json.loads(model.config.to_json_string(use_diff=False))
        config["attn_implementation"] = model.config._attn_implementation
        text_config = model.config
        if hasattr(text_config, "get_text_config"):
            text_config = text_config.get_text_config()
        facts.update(model=type(model).__name__, config=config, vocabulary=getattr(text_config, "vocab_size", 0))
    return facts


def several(args: Any) -> str:
    """What makes more than one process or card of a Trainer's training; empty if nothing does."""
    if args.deepspeed:
        return "DeepSpeed"
    if args.fsdp:
        return "FSDP"
    if args.n_gpu > 1:
        return f"{args.n_gpu} GPUs by DataParallel"
    return f"{args.world_size} ranks" if args.world_size > 1 else ""


def optimizer_of_its_own(trainer: Any) -> str:
    """Which one a Trainer takes, whatever its arguments say; empty where they decide."""
    from transformers import Trainer

    if trainer.optimizer is not None:
        return "the optimizer that it has already"
    return "" if type(trainer).create_optimizer is Trainer.create_optimizer else "create_optimizer of its class"


def watch_batches(model: Any, seen: dict[str, Any] | None = None) -> dict[str, Any]:
    """Note the most `rows` and `tokens` of the batches that a model gets from now on."""
    noted = {"rows": 0, "tokens": 0} if seen is None else seen

    def note_batch(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            noted["rows"] = max(noted["rows"], ids.shape[0])
            noted["tokens"] = max(noted["tokens"], ids.shape[-1])

    model.register_forward_pre_hook(note_batch, with_kwargs=True)
    return noted


class Collator:
    """A collator, and the emulated card is told when a batch of its has padding, by this variable."""

    def __init__(self, collator: Any, variable: str) -> None:
        self.collator = collator
        self.variable = variable

    def __call__(self, rows: Any) -> Any:
        batch = self.collator(rows)
        mask = batch.get("attention_mask") if hasattr(batch, "get") else None
        if mask is not None and bool((mask == 0).any()):
            os.environ[self.variable] = "1"
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collator, name)


def lengths_of(rows: Any) -> list[int]:
    """Tokens of every row, by its number; empty where nobody can say, or not soon."""
    if not hasattr(rows, "__len__"):
        return []
    try:
        if "input_ids" in (getattr(rows, "column_names", None) or ()):
            import pyarrow.compute

            lengths: list[int] = []
            for batch in rows.with_format("arrow").iter(ROWS):
                lengths += pyarrow.compute.list_value_length(batch["input_ids"]).to_pylist()
            return lengths
        if len(rows) <= ROWS:
            return [len(rows[number]["input_ids"]) for number in range(len(rows))]
    except Exception:
        # whatever a data set of somebody's own raises: then its lengths are not known
        return []
    return []


def longest_first(trainer: Any, steps: int) -> tuple[list[int], int]:
    """The order of rows in which a Trainer gets the longest ones in each of its first steps, and how long the longest
    is: the peak of the first step is not that of the others, which have the optimizer's states. Empty and 0 where
    nobody can say, and where micro-batches are of about equal cost, and of unequal numbers of rows."""
    args = trainer.args
    if getattr(args, STRATEGY, "") == BALANCED:
        return [], 0
    lengths = lengths_of(trainer.train_dataset)
    count = args.per_device_train_batch_size * args.gradient_accumulation_steps
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return [*order[:count] * steps, *order[count:]], max(lengths, default=0)


def sizes(model: Any, holder: Any) -> dict[str, int]:
    """Bytes of the weights, of what is trained of them, of optimizer states on the card, and of the peak."""
    import torch

    weights = 0
    trained = 0
    for parameter in model.parameters():
        weights += parameter.nbytes
        if parameter.requires_grad:
            trained += parameter.nbytes
    states = 0
    for state in getattr(getattr(holder, "optimizer", holder), "state", {}).values():
        for part in state.values() if isinstance(state, dict) else ():
            if isinstance(part, torch.Tensor) and part.is_cuda:
                states += part.nbytes
    return {"weights": weights, "trained": trained, "states": states, "peak": torch.cuda.max_memory_allocated()}


def model_of(optimizer: Any) -> Any:
    """The language model of transformers whose parameters an optimizer has, of all models that there are."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    trained: set[int] = set()
    for group in optimizer.param_groups:
        trained.update(map(id, group["params"]))
    for model in gc.get_objects():
        if not issubclass(type(model), PreTrainedModel) or model.get_output_embeddings() is None:
            continue
        if not trained.isdisjoint(map(id, model.parameters())):
            return model
    return None


def describe_card() -> dict[str, Any]:
    """The cards that PyTorch sees, and of the first what it is and has free; a build for AMD's cards sees none here."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return {"count": 0, "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    return {
        "count": torch.cuda.device_count(),
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(describe_card()))
