"""The techniques: one file each, registered here by its name."""

from typing import Any

from workbench.errors import ConfigurationError
from workbench.settings import parse_settings, unknown
from workbench.techniques.activation_offloading import ActivationOffloading as ActivationOffloading
from workbench.techniques.allocator import Allocator as Allocator
from workbench.techniques.attention import Attention as Attention
from workbench.techniques.base import Capability as Capability
from workbench.techniques.base import Numerics as Numerics
from workbench.techniques.base import Technique as Technique
from workbench.techniques.batch_size import BatchSize as BatchSize
from workbench.techniques.chunked_cross_entropy import ChunkedCrossEntropy as ChunkedCrossEntropy
from workbench.techniques.data_loading import DataLoading as DataLoading
from workbench.techniques.dora import Dora as Dora
from workbench.techniques.fused_gelu import FusedGelu as FusedGelu
from workbench.techniques.gradient_accumulation import GradientAccumulation as GradientAccumulation
from workbench.techniques.gradient_checkpointing import GradientCheckpointing as GradientCheckpointing
from workbench.techniques.ia3 import Ia3 as Ia3
from workbench.techniques.lora import Lora as Lora
from workbench.techniques.mixed_precision import MixedPrecision as MixedPrecision
from workbench.techniques.optimizer import Optimizer as Optimizer
from workbench.techniques.optimizer_offloading import OptimizerOffloading as OptimizerOffloading
from workbench.techniques.padding import Padding as Padding
from workbench.techniques.prefix_tuning import PrefixTuning as PrefixTuning
from workbench.techniques.prompt_tuning import PromptTuning as PromptTuning
from workbench.techniques.pure_bf16 import PureBf16 as PureBf16
from workbench.techniques.qlora import Qlora as Qlora
from workbench.techniques.sequence_length import SequenceLength as SequenceLength
from workbench.techniques.step_in_backward import StepInBackward as StepInBackward
from workbench.techniques.streaming import Streaming as Streaming

REGISTRY: dict[str, type[Technique]] = {}
for _one in [*globals().values()]:
    if isinstance(_one, type) and issubclass(_one, Technique) and _one is not Technique:
        _one.name = _one.__module__.rpartition(".")[2]
        REGISTRY[_one.name] = _one


def technique(name: str, /, **settings: Any) -> Technique:
    """Make a technique by its name.

    Raises:
        ConfigurationError: unknown name or setting, or a value out of range.
    """
    return _class(name).given(settings)


def parse_technique(text: str) -> Technique:
    """Make a technique from the command line's form, `lora=rank:8,alpha:16` or plain `lora`.

    Raises:
        ConfigurationError: unknown name or setting, or a value that is malformed or out of range.
    """
    name, _, rest = text.partition("=")
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, colon, value = part.partition(":")
        if not colon:
            raise ConfigurationError(
                f"{name}: {part!r} is not a setting. Write name:value, as in lora=rank:8,alpha:16."
            )
        if key.strip() in values:
            raise ConfigurationError(f"{name}: {key.strip()} is given twice. Keep one of the two values.")
        values[key.strip()] = value.strip()
    return _class(name)(**parse_settings(_class(name), values, name))


def _class(name: str) -> type[Technique]:
    if name not in REGISTRY:
        raise unknown("There is no technique", name, sorted(REGISTRY))
    return REGISTRY[name]
