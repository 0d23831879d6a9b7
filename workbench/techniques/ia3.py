"""(IA)³: freeze the model, learn one factor for each of some inner activations."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from workbench.measure.categories import Category
from workbench.settings import setting
from workbench.techniques.base import Capability, Fragment, Numerics, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Ia3(Technique):
    """In every block, the 3 C outputs of `c_attn` and the 4 C inputs of the MLP's `c_proj` are multiplied by factors.

    Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning", arXiv
    2205.05638. The paper scales keys and values; GPT-2 computes them in one matrix with the queries, so PEFT scales
    all three. The factors start as 1: L · (3 + 4) · C parameters, or L · 3 · C without the MLP. The gradient of a
    factor needs the activation that it multiplies, so that is kept.

    The paper's rate is 3e-3 (with Adafactor), that of PEFT's example 8e-3. The factor was the best of 10, 30, 100 and
    300 on the embedded model, after 30 steps on Shakespeare.
    """

    feedforward: bool = setting(True, "scale the inputs of the MLP's c_proj too")

    name: ClassVar[str] = "ia3"
    title: ClassVar[str] = "(IA)³"
    family: ClassVar[str] = "adapters"
    attacks: ClassVar[tuple[Category, ...]] = (Category.GRADIENTS, Category.OPTIMIZER_STATES)
    costs: ClassVar[str] = "capacity; the activations that are multiplied are kept"
    numerics: ClassVar[Numerics] = Numerics.DIFFERENT
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})
    forbids: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})

    @property
    def learning_rate_factor(self) -> float:
        return 100.0

    def model(self, model: "PreTrainedModel") -> "PreTrainedModel":
        from peft import IA3Config, get_peft_model

        inputs = ["mlp.c_proj"] if self.feedforward else []
        config = IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["c_attn", *inputs],
            feedforward_modules=inputs,  # here the input is scaled, not the output
            fan_in_fan_out=True,  # GPT-2's Conv1D stores (in, out), the transpose of nn.Linear
        )
        return get_peft_model(model, config)  # type: ignore[no-any-return]

    def script(self) -> Fragment:
        inputs = ['"mlp.c_proj"'] if self.feedforward else []
        targets = ", ".join(['"c_attn"', *inputs])
        return Fragment(
            imports=("from peft import IA3Config, get_peft_model",),
            model=(
                "adapter = IA3Config(",
                '    task_type="CAUSAL_LM",',
                f"    target_modules=[{targets}],",
                f"    feedforward_modules=[{', '.join(inputs)}],  # here the input is scaled, not the output",
                "    fan_in_fan_out=True,  # GPT-2's Conv1D stores (in, out)",
                ")",
                "model = get_peft_model(model, adapter)",
            ),
        )
