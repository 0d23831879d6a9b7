"""Prefix tuning: freeze the model, learn keys and values that every layer attends to before the text."""

from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.models.family import ModelFamily
from workbench.techniques.base import Call, Capability, VirtualTokens, add_adapter

# The kinds of layers with keys and values, in configs that mix kinds.
ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class PrefixTuning(VirtualTokens):
    """Every layer has `virtual_tokens` learned keys and values (C each) before those of the text.

    Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation", arXiv 2101.00190. The keys and values
    are learned directly, without the paper's reparametrization by an MLP (PEFT's default, `prefix_projection=False`):
    virtual_tokens · 2 · L · C parameters, with L layers. They come to the model as a filled key-value cache and take
    positions.

    Learned directly, keys and values need a far higher rate than through the MLP. Of 10, 30, 100 and 300 times that of
    full fine-tuning, 100 and 300 were the best on the embedded model, after 30 steps on Shakespeare. For GPT-2 that is
    5e-3; PEFT's example of prefix tuning uses 1e-2.
    """

    brings = frozenset({Capability.ADAPTER, Capability.KEY_VALUE_CACHE, Capability.VIRTUAL_TOKENS})

    def check_config(self, config: Any) -> None:
        text = config.get_text_config()
        other_layers = set(getattr(text, "layer_types", None) or ()) - ATTENDING
        if other_layers or not hasattr(text, "num_attention_heads"):
            raise ConfigurationError(
                f"{self.name}: a {config.model_type!r} has layers without keys and values. Use lora or prompt_tuning."
            )
        super().check_config(config)

    def model(self, family: ModelFamily) -> Call:
        from peft import PrefixTuningConfig

        return add_adapter(PrefixTuningConfig, num_virtual_tokens=self.virtual_tokens)
