"""Facts about anybody's training, in whatever version of Python (from 3.9), PyTorch and transformers.

The file stands alone: `inside.py` takes it along into interpreters where the workbench cannot be imported. Run as a
script there, it prints the cards that PyTorch sees.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any, TypedDict

ROWS = 10_000  # the most rows that are read one by one for their lengths, and the rows of one Arrow batch
STRATEGY = "train_sampling_strategy"
BALANCED = "batch_rebalance"  # makes micro-batches of about equal cost, and unequal numbers of rows


class CallSite(TypedDict, total=False):
    """The call in somebody's program that made an object."""

    file: str  # the absolute path; "" if no code of the program made it
    line: int
    name: str  # the class of the object
    positions: list[int | None]  # line, end line, column and end column of the call, from Python 3.11 on
    parsed: bool  # transformers' HfArgumentParser made the object from the command line
    indirect: bool  # a library made the object, called by the program


class TensorBytes(TypedDict):
    """Bytes of a training's tensors on the card."""

    weights: int
    trained: int  # the part of the weights that is trained
    states: int  # the optimizer's states
    peak: int  # the most that all tensors took together


class CardUse(TypedDict, total=False):
    """Bytes that a process took of this machine's card; empty if it used none."""

    reserved: int  # the most that PyTorch's allocator had reserved
    refusals: int  # how often the allocator was refused memory
    beside: int  # bytes of all else on the card: CUDA's context, and other programs


class Facts(TypedDict, total=False):
    """The facts about a training. Which of them are there depends on its kind and on how far it came."""

    # how the run of the program ended
    ended_by: str  # such as "steps", "out of memory", "an error" or "refusal"
    message: str  # the error's text
    refusal: str  # why `apply` refused a technique
    exit: str  # the program's own exit status
    several: str  # the engine or launcher that makes several processes or cards of it
    # the calls that make its objects
    kind: str  # "trainer", "loop", or "" before either was made
    arguments: dict[str, Any]  # TrainingArguments by name, before any change
    arguments_class: str
    arguments_call: CallSite
    trainer_class: str
    trainer_call: CallSite
    optimizer_call: CallSite
    model_name: str  # the variable that holds the model where a loop makes its optimizer; "" if none does
    # the model: see `about`
    recomputes: bool  # gradient checkpointing is on
    adapters: list[str]  # PEFT's names of the adapters' kinds, in small letters
    trained_itemsizes: list[int]  # bytes of one number, for each data type that is trained
    # the next three only if the techniques were written for such a model
    model: str  # the class
    config: dict[str, Any]
    vocabulary: int  # V, tokens
    # the training itself
    own_loss: str  # the class of a Trainer whose loss is not transformers' own
    own_optimizer: str  # the optimizer that a Trainer takes, whatever its arguments say; "" where they decide
    rows: int  # the most rows of a batch, B
    tokens: int  # the most tokens of a row, T
    longest_row: int  # tokens of the longest row of the data; 0 where it is not known
    steps: int  # optimizer steps that were done
    step_time_s: float  # seconds of the last step, on a card that computes
    also: list[str]  # "evaluation" and "saving", if they were done
    sizes: TensorBytes
    card: CardUse


class Changes(TypedDict):
    """The changes that `inside.py` makes to a program, and where the program and the workbench lie."""

    arguments: dict[str, Any]  # TrainingArguments to change, by name
    on_model: dict[str, dict[str, Any]]  # settings by technique, applied before the Trainer is made
    on_trainer: dict[str, dict[str, Any]]  # settings by technique, applied to the Trainer or to the model of a loop
    environment: dict[str, str]
    kind: str  # `Facts.kind` of an earlier run: a script may make an optimizer first, and then a Trainer that takes it
    path: str  # the script's folder, for sys.path
    package: str  # the folder of the workbench
    padding: str  # the environment variable that tells the emulated card of padding


