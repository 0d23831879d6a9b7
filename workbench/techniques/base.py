"""What a memory-saving technique is, and the few seams through which it may act.

A technique is a frozen dataclass: its fields are its settings. It says what it attacks, what it costs and whether the
loss stays the same, and overrides only the seams it needs. `workbench.run` calls the seams of every technique of a
recipe in the order they have below, and within one seam in the order of the names. It knows no technique by name.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.measure.categories import Category
from workbench.settings import check_settings
from workbench.texts.corpus import TrainingText

if TYPE_CHECKING:
    import torch
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedModel

Arguments = dict[str, Any]


class Numerics(StrEnum):
    """What a technique does to the training loss, everything else being equal."""

    EXACT = "exact"  # the same up to the rounding of the arithmetic
    APPROXIMATE = "approximate"  # the same mathematics in lower precision
    DIFFERENT = "different"  # another model or another optimization


class Capability(StrEnum):
    """What techniques can give to, or forbid in, the training they act on together."""

    KEY_VALUE_CACHE = "a key-value cache during training"
    ADAPTER = "an adapter beside the frozen model"
    SIXTEEN_BIT_WEIGHTS = "16-bit weights"
    VIRTUAL_TOKENS = "virtual tokens before the text"
    QUANTIZED_WEIGHTS = "quantized weights"
    OPTIMIZER = "an optimizer of its own"
    TRAINING_SET = "a training set that is not the packed blocks"
    STREAM = "a stream of examples, which has no length"


@dataclass(frozen=True)
class Shape:
    """What training looks at: each of `steps` optimizer steps sees `sequences` (B) of `tokens` tokens (T) each."""

    sequences: int
    tokens: int
    steps: int


@dataclass(frozen=True)
class Fragment:
    """Source lines that do in a plain Hugging Face script what a technique does, each group at its place.

    Args:
        environment: environment variables, set before torch is imported.
        imports: whole import statements.
        definitions: functions and classes, before anything is loaded.
        loading: keyword arguments of `from_pretrained` whose value is more than a literal, by name, as source.
        data: lines that may change `train_dataset`, `eval_dataset` and `data_collator`.
        model: lines that may change `model`, after it was loaded.
        trainer: lines that may change `trainer`, after it was made and before it trains.
        context: an expression, a context manager to train and evaluate in.
    """

    environment: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    loading: dict[str, str] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    trainer: tuple[str, ...] = ()
    context: str = ""


class Technique:
    """Base of all techniques. Subclasses are frozen dataclasses, one file each, and are listed in the registry.

    `attacks` is empty where no category of device memory shrinks; `family` names the lesson that several share.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    attacks: ClassVar[tuple[Category, ...]]
    costs: ClassVar[str]
    numerics: ClassVar[Numerics]
    family: ClassVar[str] = ""
    brings: ClassVar[frozenset[Capability]] = frozenset()
    forbids: ClassVar[frozenset[Capability]] = frozenset()

    def __post_init__(self) -> None:
        check_settings(self, self.name)

    @property
    def learning_rate_factor(self) -> float:
        """The customary learning rate, relative to that of full fine-tuning with AdamW."""
        return 1.0

    @property
    def positions(self) -> int:
        """Positions of the model that the technique takes, in each sequence, beside its T tokens."""
        return 0

    @property
    def can_be_resumed(self) -> bool:
        """Whether a checkpoint of the Trainer holds all that training needs to go on."""
        return True

    def settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def missing(self, device_type: str) -> str | None:
        """Why this machine cannot run the technique, and the cure; None if it can. Asked by `run` before loading."""
        return None

    # ---- the seams, in the order in which they are applied ----

    def run_context(self) -> AbstractContextManager[Any]:
        """A context around the whole run, entered before anything is loaded: for settings of the process."""
        return nullcontext()

    def shape(self, shape: Shape) -> Shape:
        """Other batches, with as many tokens in all. Called on construction of a recipe too: keep it light.

        The customary learning rate goes with the square root of the tokens of a step.

        Raises:
            ConfigurationError: the settings do not fit the shape.
        """
        return shape

    def examples(self, text: TrainingText, seed: int) -> "Dataset | IterableDataset | None":
        """A training set instead of the packed blocks, rows with `input_ids` of at most T tokens, or None.

        Raises:
            ConfigurationError: the text does not give a batch.
        """
        return None

    def dataset(self, dataset: "Dataset") -> "Dataset":
        """The token blocks, each row `input_ids` of T tokens."""
        return dataset

    def collator(self, collator: Callable[..., Any]) -> Callable[..., Any]:
        """Rows to a batch of `input_ids` and `labels`, both (B, T)."""
        return collator

    def model_arguments(self, arguments: Arguments) -> Arguments:
        """Keyword arguments of `from_pretrained`, for example `dtype`."""
        return arguments

    def model(self, model: "PreTrainedModel") -> "PreTrainedModel":
        """The loaded model; may be wrapped or changed in place."""
        return model

    def training_arguments(self, arguments: Arguments) -> Arguments:
        """Keyword arguments of `transformers.TrainingArguments`. Called on construction of a recipe too: keep it light.

        Raises:
            ConfigurationError: the settings do not fit the batch.
        """
        return arguments

    def compute_loss(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """The whole of `Trainer.compute_loss`, from before the logits exist."""
        return compute_loss

    def optimizer(self, model: "PreTrainedModel", arguments: Any) -> "torch.optim.Optimizer | None":
        """An optimizer instead of the Trainer's own (`arguments` are the `TrainingArguments`), or None."""
        return None

    def forward_context(self, model: "PreTrainedModel") -> AbstractContextManager[Any]:
        """A context around the forward pass and the loss, of one micro-batch."""
        return nullcontext()

    # ---- not part of a run ----

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> "tuple[Technique, ...]":
        """Settings that a planner should try, from the one that gives up least to the one that saves most.

        On a GPU of this compute capability; None is a CPU. Empty where the technique cannot be used there, and where
        it saves no memory of the device. Settings that do not suit a recipe may be among them: the recipe refuses them.
        """
        return (cls(),) if cls.attacks else ()

    def stand_in(self) -> "Technique":
        """What a prediction drives in this technique's place; itself, unless its kernels cannot be traced.

        A prediction runs the recipe on fake tensors: no values, no kernels, and "cpu" stands for the GPU's memory. A
        technique whose storage or arithmetic lies in kernels that PyTorch cannot trace (8-bit states, 4-bit weights)
        or that moves tensors to the host returns a technique of its own file whose seams allocate the same bytes at
        the same moments in plain PyTorch; the docstring names the source of those bytes. The host's memory is the
        device "meta" there.
        """
        return self

    def allocator_settings(self) -> Arguments:
        """What the technique changes about CUDA's allocator, as arguments of `CachingAllocator`: a prediction's."""
        return {}

    def script(self) -> Fragment:
        """What the exported script needs beyond the `TrainingArguments`, which it takes from their own seam."""
        return Fragment()
