"""DoRA: LoRA for the direction of a matrix's columns, and a learned length for each of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from workbench.errors import ConfigurationError
from workbench.memory.categories import Category
from workbench.settings import setting
from workbench.techniques.base import Capability, Fragment, Numerics, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATRICES = ("c_attn", "c_fc", "c_proj")


@dataclass(frozen=True)
class Dora(Technique):
    """W' = m · V / ‖V‖ with V = W + (alpha / rank) · A·B; A (C, rank), B (rank, D) and the D lengths m are trained.

    Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv 2402.09353. ‖V‖ is taken for each of the D outputs
    and starts equal to m, so training starts from the model as it is. It is a constant for the gradient (section 4.3),
    but computing it takes a matrix as large as W at every step. The learning rate is that of LoRA, ten times that of
    full fine-tuning; the paper used LoRA's or a little less.
    """

    rank: int = setting(8, "rank of the update", minimum=1)
    alpha: float = setting(16.0, "scale: the update is multiplied by alpha / rank", minimum=0.001)
    dropout: float = setting(0.0, "dropout before A", minimum=0.0, maximum=0.9)
    targets: str = setting("c_attn", "matrices to adapt, joined by +, out of " + ", ".join(MATRICES))

    name: ClassVar[str] = "dora"
    title: ClassVar[str] = "DoRA"
    family: ClassVar[str] = "adapters"
    attacks: ClassVar[tuple[Category, ...]] = (Category.GRADIENTS, Category.OPTIMIZER_STATES)
    costs: ClassVar[str] = "capacity; a copy of each adapted matrix at every step, and more activations than LoRA"
    numerics: ClassVar[Numerics] = Numerics.DIFFERENT
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})
    forbids: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [target for target in self.targets.split("+") if target not in MATRICES]
        if wrong:
            raise ConfigurationError(
                f"dora: GPT-2 has no matrix {wrong[0]!r}. Choose from {', '.join(MATRICES)}, joined by +."
            )

    @property
    def learning_rate_factor(self) -> float:
        return 10.0

    def model(self, model: "PreTrainedModel") -> "PreTrainedModel":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM",
            use_dora=True,
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets.split("+"),
            fan_in_fan_out=True,  # GPT-2's Conv1D stores (in, out), the transpose of nn.Linear
        )
        return get_peft_model(model, config)  # type: ignore[no-any-return]

    def script(self) -> Fragment:
        targets = ", ".join(f'"{target}"' for target in self.targets.split("+"))
        return Fragment(
            imports=("from peft import LoraConfig, get_peft_model",),
            model=(
                "adapter = LoraConfig(",
                '    task_type="CAUSAL_LM",',
                "    use_dora=True,",
                f"    r={self.rank},",
                f"    lora_alpha={self.alpha},",
                f"    lora_dropout={self.dropout},",
                f"    target_modules=[{targets}],",
                "    fan_in_fan_out=True,  # GPT-2's Conv1D stores (in, out)",
                ")",
                "model = get_peft_model(model, adapter)",
            ),
        )
