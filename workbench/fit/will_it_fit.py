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

from workbench.advise.candidate import NUMERICS
from workbench.base.categories import Category, Phase, format_bytes
from workbench.base.errors import ConfigurationError, WorkbenchError, brief
from workbench.base.patches import changed_environment
from workbench.base.result import Result
from workbench.fit.any_training import Collator, lengths_of, longest_first, several, watch_batches
from workbench.fit.apply import about, apply
from workbench.fit.candidates import CONTEXT, GAPS, offered, sets_of
from workbench.fit.places import as_keywords, by_arguments, changed_arguments
from workbench.fit.results import batches_in_words
from workbench.gpus.catalogue import Gpu, of_device
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator import card, padding
from workbench.gpus.emulator.call import call_on
from workbench.measure.allocators import allocator_for
from workbench.measure.emulated import emulated
from workbench.measure.meter import Meter
from workbench.models.load import quiet
from workbench.prediction.emulated import with_room
from workbench.prediction.rows import STEPS  # without books; one more, with them
from workbench.recipe import BALANCED, STRATEGY, changed_settings
from workbench.techniques import Capability, Technique
from workbench.techniques.base import Arguments

SECONDS = 300.0  # for a training of a few steps there
MOST_TRIALS = 8  # of changes
Payload = tuple[list[str], list[Any], bytes, bytes]  # where modules are, shapes, the arguments, the Trainer
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
    "max_steps": STEPS + 1,
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
        by_category: bytes at the peak, which sum to `peak_allocated_bytes`.
        beside_bytes: CUDA's context; of a card that is there instead what this process holds beside its models.
        room_bytes: what there is.
        seen: the batches, as `rows` and `tokens` at most, and `longest_row` of the data.
        cure: changes with which it fits, trained there too; empty if it does as it is.
    """

    gpu: Gpu
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    by_category: Mapping[str, int]
    beside_bytes: int
    room_bytes: int
    seen: Mapping[str, Any]
    cure: str = ""

    @property
    def need_bytes(self) -> int:
        return self.peak_reserved_bytes + self.beside_bytes

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.room_bytes

    def __str__(self) -> str:
        verdict = "it fits" if self.fits else "it does NOT fit"
        lines = [
            f"WillItFit: {verdict}. This training needs {format_bytes(self.need_bytes)} of "
            f"{format_bytes(self.room_bytes)}, by PyTorch's allocator on an emulated {self.gpu.title}, not measured",
            f"  {batches_in_words(self.seen)}; not counted: evaluation, saving, and other programs on the card",
        ]
        parts = {**self.by_category, "gaps of the allocator": self.peak_reserved_bytes - self.peak_allocated_bytes}
        parts["beside the training"] = self.beside_bytes
        lines += [f"  {format_bytes(size):>10}  {name.replace('_', ' ')}" for name, size in parts.items() if size]
        return "\n".join([*lines, *([f"  {self.cure}"] if self.cure else [])])


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
            self.need = self.predict()
        except (WorkbenchError, RuntimeError, pickle.PicklingError, TypeError, AttributeError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            self.say(f"WillItFit: it cannot be said whether this fits. {reason[-1]}")
            return
        self.say(str(self.need))
        if self.stop and not self.need.fits:
            raise ConfigurationError(
                f"WillItFit: this training needs {format_bytes(self.need.need_bytes)} of "
                f"{format_bytes(self.need.room_bytes)}. {self.need.cure}"
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
            self.say(self.compared(torch.cuda.max_memory_reserved(args.device), is_as_large))
            self.is_here = False

    def compared(self, reserved_bytes: int, is_as_large: bool) -> str:
        assert self.need is not None
        off = self.need.need_bytes / reserved_bytes - 1
        text = f"WillItFit: measured {format_bytes(reserved_bytes)}; predicted {format_bytes(self.need.need_bytes)}"
        if is_as_large:
            return f"{text}, off by {off:+.1%}"
        return f"{text} for the longest batch, which did not come"

    # ---- in this process ----

    def predict(self) -> Need:
        """Raises WorkbenchError: the emulator is not set up or cannot be here, or the Trainer cannot train there."""
        trainer = self.trainer
        if getattr(trainer.args, STRATEGY, "") == BALANCED:
            raise ConfigurationError(
                f"WillItFit: {STRATEGY}={BALANCED!r} makes batches of unequal numbers of rows. `workbench emulate "
                f"--gpu {self.gpu.name} -- python …` trains with them on an emulated card."
            )
        payload, there_bytes = sent(trainer, self.given_optimizer)
        report = call_on(self.gpu, train_there, self.gpu, payload, modules=(__name__,), time_limit=SECONDS)
        lengths = lengths_of(trainer.train_dataset)
        if lengths:
            report["seen"]["longest_row"] = max(lengths)
        beside_bytes = self.gpu.context_bytes_estimate
        room_bytes = self.gpu.memory_bytes
        if self.is_here:  # its context is there already
            beside_bytes = max(torch.cuda.memory_allocated() - there_bytes, 0)
            room_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        states_bytes = report.pop("states")
        need = Need(self.gpu, beside_bytes=beside_bytes, room_bytes=room_bytes, **report)
        return need if need.fits else replace(need, cure=cure(trainer, need, states_bytes, payload))


def known_card(device: torch.device) -> Gpu:
    """The card of this machine: the known one of its name, or of about its memory, with as much as it has."""
    properties = torch.cuda.get_device_properties(device)
    gpu = of_device(properties.name, properties.total_memory)
    assert gpu is not None  # where no name fits, the memory decides
    return card.with_memory(gpu, properties.total_memory)


def cure(trainer: Any, need: Need, states_bytes: int, payload: Payload) -> str:
    """The first small set of changes with which it fits: found by estimates, as the search of a program does, and
    trained there like the Trainer itself."""
    arguments = vars(trainer.args)
    seen = {"kind": "trainer", "arguments": arguments, **about(trainer.model, arguments)}
    run_it = f"`workbench plan --gpu {need.gpu.name} -- python …` runs your script with other changes, and writes them."
    peak = need.by_category
    sizes = {
        **peak,
        Category.GRADIENTS: sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad),
        Category.OPTIMIZER_STATES: states_bytes,
        Category.ACTIVATIONS: peak[Category.ACTIVATIONS] + peak[Category.TEMPORARIES],
        GAPS: need.peak_reserved_bytes - need.peak_allocated_bytes,
        CONTEXT: need.beside_bytes,
    }
    choices = [choice for choice in offered(seen, need.gpu) if not any(change.environment() for change in choice)]
    hopeful = (sets_of(choices, numerics, sizes, need.room_bytes) for numerics in NUMERICS)
    for changes in islice(chain.from_iterable(hopeful), MOST_TRIALS):
        with suppress(WorkbenchError, RuntimeError):  # these do not suit it
            report = call_on(need.gpu, train_there, need.gpu, payload, changes, time_limit=SECONDS)
            changed = replace(need, peak_reserved_bytes=report["peak_reserved_bytes"])
            if changed.fits:
                numerics = max((change.numerics for change in changes), key=NUMERICS.index)
                edits = in_words(changes, arguments)
                return f"{edits} makes it {format_bytes(changed.need_bytes)}, emulated too (loss {numerics}). {run_it}"
    return f"No small set of changes makes it fit. Take a smaller model, shorter rows, or a larger card. {run_it}"


def in_words(changes: Sequence[Technique], arguments: Arguments) -> str:
    """What a script says to have these changes."""
    changed: Arguments = {}
    edits = []
    for change in changes:
        call = f"{type(change).__name__}({as_keywords(changed_settings(change))})"
        if by_arguments(change, arguments):
            changed |= changed_arguments(change, {**arguments, **changed})
        elif Capability.ADAPTER in change.brings:
            edits.append(f"model = apply(model, {call}) before the Trainer")
        else:
            edits.append(f"apply(trainer, {call})")
    if changed:
        edits.insert(0, f"TrainingArguments({as_keywords(changed)})")
    return " and ".join(edits)


def sent(trainer: Any, optimizer: Any) -> tuple[Payload, int]:
    """A Trainer for another process, and the bytes of its models here.

    Raises ConfigurationError: a parameter of a kind that is more than its shape.
    """
    args = trainer.args
    attributes = {name: value for name, value in vars(trainer).items() if name not in REMADE}
    models = [value for value in attributes.values() if isinstance(value, torch.nn.Module)]
    tensors = {id(tensor): tensor for model in models for tensor in in_order(model)}
    for tensor in tensors.values():
        if type(tensor) not in PLAIN:
            raise ConfigurationError(f"WillItFit: parameters of the kind {type(tensor).__name__} cannot be predicted.")
    values = {field.name: getattr(args, field.name) for field in fields(args) if field.init}
    arguments = dill.dumps((type(args), {**values, **THERE}), recurse=True)
    content = io.BytesIO()
    there = {"trainer": trainer, "rows": first_rows(trainer), "optimizer": optimizer}
    ShapesPickler(content, tensors, args, trainer).dump(there)
    shapes = [
        (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, isinstance(tensor, PLAIN[1]))
        for tensor in tensors.values()
    ]
    here_bytes = sum(tensor.nbytes for tensor in tensors.values() if tensor.is_cuda)
    return (sys.path, shapes, arguments, content.getvalue()), here_bytes


def first_rows(trainer: Any) -> list[Any]:
    """The rows of all steps: each has the longest, where their lengths are known."""
    data = trainer.train_dataset
    count = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    steps = STEPS + 1
    lengths = lengths_of(data)
    if lengths:
        return [data[row] for row in longest_first(lengths, count, steps)[: steps * count]]
    if iter(data) is data:
        raise ConfigurationError("WillItFit: the rows of this data can be read once, and are left for the training.")
    return list(islice(data, steps * count))


def in_order(module: torch.nn.Module) -> Any:
    """Parameters and buffers as `model.to` moves them."""
    for child in module.children():
        yield from in_order(child)
    for tensors in (module._parameters, module._buffers):
        yield from filter(lambda tensor: tensor is not None, tensors.values())


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
            return import_module, (thing.__name__,)  # dill would copy what is in those that lie beside the program
        if isinstance(thing, type) and thing.__module__ != "__main__" and _is_named(thing):
            return thing.__qualname__
        if isinstance(thing, torch.nn.Module) and "_is_accelerate_prepared" in vars(thing):
            reduced: Any = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            make, arguments, state, *others = reduced
            return make, arguments, _unprepared(thing, state), *others
        return NotImplemented


def _is_named(kind: type) -> bool:
    """Whether its module has a class by its name. dill would copy those whose package does not show the module, as
    torch.optim.adamw."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _unprepared(model: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that a model had before accelerate prepared it, which is done there again."""
    before = {name: value for name, value in state.items() if name != "_is_accelerate_prepared"}
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
        return with_room(gpu, partial(_train, *payload, changes))


