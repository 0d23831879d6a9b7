"""The contract of a technique: a base class with a few seams, the methods through which a technique may act.

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
from workbench.base.errors import ConfigurationError, explain_errors
from workbench.base.settings import check_names, check_settings, describe_field, setting
from workbench.models.family import ModelFamily, family_of, on_meta

Arguments = dict[str, Any]


class Numerics(StrEnum):
    """The effect of a technique on the training loss, everything else being equal."""

    EXACT = "exact"  # the loss is the same up to the rounding of the arithmetic
    APPROXIMATE = "approximate"  # the mathematics is the same, in lower precision
    DIFFERENT = "different"  # another model is trained, or in another way


class Stage(IntEnum):
    """The moment at which a technique acts: in every seam, an earlier stage comes before a later one.

    Techniques of one stage act on different things, or exclude each other: their order does not matter.
    """

    PROCESS = auto()  # settings of the process are changed
    EXAMPLES = auto()  # decides what an example is, and how many make a step
    BATCHES = auto()  # decides where examples are kept, and how many the device sees at a time
    ARCHITECTURE = auto()  # parts of the model are replaced
    QUANTIZE = auto()  # weights are stored in another type
    ADAPT = auto()  # trained parts are added to frozen ones
    WRAP = auto()  # precision, recomputation, offloading and the loss surround the model's work
    COMPILE = auto()  # all of that becomes kernels
    OPTIMIZE = auto()  # the optimizer is chosen
    STEP = auto()  # the moment of the optimizer's step is chosen


class Capability(StrEnum):
    """A property of a training that one technique brings, and that another may forbid."""

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
    """The text that a training sees: in each of `steps` optimizer steps, `sequences` sequences (the effective batch) of
    `tokens` tokens (T)."""

    sequences: int
    tokens: int
    steps: int


@dataclass(frozen=True)
class Call:
    """A plain function and its settings: the work of a technique, written once for the run and the exported script.

    The run calls the function with the arguments that the seam names, followed by the settings. The script contains
    the same call, and with it the function's source (`inspect.getsource`) if the workbench defines it: so the function
    may use nothing of the workbench but its own file.

    Args:
        settings: keyword arguments. A value that is a Call itself is called, and its result is the argument.
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

    Each has a card there, with `title`, `costs` and `numerics`, and others of the attributes from `attacks` to
    `in_a_script` if they have another value than the default.
    """

    name: ClassVar[str]  # the name of its file, by which commands and recipes call it
    title: ClassVar[str]  # the name in tables and pictures
    attacks: ClassVar[tuple[Category, ...]] = ()  # the categories of device memory that shrink
    costs: ClassVar[str]  # a phrase for the command `list`
    numerics: ClassVar[Numerics]
    lesson: ClassVar[str] = ""  # the lesson that shows it with its relatives; empty: the lesson has its own name
    # The reason why it cannot be used on several ranks; empty if it can.
    why_not_on_ranks: ClassVar[str] = ""
    # The reasons why it cannot be used on a model that is cut into shards; empty if it can. The key is the engine
    # (`fsdp`, `deepspeed`) or the beginning of a way to shard (`zero3`).
    why_not_on_shards: ClassVar[Mapping[str, str]] = MappingProxyType({})
    # Two estimates for GPT-2 124M at full length, which only decide what a plan tries first: the share that remains of
    # a category of memory, or of the allocator's `gaps`; and the extra time of a step (0.33: a third longer).
    remaining_shares: ClassVar[Mapping[str, float]] = MappingProxyType({})
    slower: ClassVar[float] = 0.0
    # The advice for somebody's own script to the same effect, if neither `training_arguments`, `model_arguments` nor
    # `environment` give it. `{size}` is a setting.
    in_a_script: ClassVar[str] = ""

    stage: ClassVar[Stage] = Stage.WRAP
    # Titles of single settings: the optimizer with "kind=sgd" is called SGD.
    called: ClassVar[Mapping[str, str]] = MappingProxyType({})
    brings: ClassVar[frozenset[Capability]] = frozenset()
    forbids: ClassVar[frozenset[Capability]] = frozenset()
    # The customary learning rate, as a multiple of that of full fine-tuning with AdamW.
    learning_rate_factor: ClassVar[float] = 1.0
    # The settings that `variants` offers to a planner, in its order. None at all: only a user chooses this technique.
    worth_trying: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    # The reason why neither it nor a stand-in can be traced with fake tensors; empty if one can.
    why_not_traced: ClassVar[str] = ""
    # Whether a checkpoint of the Trainer holds all that training needs to go on.
    can_be_resumed: ClassVar[bool] = True
    # Settings that older versions had, each with the one value that is left of it. So old records can be read, and
    # recipes keep their ids.
    retired: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __post_init__(self) -> None:
        check_settings(self, self.name)

    @classmethod
    def from_settings(cls, settings: object) -> Self:
        """Make the technique from its settings by name, as in a JSON file.

        Raises:
            ConfigurationError: it is no mapping, or has an unknown setting or a value out of range.
        """
        if isinstance(settings, Mapping):
            settings = {name: value for name, value in settings.items() if (name, value) not in cls.retired.items()}
        return cls(**check_names(settings, cls().settings(), cls.name))

    @property
    def positions(self) -> int:
        """The positions of the model that the technique takes in each sequence, beside its T tokens."""
        return 0

    def settings(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def card(self) -> str:
        """Return what the command `list` prints: target, cost, effect on the loss, and a line for each setting."""
        lines = [
            f"{self.name}: {self.title}",
            f"  attacks    {', '.join(category.replace('_', ' ') for category in self.attacks)}",
            f"  costs      {self.costs}",
            f"  same loss  {self.numerics}",
        ]
        for entry in fields(self):  # type: ignore[arg-type]
            accepts = f"{entry.metadata['help']} ({describe_field(entry)})"
            lines.append(f"  {self.name}={entry.name}:{entry.default}  {accepts}")
        return "\n".join(lines)

    def missing(self, device: Device) -> str | None:
        """Say why the technique cannot run on this device, or with the installed packages, and the cure.

        Called before anything is loaded. None: it can run.
        """

    def check_config(self, config: Any) -> None:
        """Raise ConfigurationError if the technique cannot be used on a model of this config.

        `run` calls it before any weights are loaded.
        """

    # ---- the seams, in the order in which a run uses them ----
    # Most return a Call, which the run makes later. None: the technique has nothing to do there.

    def shape(self, shape: Shape) -> Shape:
        """Return the batches to train on: another shape with as many tokens in all.

        The customary learning rate goes with the square root of the tokens of a step. The construction of a recipe
        calls this too: keep it light.

        Raises:
            ConfigurationError: the settings do not fit the shape.
        """
        return shape

    def training_arguments(self, arguments: Arguments) -> Arguments:
        """Return the keyword arguments of `transformers.TrainingArguments`, those of `arguments` among them.

        The construction of a recipe calls this too: keep it light.

        Raises:
            ConfigurationError: the settings do not fit the batch.
        """
        return arguments

    def examples(self) -> Call | None:
        """Return the call that makes a training set of its own from the text, or None for the packed blocks.

        The run calls it with (text, tokenizer, length, batch, seed). It returns a data set whose rows have `input_ids`
        of at most T = `length` tokens, in whole effective batches of `batch` rows. It raises ValueError, with the cure,
        if the text does not give a batch.
        """

    def dataset(self) -> Call | None:
        """Return the call that changes the training set, or None.

        The run calls it with the data set, whose rows have `input_ids` (and `labels`, if not every token counts), and
        trains on the data set that it returns.
        """

    def collator(self) -> Call | None:
        """Return the call that makes a batch of rows, or None.

        The run calls it with (collator, rows): the collator that it would use, and the B rows of a micro-batch. It
        returns a dictionary of tensors, `input_ids` and `labels` (B, T) among them.
        """

    def run_context(self) -> AbstractContextManager[Any]:
        """Return a context around the whole run, for settings of the process.

        It is entered when the data are ready and before the model is loaded.
        """
        return nullcontext()

    def model_arguments(self, family: ModelFamily) -> Arguments:
        """Return keyword arguments of `from_pretrained`, for example `dtype`. A value may be a Call that makes it."""
        return {}

    def model(self, family: ModelFamily) -> Call | None:
        """Return the call that changes a loaded model, or None.

        The run calls it with the model, and goes on with the model that it returns: the same one, changed in place, or
        one that wraps it.
        """

    def check_model(self, model: Any) -> None:
        """Raise ConfigurationError if the technique cannot be used on the model that all techniques have changed."""

    def trainer(self) -> Call | None:
        """Return the call that changes a built Trainer, or None.

        The run calls it with the Trainer before training begins. It changes the optimizer, the loss or the context of
        the forward pass there, and returns nothing.
        """

    # ---- for scripts, and for trainings that were not made from a recipe ----

    def switches(self) -> Arguments:
        """Return the `TrainingArguments` with which the newest transformers does the work of `model` by itself.

        A script has these in place of the call. Empty: there are none.
        """
        return {}

    def change_loaded_model(self, family: ModelFamily) -> Call | None:
        """Return the call that does on a model that is loaded already what `model_arguments` do at loading, or None.

        `workbench.apply` calls it with somebody else's model, and it changes that in place and returns it.
        """

    def check_loss(self, model: Any, trainer: Any = None) -> None:
        """Raise ConfigurationError if somebody else's model, or the Trainer around it, computes the loss in a way that
        the technique does not suit. `workbench.apply` calls it."""

    @classmethod
    def find_in(cls, arguments: Arguments, facts: Mapping[str, Any]) -> "Technique | None":
        """Return this technique as somebody else's training uses it already.

        None: it does not, or it may be added a second time without harm.

        Args:
            arguments: the TrainingArguments by name, in whatever version of transformers.
            facts: the facts about the model that `about` in `workbench/fit/any_training.py` gathers.
        """
        return None

    def apply_to(self, model: Any) -> Any:
        """Do the technique's work on a model, as a run does, and return the model.

        Raises:
            ConfigurationError: it cannot be done on this model.
        """
        import torch

        call = self.model(family_of(model.config))
        if call is None:
            return model
        what = f"{self.name}: it cannot be applied to a model of the kind {model.config.model_type!r}"
        with explain_errors(
            what, f"Choose other settings, or leave {self.name} out.", MemoryError, torch.OutOfMemoryError
        ):
            return call(model)

    # ---- for plans and predictions ----

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> "tuple[Technique, ...]":
        """Return the technique in the settings that a planner should try, from the one that gives up least to the one
        that saves most.

        Empty if the technique cannot be used on a GPU of this compute capability (None is a CPU), or saves no memory of
        the device. Settings that do not suit a recipe may be among them: the recipe refuses them.
        """
        if not cls.attacks:
            return ()
        return tuple(cls(**settings) for settings in cls.worth_trying)

    def stand_in(self) -> "Technique":
        """Return the technique that a prediction on fake tensors uses in this one's place: by default, this one.

        Fake tensors have no values, no kernel runs on them, and "cpu" stands for the GPU's memory. A technique that
        moves tensors to the host, or whose own kernels PyTorch cannot trace, returns itself with other seams
        (`replacing`), which allocate the same bytes at the same moments in plain PyTorch. To recognise a parameter
        there, use `isinstance`: the `type` of a fake one is another.
        """
        return self

    def replacing(self, **members: Any) -> Self:
        """Return this technique with the same settings and some of its methods or class attributes replaced."""
        return type(type(self).__name__, (type(self),), members)(**self.settings())  # type: ignore[no-any-return]

    def allocator_settings(self) -> Arguments:
        """Return the settings of CUDA's allocator that the technique changes, as arguments of `CachingAllocator`."""
        return {}

    def environment(self) -> dict[str, str]:
        """Return environment variables that do in a script what `run_context` does in a run.

        They have to be set before torch is imported.
        """
        return {}


