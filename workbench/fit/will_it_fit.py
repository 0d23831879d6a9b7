"""`WillItFit`: what a Trainer's training needs of a card, said before its first forward pass.

The Trainer is sent to a process with an emulated card, of each tensor of its models the shape alone. There it trains
for a few steps on the longest rows of its data, with PyTorch's own CUDA allocator, on no values.
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
from workbench.base.device import emulated
from workbench.base.errors import ConfigurationError, WorkbenchError, brief
from workbench.base.patches import changed_environment
from workbench.base.result import Result
from workbench.fit.any_training import (
    BALANCED,
    STRATEGY,
    Collator,
    about,
    longest_first,
    several,
    sizes,
    watch_batches,
)
from workbench.fit.apply import apply
from workbench.fit.candidates import offered, sets_of, sizes_of
from workbench.fit.edit import edits_of
from workbench.fit.places import places_of
from workbench.fit.results import batches_in_words
from workbench.fit.search import STEPS
from workbench.gpus.catalogue import ENOUGH_BYTES, Gpu, of_device
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator import card, padding
from workbench.gpus.emulator.call import call_on
from workbench.measure.allocators import allocator_for
from workbench.models.load import quiet
from workbench.techniques import Technique

SECONDS = 300.0  # for a training of a few steps there
MOST_TRIALS = 8  # of changes
# where modules are, shapes, the arguments, the Trainer
Payload = tuple[list[str], list[Any], bytes, bytes]
PLAIN = (torch.Tensor, torch.nn.Parameter)
# of a Trainer, what it makes anew in the other process
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
THERE = {  # of its arguments: a few steps, with nothing beside them
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
    """What a training needs of a card, by PyTorch's allocator on an emulated one.

    Attributes:
        reserved_bytes: the most that PyTorch's allocator held.
        beside_bytes: CUDA's context; of a card that is there instead what this process holds beside its models.
        room_bytes: what there is.
        sizes: of the `weights`, the optimizer's `states`, and the `peak` of all tensors together.
        seen: the batches, as `rows` and `tokens` at most, and `longest_row` of the data.
        cure: changes with which it fits, trained there too; empty if it does as it is.
    """

    gpu: Gpu
    reserved_bytes: int
    beside_bytes: int
    room_bytes: int
    sizes: Mapping[str, int]
    seen: Mapping[str, Any]
    cure: str = ""

    @property
    def need_bytes(self) -> int:
        return self.reserved_bytes + self.beside_bytes

    @property
    def parts(self) -> dict[str, int]:
        """What it needs, which they sum to."""
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

    def compared(self, reserved_bytes: int, is_as_large: bool) -> str:
        """With what was measured, of a batch as large as the longest or not."""
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
            f"  {batches_in_words(self.seen)}; not counted: evaluation, saving, and other programs on the card",
        ]
        for name, size in self.parts.items():
            if size:
                lines.append(f"  {format_bytes(size):>10}  {name}")
        if self.cure:
            lines.append(f"  {self.cure}")
        return "\n".join(lines)


class WillItFit(TrainerCallback):
    """Says before the first forward pass what a Trainer's training needs, and afterwards how far that was off.

        trainer.add_callback(WillItFit(trainer, stop=True))

    Args:
        gpu: the card that is meant; by default the one that the Trainer uses.
        stop: do not begin a training that does not fit.
        say: is told.

    Attributes:
        need: what was said; None until then, and where nobody can say.

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
        self.gpu = known_card(device) if gpu is None else find_gpu(gpu)
        self.stop = stop
        self.say = say
        self.need: Need | None = None
        self.given_optimizer = trainer.optimizer
        self.seen: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if emulated():
            self.say(
                f"WillItFit: this card is an emulated {emulated()} already; the report at the end says what is needed."
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
            self.seen = watch_batches(self.trainer.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Once: after the first steps, as soon as there was a batch as large as the one that was predicted."""
        if self.need is None or not self.is_here or state.global_step < STEPS:
            return
        is_as_large = all(self.seen[name] >= self.need.seen[name] for name in self.seen)
        if is_as_large or state.global_step == state.max_steps:
            self.say(self.need.compared(torch.cuda.max_memory_reserved(args.device), is_as_large))
            self.is_here = False

    # ---- in this process ----

    def predict(self) -> Need:
        """Raises WorkbenchError: the emulator is not set up or cannot be here, or the Trainer cannot train there."""
        trainer = self.trainer
        if getattr(trainer.args, STRATEGY, "") == BALANCED:
            raise ConfigurationError(
                f"WillItFit: {STRATEGY}={BALANCED!r} makes batches of unequal numbers of rows. "
                f"`workbench emulate --gpu {self.gpu.name} -- python …` trains with them on an "
                "emulated card."
            )
        rows, longest_row = first_rows(trainer)
        payload, there_bytes = sent(trainer, rows, self.given_optimizer)
        report = call_on(self.gpu, train_there, self.gpu, payload, modules=(__name__,), time_limit=SECONDS)
        report["seen"]["longest_row"] = longest_row
        beside_bytes = self.gpu.context_bytes_estimate
        room_bytes = self.gpu.memory_bytes
        if self.is_here:  # its context is there already
            beside_bytes = max(torch.cuda.memory_allocated() - there_bytes, 0)
            room_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        need = Need(self.gpu, report["reserved"], beside_bytes, room_bytes, report["sizes"], report["seen"])
        return need if need.fits else replace(need, cure=cure(trainer, need, payload))


def known_card(device: torch.device) -> Gpu:
    """The card of this machine: the known one of its name, or of about its memory, with as much as it has."""
    properties = torch.cuda.get_device_properties(device)
    gpu = of_device(properties.name, properties.total_memory)
    assert gpu is not None  # where no name fits, the memory decides
    return card.with_memory(gpu, properties.total_memory)


def cure(trainer: Any, need: Need, payload: Payload) -> str:
    """The first small set of changes with which it fits: found by estimates, as the search of a program does, and
    trained there like the Trainer itself."""
    arguments = vars(trainer.args)
    seen = {"kind": "trainer", "arguments": arguments, "sizes": need.sizes, **need.seen, **about(trainer.model)}
    run_it = f"`workbench plan --gpu {need.gpu.name} -- python …` runs your script with other changes, and writes them."
    parts = sizes_of(seen, need.reserved_bytes, need.beside_bytes)
    choices = [choice for choice in offered(seen, need.gpu) if not choice[0].environment()]
    hopeful = (sets_of(choices, numerics, parts, need.room_bytes) for numerics in NUMERICS)
    for changes in islice(chain.from_iterable(hopeful), MOST_TRIALS):
        with suppress(WorkbenchError, RuntimeError):  # these do not suit it
            report = call_on(need.gpu, train_there, need.gpu, payload, changes, time_limit=SECONDS)
            changed = replace(need, reserved_bytes=report["reserved"])
            if changed.fits:
                edits = " and ".join(map(str, edits_of(changes, seen)))
                need_there = f"{format_bytes(changed.need_bytes)}, emulated too (loss {worst_numerics(changes)})"
                return f"{edits} makes it {need_there}. {run_it}"
    return f"No small set of changes makes it fit. Take a smaller model, shorter rows, or a larger card. {run_it}"


def sent(trainer: Any, rows: list[Any], optimizer: Any) -> tuple[Payload, int]:
    """A Trainer for another process, and the bytes of its models here.

    Raises ConfigurationError: a parameter of a kind that is more than its shape.
    """
    args = trainer.args
    tensors: dict[int, Any] = {}
    for name, value in vars(trainer).items():
        if name not in REMADE and isinstance(value, torch.nn.Module):
            tensors.update((id(tensor), tensor) for tensor in in_order(value))
    shapes = []
    here_bytes = 0
    for tensor in tensors.values():
        if type(tensor) not in PLAIN:
            raise ConfigurationError(f"WillItFit: parameters of the kind {type(tensor).__name__} cannot be predicted.")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        shapes.append((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, is_parameter))
        if tensor.is_cuda:
            here_bytes += tensor.nbytes
    values = {field.name: getattr(args, field.name) for field in fields(args) if field.init}
    arguments = dill.dumps((type(args), {**values, **THERE}), recurse=True)
    content = io.BytesIO()
    there = {"trainer": trainer, "rows": rows, "optimizer": optimizer}
    ShapesPickler(content, tensors, args, trainer).dump(there)
    return (sys.path, shapes, arguments, content.getvalue()), here_bytes


def first_rows(trainer: Any) -> tuple[list[Any], int]:
    """The rows of all steps, and the length of the longest, which is in each of them; 0 where nobody can say."""
    data = trainer.train_dataset
    count = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps * STEPS
    order, longest_row = longest_first(trainer, STEPS)
    if order:
        return [data[row] for row in order[:count]], longest_row
    if iter(data) is data:
        raise ConfigurationError("WillItFit: the rows of this data can be read once, and are left for the training.")
    return list(islice(data, count)), 0


def in_order(module: torch.nn.Module) -> Any:
    """Parameters and buffers as `model.to` moves them."""
    for child in module.children():
        yield from in_order(child)
    for tensor in chain(module._parameters.values(), module._buffers.values()):
        if tensor is not None:
            yield tensor


class ShapesPickler(dill.Pickler):  # type: ignore[misc]
    """Writes numbers in place of tensors, and of a Trainer what it does not make anew."""

    def __init__(self, file: Any, tensors: Mapping[int, Any], args: Any, trainer: Any) -> None:
        super().__init__(file, recurse=True)
        self.numbers = {tensor: number for number, tensor in enumerate(tensors)}
        self.args = args
        self.trainer = trainer

    def persistent_id(self, thing: Any) -> Any:
        if thing is self.args:
            return "arguments"
        return self.numbers.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        if thing is self.trainer:
            state = {name: value for name, value in vars(thing).items() if name not in REMADE}
            return object.__new__, (type(thing),), state
        if isinstance(thing, ModuleType) and thing.__name__ != "__main__":
            # dill would copy what is in those that lie beside the program
            return import_module, (thing.__name__,)
        if isinstance(thing, type) and thing.__module__ != "__main__" and _is_named(thing):
            return thing.__qualname__
        if isinstance(thing, torch.nn.Module) and "_is_accelerate_prepared" in vars(thing):
            reduced: Any = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            make, arguments, state, *others = reduced
            return make, arguments, _unprepared(thing, state), *others
        return NotImplemented


def _is_named(cls: type) -> bool:
    """Whether its module has a class by its name. dill would copy those whose package does not show the module, as
    torch.optim.adamw."""
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def _unprepared(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that a model had before accelerate prepared it, which is done there again."""
    before = dict(state)
    before.pop("_is_accelerate_prepared", None)
    if "_original_forward" in before:
        forward = before.pop("_original_forward")
        before["forward"] = forward
        if getattr(forward, "__func__", None) is type(model).forward:
            del before["forward"]  # its class has it
    return before


# ---- in the process of the card ----


class ShapesUnpickler(dill.Unpickler):  # type: ignore[misc]
    """Puts tensors of the card in their places."""

    def __init__(self, content: bytes, shapes: list[Any], arguments: Any) -> None:
        super().__init__(io.BytesIO(content))
        self.arguments = arguments
        self.tensors = []
        for size, strides, dtype, is_trained, is_parameter in shapes:
            tensor = torch.empty_strided(size, strides, dtype=dtype, device="cuda")
            self.tensors.append(torch.nn.Parameter(tensor, is_trained) if is_parameter else tensor)

    def persistent_load(self, number: Any) -> Any:
        return self.arguments if number == "arguments" else self.tensors[number]


def train_there(gpu: Gpu, payload: Payload, changes: Sequence[Technique] = ()) -> dict[str, Any]:
    """What a Trainer that was sent, with changes, has needed of the card that this process sees; of one like it with
    more memory, where that is too small."""
    with changed_environment({card.VARIABLE: card.variable(gpu), padding.VARIABLE: ""}):
        try:
            return card.with_room(gpu, partial(_train, payload, changes))
        except torch.OutOfMemoryError:
            raise ConfigurationError(
                f"WillItFit: a step of this Trainer needs more than {format_bytes(ENOUGH_BYTES)}, which no GPU has. "
                "Lower per_device_train_batch_size, or the length of its rows."
            ) from None


def _train(payload: Payload, changes: Sequence[Technique]) -> dict[str, Any]:
    path, shapes, arguments, content = payload
    sys.path.extend(folder for folder in path if folder not in sys.path)
    allocator_for(torch.device("cuda")).prepare()
    with tempfile.TemporaryDirectory() as scratch, quiet():
        arguments_class, values = dill.loads(arguments)
        places = places_of(changes, values)
        args = arguments_class(**{**values, **places.arguments, "output_dir": scratch})
        there = ShapesUnpickler(content, shapes, args).load()
        trainer = there["trainer"]
        rows = there["rows"]
        if places.on_model:
            trainer.model = apply(trainer.model, *places.on_model)
        trainer.data_collator = Collator(trainer.data_collator, padding.VARIABLE)
        trainer.model_init = None
        kept = dict(vars(trainer))
        Trainer.__init__(
            trainer,
            model=trainer.model,
            args=args,
            data_collator=trainer.data_collator,
            train_dataset=rows,
            processing_class=trainer.processing_class,
            optimizers=(there["optimizer"], None),
        )
        vars(trainer).update(kept)
        trainer._get_train_sampler = lambda *_, **__: range(len(rows))
        if places.on_trainer:
            apply(trainer, *places.on_trainer)
        seen = watch_batches(trainer.model)
        trainer.train()
    return {"reserved": torch.cuda.max_memory_reserved(), "sizes": sizes(trainer.model, trainer), "seen": seen}
