"""What a memory-saving technique is, and the few seams through which it may act.

A technique is a frozen dataclass: its fields are its settings. It says at which stage it acts, and overrides only the
seams it needs. What it attacks, what it costs and whether the loss stays the same stands on its card (`cards.toml`).
`workbench.run` calls the seams of every technique of a recipe, stage by stage. It knows no technique by name, and no
name decides anything.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum, StrEnum, auto
from itertools import permutations
from types import MappingProxyType
from typing import Any, ClassVar, Self

from workbench.base.categories import Category
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, explained
from workbench.base.settings import check_settings, described, named, setting
from workbench.models.family import ModelFamily, family_of, on_meta

Arguments = dict[str, Any]


class Numerics(StrEnum):
    """What a technique does to the training loss, everything else being equal."""

    EXACT = "exact"  # the same up to the rounding of the arithmetic
    APPROXIMATE = "approximate"  # the same mathematics in lower precision
    DIFFERENT = "different"  # another model or another optimization


class Stage(IntEnum):
    """When a technique acts: in every seam, those of an earlier stage come before those of a later one.

    Techniques of one stage act on different things, or exclude each other: their order does not matter.
    """

    PROCESS = auto()  # settings of the process
    EXAMPLES = auto()  # what an example is, and how many make a step
    BATCHES = auto()  # where examples are kept, and how many the device sees at a time
    ARCHITECTURE = auto()  # parts of the model are replaced
    QUANTIZE = auto()  # in what the weights are stored
    ADAPT = auto()  # trained parts are added to frozen ones
    WRAP = auto()  # what surrounds the model's work: precision, recomputation, offloading, the loss
    COMPILE = auto()  # all of that becomes kernels of its own
    OPTIMIZE = auto()  # what turns gradients into steps
    STEP = auto()  # when these are taken


class Capability(StrEnum):
    """What techniques can give to, or forbid in, the training they act on together."""

    KEY_VALUE_CACHE = "a key-value cache during training"
    ADAPTER = "an adapter beside the frozen model"
    SIXTEEN_BIT_WEIGHTS = "16-bit weights"
    VIRTUAL_TOKENS = "virtual tokens before the text"
    QUANTIZED_WEIGHTS = "quantized weights"
    OPTIMIZER = "an optimizer of its own"
    TRAINING_SET = "a training set that is not the packed blocks"
    UNEQUAL_BATCHES = "batches of unequal lengths"
    STREAM = "a stream of examples, which has no length"
    ACCUMULATION = "gradients summed over several micro-batches"
    OFFLOADED_ACTIVATIONS = "activations that wait elsewhere"
    RECOMPUTATION = "blocks that are computed a second time"
    LOSS_SCALING = "a scaled loss, whose gradients are divided before the step"


@dataclass(frozen=True)
class Shape:
    """What training looks at: each of `steps` optimizer steps sees `sequences` (B) of `tokens` tokens (T) each."""

    sequences: int
    tokens: int
    steps: int


@dataclass(frozen=True)
class Call:
    """A plain function and its settings: what a technique does, once for the run and for the exported script.

    The run calls the function on what its seam names, and the settings; a setting may be a Call that makes it. The
    script contains the same call, and of a function of the workbench its own source (`inspect.getsource`): that may use
    nothing of the workbench but its own file.

    Args:
        measured: settings that take another value in a run, which keeps accounts that a script does not need.
    """

    function: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> Any:
        settings: dict[str, Any] = {}
        for name, value in {**self.settings, **self.measured}.items():
            if isinstance(value, Call):
                value = value()
            settings[name] = value
        return self.function(*arguments, **settings)


class Technique:
    """Base of all techniques. Subclasses are frozen dataclasses, one file each, and are listed in `cards.toml`.

    `name` is that of the file. `title`, `attacks`, `costs`, `numerics` and `family` stand on its card there.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    stage: ClassVar[Stage] = Stage.WRAP
    attacks: ClassVar[tuple[Category, ...]] = ()
    costs: ClassVar[str]
    numerics: ClassVar[Numerics]
    family: ClassVar[str] = ""
    called: ClassVar[Mapping[str, str]] = MappingProxyType({})  # names of settings: "kind=sgd" of the optimizer is SGD
    brings: ClassVar[frozenset[Capability]] = frozenset()
    forbids: ClassVar[frozenset[Capability]] = frozenset()
    # the customary rate, relative to that of full fine-tuning with AdamW
    learning_rate_factor: ClassVar[float] = 1.0
    # about what share of a category: see `cards.toml`
    leaves: ClassVar[Mapping[str, float]] = MappingProxyType({})
    slower: ClassVar[float] = 0.0
    in_a_script: ClassVar[str] = ""
    # settings, as `variants` orders them
    worth_trying: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    alone: ClassVar[str] = ""  # why it cannot be used on several ranks; empty if it can
    # why not on a model that is cut into shards, by the engine (`fsdp`, `deepspeed`) or the beginning of a way's name
    # (`zero3`)
    unsharded: ClassVar[Mapping[str, str]] = MappingProxyType({})
    # why a shadow cannot predict it, which has no stand-in for it; empty if it can
    untraceable: ClassVar[str] = ""
    # a checkpoint of the Trainer holds all that training needs to go on
    can_be_resumed: ClassVar[bool] = True
    # settings of older versions, and the one value that is left of each: old records read, and recipes keep their ids
    retired: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __post_init__(self) -> None:
        check_settings(self, self.name)

    @classmethod
    def given(cls, settings: object) -> Self:
        """From settings by name, as in a JSON file. Raises ConfigurationError, also for what is no mapping."""
        if isinstance(settings, Mapping):
            settings = {name: value for name, value in settings.items() if (name, value) not in cls.retired.items()}
        return cls(**named(settings, cls().settings(), cls.name))

    @property
    def positions(self) -> int:
        """Positions of the model that the technique takes, in each sequence, beside its T tokens."""
        return 0

    def settings(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def card(self) -> str:
        """What it attacks, costs and does to the loss, and a line for each setting: what the command `list` prints."""
        lines = [
            f"{self.name}: {self.title}",
            f"  attacks    {', '.join(category.replace('_', ' ') for category in self.attacks)}",
            f"  costs      {self.costs}",
            f"  same loss  {self.numerics}",
        ]
        for entry in fields(self):  # type: ignore[arg-type]
            accepts = f"{entry.metadata['help']} ({described(entry)})"
            lines.append(f"  {self.name}={entry.name}:{entry.default}  {accepts}")
        return "\n".join(lines)

    def missing(self, device: Device) -> str | None:
        """Why the technique cannot run on this device, or with what is installed here, and the cure; None if it can.
        Asked before anything is loaded."""

    def check_config(self, config: Any) -> None:
        """Raises ConfigurationError if a model of this config does not suit. Asked by `run` before loading."""

    # ---- the seams, in the order in which they are applied; None is what those return that are only described ----

    def shape(self, shape: Shape) -> Shape:
        """Other batches, with as many tokens in all. Called on construction of a recipe too: keep it light.

        The customary learning rate goes with the square root of the tokens of a step.

        Raises:
            ConfigurationError: the settings do not fit the shape.
        """
        return shape

    def training_arguments(self, arguments: Arguments) -> Arguments:
        """Keyword arguments of `transformers.TrainingArguments`. Called on construction of a recipe too: keep it light.

        Raises:
            ConfigurationError: the settings do not fit the batch.
        """
        return arguments

    def examples(self) -> Call | None:
        """Of (text, tokenizer, length, batch, seed): a training set instead of the packed blocks, or None.

        Rows with `input_ids` of at most T = `length` tokens, in whole batches of B = `batch`. The function raises
        ValueError, with the cure, if the text does not give a batch.
        """

    def dataset(self) -> Call | None:
        """Of (dataset), rows with `input_ids`: the dataset that is trained on, or None."""

    def collator(self) -> Call | None:
        """Of (collator, rows): the batch of B rows, `input_ids` and `labels` (B, T), made otherwise, or None."""

    def run_context(self) -> AbstractContextManager[Any]:
        """A context around the whole run, entered before the model is loaded: for settings of the process. The data
        are ready by then."""
        return nullcontext()

    def model_arguments(self, family: ModelFamily) -> Arguments:
        """Keyword arguments of `from_pretrained`, for example `dtype`. A value may be a Call that makes it."""
        return {}

    def model(self, family: ModelFamily) -> Call | None:
        """Of (model), loaded: the model, wrapped or changed in place, or None."""

    def check_model(self, model: Any) -> None:
        """Raises ConfigurationError if the model that all techniques have changed does not suit."""

    def trainer(self) -> Call | None:
        """Of (trainer), assembled: changes its optimizer, its loss or the context of its forward passes, or None."""

    # ---- not part of a run ----

    def switches(self) -> Arguments:
        """`TrainingArguments` with which the newest transformers does by itself what `model` does; empty: none. A
        script has these in its place."""
        return {}

    def loaded_model(self, family: ModelFamily) -> Call | None:
        """Of (model), which somebody else has loaded: what `model_arguments` do at loading, or None."""

    def check_loss(self, model: Any, trainer: Any = None) -> None:
        """Raises ConfigurationError if the loss of somebody else's model, or of the Trainer around it, is made in
        another way than the technique needs. Asked by `workbench.apply`."""

    @classmethod
    def there(cls, arguments: Arguments, seen: Mapping[str, Any]) -> "Technique | None":
        """This technique, if somebody else's training has it already; None if not, or if nobody need know.

        Args:
            arguments: the TrainingArguments by name, in whatever version of transformers.
            seen: of its model, by `workbench/fit/any_training.py`.
        """
        return None

    def applied_to(self, model: Any) -> Any:
        """The model with this technique's work done on it, as in a run. Raises ConfigurationError: it cannot be."""
        import torch

        call = self.model(family_of(model.config))
        if call is None:
            return model
        what = f"{self.name}: it cannot be applied to a model of the kind {model.config.model_type!r}"
        with explained(what, f"Choose other settings, or leave {self.name} out.", MemoryError, torch.OutOfMemoryError):
            return call(model)

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> "tuple[Technique, ...]":
        """Settings that a planner should try, from the one that gives up least to the one that saves most.

        On a GPU of this compute capability; None is a CPU. Empty where the technique cannot be used there, and where
        it saves no memory of the device. Settings that do not suit a recipe may be among them: the recipe refuses them.
        """
        if not cls.attacks:
            return ()
        return tuple(cls(**settings) for settings in cls.worth_trying)

    def stand_in(self) -> "Technique":
        """What a prediction drives in this technique's place; itself, unless its kernels cannot be traced.

        A prediction runs the recipe on fake tensors: no values, no kernels, and "cpu" stands for the GPU's memory. A
        technique that moves tensors to the host, or whose own kernels PyTorch cannot trace, returns itself with other
        seams (`replacing`), which allocate the same bytes at the same moments in plain PyTorch. Of a fake parameter
        `isinstance` tells that it is one, `type` does not.
        """
        return self

    def replacing(self, **members: Any) -> Self:
        """This technique, its settings the same, with some of its methods or class attributes replaced."""
        return type(type(self).__name__, (type(self),), members)(**self.settings())  # type: ignore[no-any-return]

    def allocator_settings(self) -> Arguments:
        """What the technique changes about CUDA's allocator, as arguments of `CachingAllocator`: a prediction's."""
        return {}

    def environment(self) -> dict[str, str]:
        """Environment variables that do in a script, set before torch is imported, what `run_context` does in a run."""
        return {}


def check_together(techniques: Iterable[Technique], owner: str) -> None:
    """Raises ConfigurationError: two of them have one name, or exclude each other."""
    for first, second in permutations(techniques, 2):
        if first.name == second.name:
            raise ConfigurationError(f"{owner}: {first.name} is given twice. Keep one of the two settings.")
        for capability in first.forbids & second.brings:
            raise ConfigurationError(
                f"{owner}: {second.name} brings {capability}, which {first.name} forbids. Drop one of the two."
            )


def equal_parts(whole: int, part: int, least: int, what: str, field: str) -> int:
    """Into how many parts of size `part` the recipe's field, the whole, is cut.

    Raises:
        ConfigurationError: not into several equal ones. The message lists the sizes from `least` on that would do.
    """
    if part >= whole or whole % part:
        possible = divisors(whole, least, whole) or f"none. Use a larger {field}"
        raise ConfigurationError(
            f"{what} of {part} are not equal parts of the recipe's {field} of {whole}, so the runs "
            f"could not see the same tokens. Possible: {possible}."
        )
    return whole // part


def divisors(whole: int, least: int, end: int) -> str:
    """The numbers from `least` on and below `end` that divide the whole, listed; of a huge one the smaller ones."""
    return ", ".join(str(number) for number in range(least, end)[:4096] if whole % number == 0)


def add_adapter(config_class: Any, **settings: Any) -> Call:
    """Of (model): the model, frozen, with the trained parts that a config of this class of PEFT's adds."""
    from peft import get_peft_model

    return Call(get_peft_model, {"peft_config": Call(config_class, {"task_type": "CAUSAL_LM", **settings})})


class Adapter(Technique):
    """Base of the techniques that freeze the model and train something small beside it: never two of them together."""

    stage = Stage.ADAPT
    brings = frozenset({Capability.ADAPTER})
    forbids = frozenset({Capability.ADAPTER})
    # so few parameters need larger steps: of 10, 30, 100 and 300 the best on the embedded model, for all adapters but
    # the low-rank ones
    learning_rate_factor = 100.0

    def check_config(self, config: Any) -> None:
        """PEFT refuses some kinds of models: on one without memory, before weights are loaded."""
        from workbench.models.load import quiet

        with quiet():
            self.applied_to(on_meta(config))


@dataclass(frozen=True)
class VirtualTokens(Adapter):
    """Base of the adapters that are put before the text."""

    virtual_tokens: int = setting(20, "learned positions before the text", minimum=1)

    @property
    def positions(self) -> int:
        return self.virtual_tokens