def check_together(techniques: Iterable[Technique], owner: str) -> None:
    """Refuse two techniques of one name, and two that exclude each other.

    Args:
        owner: the word that the message begins with.

    Raises:
        ConfigurationError: there are two such techniques.
    """
    for first, second in permutations(techniques, 2):
        if first.name == second.name:
            raise ConfigurationError(f"{owner}: {first.name} is given twice. Keep one of the two settings.")
        for capability in first.forbids & second.brings:
            raise ConfigurationError(
                f"{owner}: {second.name} brings {capability}, which {first.name} forbids. Drop one of the two."
            )


def equal_parts(whole: int, part: int, least: int, what: str, field: str) -> int:
    """Return the number of parts of size `part` into which the recipe's `field`, of size `whole`, is cut.

    Args:
        least: the smallest part that a message proposes.
        what: the parts, for the message.

    Raises:
        ConfigurationError: the parts are not several equal ones.
    """
    if part >= whole or whole % part:
        possible = divisors(whole, least, whole) or f"none. Use a larger {field}"
        raise ConfigurationError(
            f"{what} of {part} are not equal parts of the recipe's {field} of {whole}, so the runs "
            f"could not see the same tokens. Possible: {possible}."
        )
    return whole // part


def divisors(whole: int, least: int, end: int) -> str:
    """List the numbers from `least` on and below `end` that divide `whole`: at most those among the first 4,096."""
    return ", ".join(str(number) for number in range(least, end)[:4096] if whole % number == 0)


def add_adapter(config_class: Any, **settings: Any) -> Call:
    """Return the call that freezes a model and adds trained parts to it, as PEFT does for a config of this class."""
    from peft import get_peft_model

    return Call(get_peft_model, {"peft_config": Call(config_class, {"task_type": "CAUSAL_LM", **settings})})


class Adapter(Technique):
    """Base of the techniques that freeze the model and train something small beside it. One excludes the other."""

    stage = Stage.ADAPT
    brings = frozenset({Capability.ADAPTER})
    forbids = frozenset({Capability.ADAPTER})
    # Few parameters need larger steps. Of 10, 30, 100 and 300, this was the best on the embedded model, for all
    # adapters but the low-rank ones.
    learning_rate_factor = 100.0

    def check_config(self, config: Any) -> None:
        """Raise ConfigurationError if PEFT refuses such a model: it is tried on the meta device, without memory."""
        from workbench.models.load import quiet

        with quiet():
            self.apply_to(on_meta(config))


@dataclass(frozen=True)
class VirtualTokens(Adapter):
    """Base of the adapters that are put before the text."""

    virtual_tokens: int = setting(20, "learned positions before the text", minimum=1)

    @property
    def positions(self) -> int:
        return self.virtual_tokens
