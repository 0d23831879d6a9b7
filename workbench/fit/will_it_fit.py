"""`WillItFit` says, before the first forward pass, what a Trainer's training needs of a card.

A copy of the Trainer is sent to a process with an emulated card, with the shapes of its models' tensors and no values.
There it trains for a few steps on the longest rows of its data, with PyTorch's own CUDA allocator.
"""

import io
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from itertools import chain, islice
from types import ModuleType
from typing import Any

import dill
import torch
from transformers import Trainer, TrainerCallback

from workbench.advise.candidate import NUMERICS, worst_numerics
from workbench.base.categories import format_bytes
from workbench.base.device import current_emulated_gpu
from workbench.base.errors import ConfigurationError, WorkbenchError, brief
from workbench.base.patches import change_environment
from workbench.base.result import Result
from workbench.fit.any_training import (
    BALANCED,
    STRATEGY,
    Collator,
    Facts,
    TensorBytes,
    about,
    longest_first,
    several,
    sizes,
    watch_batches,
)
from workbench.fit.apply import apply
from workbench.fit.candidates import list_choices, sets_of, sizes_of
from workbench.fit.edit import edits_of
from workbench.fit.places import places_of
from workbench.fit.results import batches_in_words
from workbench.fit.search import STEPS
from workbench.gpus.catalogue import ENOUGH_BYTES, Gpu, recognize_gpu
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator import card, padding
from workbench.gpus.emulator.call import call_on
from workbench.measure.allocators import allocator_for
from workbench.models.load import quiet
from workbench.techniques import Technique

TIME_LIMIT_S = 300.0  # for one training of STEPS steps on the emulated card
MOST_TRIALS = 8  # the most sets of changes that are tried for a cure
# sys.path, the shapes of the models' tensors, the pickled arguments, the pickled Trainer
Payload = tuple[list[str], list[Any], bytes, bytes]
PLAIN = (torch.Tensor, torch.nn.Parameter)  # the classes of tensors that a shape describes in full
# The copy makes these attributes of a Trainer anew, in its own process.
REMADE = (
    "_memory_tracker",
    "_train_batch_size",
    "accelerator",
    "args",
    "callback_handler",
    "control",
    "eval_dataset",
    "gather_function",
    "lr_scheduler",
    "model_wrapped",
    "optimizer",
    "state",
    "train_dataset",
)
# The copy's TrainingArguments: a few steps on the card, and nothing beside them.
SHORT_TRAINING = {
    "max_steps": STEPS,
    "use_cpu": False,
    "auto_find_batch_size": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "push_to_hub": False,
    "disable_tqdm": True,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
}


@dataclass(frozen=True)
class Need(Result):
    """The memory that a training needs of a card, by PyTorch's allocator on an emulated one.

    Attributes:
        reserved_bytes: the most that PyTorch's allocator had reserved.
        beside_bytes: CUDA's context; on this machine's own card, whose context is made already, what this process has
            allocated beside the Trainer's models.
        room_bytes: the memory that the training may have: the card's; of this machine's own what is free, and what this
            process has reserved.
        sizes: the bytes of its tensors.
        facts: `rows` and `tokens` of its largest batches, and `longest_row` of the data.
        cure: changes with which it fits, tried on the emulated card too; "" if it fits as it is.
    """

    gpu: Gpu
    reserved_bytes: int
    beside_bytes: int
    room_bytes: int
    sizes: TensorBytes
    facts: Facts
    cure: str = ""

    @property
    def need_bytes(self) -> int:
        return self.reserved_bytes + self.beside_bytes

    @property
    def parts(self) -> dict[str, int]:
        """The parts of `need_bytes`, by name; they sum to it."""
        weights = self.sizes["weights"]
        states = self.sizes["states"]
        peak = self.sizes["peak"]
        return {
            "weights": weights,
            "optimizer states": states,
            "activations, logits and gradients": peak - weights - states,
            "gaps of the allocator": self.reserved_bytes - peak,
            "beside the training": self.beside_bytes,
        }

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.room_bytes

    def compare(self, reserved_bytes: int, is_as_large: bool) -> str:
        """Compare the prediction with what was measured, in words.

        Args:
            is_as_large: whether there was a batch as large as the one that was predicted.
        """
        text = f"WillItFit: measured {format_bytes(reserved_bytes)}; predicted {format_bytes(self.need_bytes)}"
        if is_as_large:
            return f"{text}, off by {self.need_bytes / reserved_bytes - 1:+.1%}"
        return f"{text} for the longest batch, which did not come"

    def __str__(self) -> str:
        verdict = "it fits" if self.fits else "it does NOT fit"
        lines = [
            f"WillItFit: {verdict}. This training needs {format_bytes(self.need_bytes)} of "
            f"{format_bytes(self.room_bytes)}, by PyTorch's allocator on an emulated "
            f"{self.gpu.title}, not measured",
            f"  {batches_in_words(self.facts)}; not counted: evaluation, saving, and other programs on the card",
        ]
        for name, size in self.parts.items():
            if size:
                lines.append(f"  {format_bytes(size):>10}  {name}")
        if self.cure:
            lines.append(f"  {self.cure}")
        return "\n".join(lines)