def _train(
    path: list[str],
    shapes: list[Any],
    arguments: bytes,
    content: bytes,
    changes: Sequence[Technique],
) -> dict[str, Any]:
    sys.path.extend(folder for folder in path if folder not in sys.path)
    allocator_for(torch.device("cuda")).prepare()
    with tempfile.TemporaryDirectory() as scratch, quiet():
        kind, values = dill.loads(arguments)
        by_calls = []
        for change in changes:
            if by_arguments(change, values):
                values |= changed_arguments(change, values)
            else:
                by_calls.append(change)
        trainer, seen = remade(kind(**{**values, "output_dir": scratch}), shapes, content, by_calls)
        books = Books(trainer)
        trainer.add_callback(books)
        try:
            trainer.train()
        finally:
            books.meter.__exit__()  # its hooks would keep the model of a training that found no room
    report = books.meter.report()
    by_category = {str(category): size for category, size in report.by_category.items()}
    by_category[Category.UNATTRIBUTED] += books.allocated_bytes - sum(by_category.values())
    return {
        "peak_allocated_bytes": books.allocated_bytes,
        "peak_reserved_bytes": books.reserved_bytes,
        "by_category": by_category,
        "states": report.maximum_by_category[Category.OPTIMIZER_STATES],
        "seen": seen,
    }


