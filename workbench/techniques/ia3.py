"""(IA)³: freeze the model, learn one factor for each of some inner activations."""

from dataclasses import dataclass

from workbench.models.family import ModelFamily
from workbench.settings import setting
from workbench.techniques.base import Adapter, Call, add_adapter


@dataclass(frozen=True)
class Ia3(Adapter):
    """In every block, the 3 C outputs of `c_attn` and the 4 C inputs of the MLP's `c_proj` are multiplied by factors.

    Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning", arXiv
    2205.05638. The paper scales keys and values; GPT-2 computes them in one matrix with the queries, so PEFT scales
    all three. The factors start as 1: L · (3 + 4) · C parameters, or L · 3 · C without the MLP. The gradient of a
    factor needs the activation that it multiplies, so that is kept.

    The paper's rate is 3e-3 (with Adafactor), that of PEFT's example 8e-3. The factor was the best of 10, 30, 100 and
    300 on the embedded model, after 30 steps on Shakespeare.
    """

    feedforward: bool = setting(True, "scale the inputs of the MLP's c_proj too")

    def model(self, family: ModelFamily) -> Call:
        from peft import IA3Config

        # of the feedforward modules the input is scaled, not the output; GPT-2's `Conv1D` is stored (in, out)
        inputs = list(family.scaled_inputs) if self.feedforward else []
        matrices = {"target_modules": [*family.scaled_outputs, *inputs], "feedforward_modules": inputs}
        return Call(add_adapter, {"kind": IA3Config, **matrices, "fan_in_fan_out": family.matrices_are_transposed})