class WillItFit(TrainerCallback):
    """A callback that says before the first forward pass what a Trainer's training needs, and later how far that was
    off.

        trainer.add_callback(WillItFit(trainer, stop=True))

    Args:
        gpu: the name of a card; by default it is the one that the Trainer uses.
        stop: do not begin a training that does not fit.
        say: gets the text.

    Attributes:
        need: the prediction; None before it is made, and if none can be made.
        is_here: whether a measurement on the Trainer's own card is still to be compared with it.

    On the card itself, PyTorch's peaks are counted anew from the beginning of the training.

    Raises:
        ConfigurationError: several processes or cards; no card, and none named. From `train()`: it does not fit.
    """

    def __init__(
        self, trainer: Trainer, *, gpu: str | None = None, stop: bool = False, say: Callable[[str], None] = print
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise ConfigurationError(f"WillItFit: it takes a transformers Trainer, got {brief(trainer)}.")
        ranks = several(trainer.args)
        if ranks:
            raise ConfigurationError(f"WillItFit: this Trainer uses {ranks}; one process and one card are predicted.")
        self.trainer = trainer
        self.is_here = gpu is None
        device = trainer.args.device
        if gpu is None and device.type != "cuda":
            raise ConfigurationError(
                "WillItFit: this Trainer uses no CUDA card. Name one, as in WillItFit(trainer, gpu='t4')."
            )
        self.gpu = gpu_of(device) if gpu is None else find_gpu(gpu)
        self.stop = stop
        self.say = say
        self.need: Need | None = None
        self.given_optimizer = trainer.optimizer
        self.facts: Facts = {"rows": 0, "tokens": 0}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if current_emulated_gpu():
            self.say(
                f"WillItFit: this card is an emulated {current_emulated_gpu()} already; "
                "the report at the end says what is needed."
            )
            return
        try:
            self.need = need = self.predict()
        except (WorkbenchError, RuntimeError, pickle.PicklingError, TypeError, AttributeError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            self.say(f"WillItFit: it cannot be said whether this fits. {reason[-1]}")
            return
        self.say(str(need))
        if self.stop and not need.fits:
            raise ConfigurationError(
                f"WillItFit: this training needs {format_bytes(need.need_bytes)} of "
                f"{format_bytes(need.room_bytes)}. {need.cure}"
            )
        if self.is_here:
            torch.cuda.reset_peak_memory_stats(args.device)
            # A training that failed before may have had larger batches.
            self.facts = {"rows": 0, "tokens": 0}
            watch_batches(self.trainer.model, self.facts)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare the prediction once with what was measured, as soon as a batch was as large as the predicted one, or
        at the last step."""
        if self.need is None or not self.is_here or state.global_step < STEPS:
            return
        predicted = self.need.facts
        is_as_large = self.facts["rows"] >= predicted["rows"] and self.facts["tokens"] >= predicted["tokens"]
        if is_as_large or state.global_step == state.max_steps:
            self.say(self.need.compare(torch.cuda.max_memory_reserved(args.device), is_as_large))
            self.is_here = False

    # ---- in this process ----

    def predict(self) -> Need:
        """Return what the training needs, and a cure if it does not fit.

        Raises WorkbenchError: the emulator is not set up or cannot be on this machine, or the copy cannot train.
        """
        trainer = self.trainer
        if getattr(trainer.args, STRATEGY, "") == BALANCED:
            raise ConfigurationError(
                f"WillItFit: {STRATEGY}={BALANCED!r} makes batches of unequal numbers of rows. "
                f"`workbench emulate --gpu {self.gpu.name} -- python …` trains with them on an "
                "emulated card."
            )
        rows, longest_row = first_rows(trainer)
        payload, model_bytes = pack_trainer(trainer, rows, self.given_optimizer)
        report = call_on(self.gpu, train_copy, self.gpu, payload, modules=(__name__,), time_limit=TIME_LIMIT_S)
        report["facts"]["longest_row"] = longest_row
        beside_bytes = self.gpu.context_bytes_estimate
        room_bytes = self.gpu.memory_bytes
        if self.is_here:
            # The card's context is made already, and so is no part of what is free.
            beside_bytes = max(torch.cuda.memory_allocated() - model_bytes, 0)
            room_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        need = Need(self.gpu, report["reserved"], beside_bytes, room_bytes, report["sizes"], report["facts"])
        return need if need.fits else replace(need, cure=find_cure(trainer, need, payload))


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of the catalogue that is like this machine's card, by its name or else by about its memory, with
    exactly the card's memory."""
    properties = torch.cuda.get_device_properties(device)
    gpu = recognize_gpu(properties.name, properties.total_memory)
    assert gpu is not None  # If no name fits, the memory decides.
    return card.with_memory(gpu, properties.total_memory)


def find_cure(trainer: Any, need: Need, payload: Payload) -> str:
    """Return the first small set of changes with which the training fits, in words.

    Estimates decide the order, as in the search for a program; then a copy of the Trainer trains with the changes.
    """
    arguments = vars(trainer.args)
    facts: Facts = {
        "kind": "trainer",
        "arguments": arguments,
        "sizes": need.sizes,
        **need.facts,
        **about(trainer.model),
    }
    run_it = f"`workbench plan --gpu {need.gpu.name} -- python …` runs your script with other changes, and writes them."
    parts = sizes_of(facts, need.reserved_bytes, need.beside_bytes)
    choices = [choice for choice in list_choices(facts, need.gpu) if not choice[0].environment()]
    hopeful = (sets_of(choices, numerics, parts, need.room_bytes) for numerics in NUMERICS)
    for changes in islice(chain.from_iterable(hopeful), MOST_TRIALS):
        with suppress(WorkbenchError, RuntimeError):  # Changes that do not suit the training are passed over.
            report = call_on(need.gpu, train_copy, need.gpu, payload, changes, time_limit=TIME_LIMIT_S)
            changed = replace(need, reserved_bytes=report["reserved"])
            if changed.fits:
                edits = " and ".join(map(str, edits_of(changes, facts)))
                amount = f"{format_bytes(changed.need_bytes)}, emulated too (loss {worst_numerics(changes)})"
                return f"{edits} makes it {amount}. {run_it}"
    return f"No small set of changes makes it fit. Take a smaller model, shorter rows, or a larger card. {run_it}"


def pack_trainer(trainer: Any, rows: list[Any], optimizer: Any) -> tuple[Payload, int]:
    """Pack a copy of a Trainer for another process; return it, and the bytes of the Trainer's models on this card.

    Args:
        rows: the data of the copy.
        optimizer: the one that the Trainer was given; None if it makes its own.

    Raises ConfigurationError: a parameter is of a class that is more than its shape.
    """
    args = trainer.args
    tensors: dict[int, Any] = {}
    for name, value in vars(trainer).items():
        if name not in REMADE and isinstance(value, torch.nn.Module):
            tensors.update((id(tensor), tensor) for tensor in in_order(value))
    shapes = []
    model_bytes = 0
    for tensor in tensors.values():
        if type(tensor) not in PLAIN:
            raise ConfigurationError(f"WillItFit: parameters of the kind {type(tensor).__name__} cannot be predicted.")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        shapes.append((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, is_parameter))
        if tensor.is_cuda:
            model_bytes += tensor.nbytes
    values = {field.name: getattr(args, field.name) for field in fields(args) if field.init}
    arguments = dill.dumps((type(args), {**values, **SHORT_TRAINING}), recurse=True)
    content = io.BytesIO()
    ShapesPickler(content, tensors, trainer).dump({"trainer": trainer, "rows": rows, "optimizer": optimizer})
    return (sys.path, shapes, arguments, content.getvalue()), model_bytes


def first_rows(trainer: Any) -> tuple[list[Any], int]:
    """Return the rows of all STEPS steps, and the tokens of the longest row, which each step has; 0 if lengths are
    unknown. Raises ConfigurationError: the data can be read only once."""
    data = trainer.train_dataset
    count = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps * STEPS
    order, longest_row = longest_first(trainer, STEPS)
    if order:
        return [data[row] for row in order[:count]], longest_row
    if iter(data) is data:
        raise ConfigurationError("WillItFit: the rows of this data can be read once, and are left for the training.")
    return list(islice(data, count)), 0


def in_order(module: torch.nn.Module) -> Any:
    """Yield a module's parameters and buffers in the order in which `model.to` moves them."""
    for child in module.children():
        yield from in_order(child)
    for tensor in chain(module._parameters.values(), module._buffers.values()):
        if tensor is not None:
            yield tensor


class ShapesPickler(dill.Pickler):  # type: ignore[misc]
    """A pickler that writes numbers in place of tensors, and leaves out what a Trainer makes anew (REMADE)."""

    def __init__(self, file: Any, tensors: Mapping[int, Any], trainer: Any) -> None:
        super().__init__(file, recurse=True)
        self.numbers = {tensor: number for number, tensor in enumerate(tensors)}
        self.trainer = trainer

    def persistent_id(self, thing: Any) -> Any:
        if thing is self.trainer.args:
            return "arguments"
        return self.numbers.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        if thing is self.trainer:
            state = {name: value for name, value in vars(thing).items() if name not in REMADE}
            return object.__new__, (type(thing),), state
        if isinstance(thing, ModuleType) and thing.__name__ != "__main__":
            # A module is imported again by its name: dill would copy the contents of one that lies beside the program.
            return import_module, (thing.__name__,)
        if isinstance(thing, type) and thing.__module__ != "__main__" and _is_named(thing):
            return thing.__qualname__
        if isinstance(thing, torch.nn.Module) and "_is_accelerate_prepared" in vars(thing):
            reduced: Any = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            make, arguments, state, *others = reduced
            return make, arguments, _undo_prepare(thing, state), *others
        return NotImplemented


def _is_named(cls: type) -> bool:
    """Whether a class can be pickled by its name, since its module has it under that name.

    dill by itself would copy a class whose package hides its module behind a name, as torch.optim.adamw.
    """
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def _undo_prepare(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that a model had before accelerate prepared it: the copy's accelerate prepares it again."""
    before = dict(state)
    before.pop("_is_accelerate_prepared", None)
    if "_original_forward" in before:
        forward = before.pop("_original_forward")
        before["forward"] = forward
        if getattr(forward, "__func__", None) is type(model).forward:
            del before["forward"]  # The model's class has it.
    return before


# ---- in the process of the emulated card ----


class ShapesUnpickler(dill.Unpickler):  # type: ignore[misc]
    """An unpickler that puts new tensors on the card in the places of the numbers, and TrainingArguments in theirs."""

    def __init__(self, content: bytes, shapes: list[Any], arguments: Any) -> None:
        super().__init__(io.BytesIO(content))
        self.arguments = arguments
        self.tensors = []
        for size, strides, dtype, is_trained, is_parameter in shapes:
            tensor = torch.empty_strided(size, strides, dtype=dtype, device="cuda")
            self.tensors.append(torch.nn.Parameter(tensor, is_trained) if is_parameter else tensor)

    def persistent_load(self, number: Any) -> Any:
        return self.arguments if number == "arguments" else self.tensors[number]


def train_copy(gpu: Gpu, payload: Payload, changes: Sequence[Technique] = ()) -> dict[str, Any]:
    """Train the copy of a Trainer, with changes, and return what it needed of the card that this process sees, or of
    one like it with more memory if that is too small.

    Returns:
        `reserved` bytes, the `sizes` of its tensors, and its batches as `facts`.

    Raises ConfigurationError: a step needs more than ENOUGH_BYTES.
    """
    on_card = change_environment({card.VARIABLE: card.variable(gpu), padding.VARIABLE: ""})
    with suppress(torch.OutOfMemoryError), on_card:
        return card.call_with_room(gpu, partial(_train, payload, changes))
    # An error raised in a handler would keep the traceback, and with it the tensors.
    raise ConfigurationError(
        f"WillItFit: a step of this Trainer needs more than {format_bytes(ENOUGH_BYTES)}, which no GPU has. "
        "Lower per_device_train_batch_size, or the length of its rows."
    )


def _train(payload: Payload, changes: Sequence[Technique]) -> dict[str, Any]:
    path, shapes, arguments, content = payload
    sys.path.extend(folder for folder in path if folder not in sys.path)
    allocator_for(torch.device("cuda")).prepare()
    with tempfile.TemporaryDirectory() as scratch, quiet():
        arguments_class, values = dill.loads(arguments)
        places = places_of(changes, values)
        args = arguments_class(**{**values, **places.arguments, "output_dir": scratch})
        copies = ShapesUnpickler(content, shapes, args).load()
        trainer = copies["trainer"]
        rows = copies["rows"]
        if places.on_model:
            trainer.model = apply(trainer.model, *places.on_model)
        trainer.data_collator = Collator(trainer.data_collator, padding.VARIABLE)
        trainer.model_init = None
        # The constructor makes what was left out, and resets some of what was sent: that is put back.
        kept = dict(vars(trainer))
        Trainer.__init__(
            trainer,
            model=trainer.model,
            args=args,
            data_collator=trainer.data_collator,
            train_dataset=rows,
            processing_class=trainer.processing_class,
            optimizers=(copies["optimizer"], None),
        )
        vars(trainer).update(kept)
        trainer._get_train_sampler = lambda *_, **__: range(len(rows))
        if places.on_trainer:
            apply(trainer, *places.on_trainer)
        facts: Facts = {"rows": 0, "tokens": 0}
        watch_batches(trainer.model, facts)
        trainer.train()
    return {"reserved": torch.cuda.max_memory_reserved(), "sizes": sizes(trainer.model, trainer), "facts": facts}
