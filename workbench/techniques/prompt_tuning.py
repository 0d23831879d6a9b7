"""Prompt tuning: freeze the model, learn the embeddings of a few tokens that are put before the text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.models.family import ModelFamily
from workbench.techniques.base import Call, Capability, VirtualTokens, add_adapter


def hide_first_label(collator: Callable[..., Any], rows: Any) -> Any:
    """Return the collator's batch without the label of the first text token.

    The last virtual token would predict it: a sequence would have T labels, and the Trainer divides the loss by T - 1.
    """
    batch = collator(rows)
    batch["labels"][:, 0] = -100
    return batch


@dataclass(frozen=True)
class PromptTuning(VirtualTokens):
    """The text, embedded as (B, T, C), gets `virtual_tokens` learned rows in front: (B, virtual_tokens + T, C).

    Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning", arXiv 2104.08691. The rows start as the
    embeddings of tokens drawn from the vocabulary, as in the paper. Everything the model computes grows by the virtual
    tokens, logits included.

    The paper's rate is 0.3 (with Adafactor), that of PEFT's example 3e-2. The factor was the best of 10, 30, 100 and
    300 on the embedded model, after 30 steps on Shakespeare.
    """

    brings = frozenset({Capability.ADAPTER, Capability.VIRTUAL_TOKENS})

    def collator(self) -> Call:
        return Call(hide_first_label)

    def model(self, family: ModelFamily) -> Call:
        from peft import PromptTuningConfig

        return add_adapter(
            PromptTuningConfig, num_virtual_tokens=self.virtual_tokens, prompt_tuning_init="SAMPLE_VOCAB"
        )