class Books(TrainerCallback):
    """Reads the peaks of the first steps, and what for in one step more: who asks that lets tensors live longer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.meter = Meter(trainer.model)
        self.allocated_bytes = 0
        self.reserved_bytes = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if state.global_step == STEPS:
            self.allocated_bytes = torch.cuda.max_memory_allocated()
            self.reserved_bytes = torch.cuda.max_memory_reserved()
            self.meter.watch(optimizer)
            self.meter.__enter__()
            tell_phases(self.trainer, self.meter)


def remade(
    args: Any,
    shapes: list[Any],
    content: bytes,
    changes: Sequence[Technique],
) -> tuple[Any, dict[str, int]]:
    """The Trainer on this card, changed, and the largest batch that its model has seen so far."""
    there = ShapesUnpickler(content, shapes, args).load()
    trainer = there["trainer"]
    rows = there["rows"]
    adapters = [change for change in changes if Capability.ADAPTER in change.brings]
    if adapters:
        trainer.model = apply(trainer.model, *adapters)
    kept = {**vars(trainer), "data_collator": Collator(trainer.data_collator, padding.VARIABLE), "model_init": None}
    Trainer.__init__(
        trainer,
        model=trainer.model,
        args=args,
        data_collator=kept["data_collator"],
        train_dataset=rows,
        processing_class=kept["processing_class"],
        optimizers=(there["optimizer"], None),
    )
    vars(trainer).update(kept)
    trainer._get_train_sampler = lambda *_, **__: range(len(rows))
    others = [change for change in changes if change not in adapters]
    if others:
        apply(trainer, *others)
    return trainer, watch_batches(trainer.model)


def tell_phases(trainer: Any, meter: Meter) -> None:
    """Tell the meter when a Trainer's forward pass, backward pass and optimizer step begin."""
    compute_loss = trainer.compute_loss
    training_step = trainer.training_step

    def loss_with_phases(*args: Any, **kwargs: Any) -> Any:
        meter.enter_phase(Phase.FORWARD)
        loss = compute_loss(*args, **kwargs)
        meter.enter_phase(Phase.BACKWARD)
        return loss

    def step_with_phases(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        meter.see(inputs.values())
        meter.enter_phase(Phase.FORWARD)
        loss = training_step(model, inputs, *args, **kwargs)
        meter.enter_phase(Phase.OPTIMIZER_STEP)
        return loss

    trainer.compute_loss = loss_with_phases
    trainer.training_step = step_with_phases