class TrialJob(Changes):
    """The job of one run of a program by `inside.py`."""

    steps: int  # optimizer steps, after which the process ends
    life: bool  # whether a Trainer evaluates and saves after the steps, if its arguments say so
    report: str  # the JSON file for `Facts`
    shown: bool  # whether the program's output is shown
    scratch: str  # a folder in place of the Trainer's output_dir
    here: bool  # whether the card is this machine's own
    timed: bool  # whether the card computes, so that a step has a duration
    share: float  # the share of the card's memory that PyTorch's allocator may have, up to 1


def is_causal(model: Any) -> bool:
    """Whether a model is a causal language model of transformers, which the techniques were written for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    classes = {entry.__name__ for entry in type(base).__mro__}
    is_known = not classes.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return is_known and not base.config.is_encoder_decoder


def about(model: Any) -> Facts:
    """Return the facts about a model that is trained. From them each technique tells, in its own file, whether it is
    used already. `model`, `config` and `vocabulary` are there only if the techniques were written for its kind."""
    recomputes = False
    for module in model.modules():
        recomputes |= bool(getattr(module, "gradient_checkpointing", False))
    adapters = getattr(model, "peft_config", {}).values()
    facts: Facts = {
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
        vocabulary = getattr(text_config, "vocab_size", 0)
        facts |= {"model": type(model).__name__, "config": config, "vocabulary": vocabulary}
    return facts


def several(args: Any) -> str:
    """Return what makes a training with these TrainingArguments use several processes or cards; "" if nothing does."""
    if args.deepspeed:
        return "DeepSpeed"
    if args.fsdp:
        return "FSDP"
    if args.n_gpu > 1:
        return f"{args.n_gpu} GPUs by DataParallel"
    return f"{args.world_size} ranks" if args.world_size > 1 else ""


def optimizer_of_its_own(trainer: Any) -> str:
    """Return which optimizer a Trainer takes, whatever its arguments say; "" where the arguments decide."""
    from transformers import Trainer

    if trainer.optimizer is not None:
        return "the optimizer that it has already"
    if type(trainer).create_optimizer is not Trainer.create_optimizer:
        return "create_optimizer of its class"
    return ""


def watch_batches(model: Any, facts: Facts) -> None:
    """Keep `facts["rows"]` and `facts["tokens"]` the largest B and T of the batches that a model gets from now on."""

    def note_batch(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            facts["rows"] = max(facts["rows"], ids.shape[0])
            facts["tokens"] = max(facts["tokens"], ids.shape[-1])

    model.register_forward_pre_hook(note_batch, with_kwargs=True)


class Collator:
    """A collator that tells the emulated card, by an environment variable, when a batch of its has padding."""

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
    """Return the tokens of every row, in the order of the rows; an empty list if they are unknown, or slow to read."""
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
        # Somebody's own data set may raise anything. Its lengths are unknown then.
        return []
    return []


def longest_first(trainer: Any, steps: int) -> tuple[list[int], int]:
    """Return an order of row numbers that gives a Trainer its longest rows in each of its first steps, and the tokens
    of the longest.

    They come in each step, since the first step's peak is not that of the others, which have the optimizer's states.
    Returns ([], 0) if lengths are unknown, and with BALANCED, whose micro-batches have unequal numbers of rows.
    """
    args = trainer.args
    if getattr(args, STRATEGY, "") == BALANCED:
        return [], 0
    lengths = lengths_of(trainer.train_dataset)
    count = args.per_device_train_batch_size * args.gradient_accumulation_steps
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return [*order[:count] * steps, *order[count:]], max(lengths, default=0)


def sizes(model: Any, holder: Any) -> TensorBytes:
    """Return the bytes of the weights, of the trained ones, of the optimizer's states on the card, and of the peak.

    Args:
        holder: a Trainer, whose `optimizer` is meant, or an optimizer itself.
    """
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
    """Return the language model of transformers whose parameters an optimizer has; None if there is none.

    All objects of the process are searched: an optimizer knows the parameters, and not their model.
    """
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
    """Return the number of CUDA cards that PyTorch sees, and the first one's name, capability, memory and free memory.

    A build for AMD's cards counts none.
    """
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
