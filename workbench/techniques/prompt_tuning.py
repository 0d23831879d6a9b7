"""Prompt tuning: freeze the model, learn the embeddings of a few tokens that are put before the text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.measure.categories import Category
from workbench.settings import setting
from workbench.techniques.base import Capability, Fragment, Numerics, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PromptTuning(Technique):
    """The text, embedded as (B, T, C), gets `virtual_tokens` learned rows in front: (B, virtual_tokens + T, C).

    Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning", arXiv 2104.08691. The rows start as the
    embeddings of tokens drawn from the vocabulary, as in the paper. Everything the model computes grows by the virtual
    tokens, logits included.

    The paper's rate is 0.3 (with Adafactor), that of PEFT's example 3e-2. The factor was the best of 10, 30, 100 and
    300 on the embedded model, after 30 steps on Shakespeare.
    """

    virtual_tokens: int = setting(20, "learned tokens before the text", unit="tokens", minimum=1)

    name: ClassVar[str] = "prompt_tuning"
    title: ClassVar[str] = "Prompt tuning"
    family: ClassVar[str] = "adapters"
    attacks: ClassVar[tuple[Category, ...]] = (Category.GRADIENTS, Category.OPTIMIZER_STATES)
    costs: ClassVar[str] = "capacity, more than any other; longer sequences"
    numerics: ClassVar[Numerics] = Numerics.DIFFERENT
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER, Capability.VIRTUAL_TOKENS})
    forbids: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})

    @property
    def learning_rate_factor(self) -> float:
        return 100.0

    @property
    def positions(self) -> int:
        return self.virtual_tokens

    def collator(self, collator: Callable[..., Any]) -> Callable[..., Any]:
        """Without the first label: the last virtual token would predict it, and the loss be that of T tokens, not of
        the T - 1 that the Trainer divides by, and that every other technique is judged by."""

        def without_first_label(rows: Any) -> Any:
            batch = collator(rows)
            batch["labels"][:, 0] = -100
            return batch

        return without_first_label

    def model(self, model: "PreTrainedModel") -> "PreTrainedModel":
        from peft import PromptTuningConfig, get_peft_model

        config = PromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=self.virtual_tokens, prompt_tuning_init="SAMPLE_VOCAB"
        )
        return get_peft_model(model, config)  # type: ignore[no-any-return]

    def script(self) -> Fragment:
        return Fragment(
            imports=("from peft import PromptTuningConfig, get_peft_model",),
            definitions=(
                "def without_first_label(collator):",
                '    """The last virtual token would predict it: T labels, while the Trainer divides by T - 1."""',
                "",
                "    def collate_rows(rows):",
                "        batch = collator(rows)",
                '        batch["labels"][:, 0] = -100',
                "        return batch",
                "",
                "    return collate_rows",
                "",
            ),
            data=("data_collator = without_first_label(data_collator)",),
            model=(
                "adapter = PromptTuningConfig(",
                '    task_type="CAUSAL_LM",',
                f"    num_virtual_tokens={self.virtual_tokens},",
                '    prompt_tuning_init="SAMPLE_VOCAB",',
                ")",
                "model = get_peft_model(model, adapter)",
            ),
        )
