"""Other optimizers: less state per parameter, or the same state with fewer temporaries."""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from workbench.measure.categories import Category
from workbench.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Numerics, Stage, Technique

# the Trainer's own names for them (transformers, `OptimizerNames`)
TRAINER: dict[str, Arguments] = {
    "adamw_fused": {"optim": "adamw_torch_fused"},
    "sgd": {"optim": "sgd"},
    "sgd_momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adafactor": {"optim": "adafactor"},
    "adamw_8bit": {"optim": "adamw_8bit"},
}
# the Trainer's `adamw_torch` leaves the choice to PyTorch: foreach on a GPU, the loop on a CPU
FOREACH = {"adamw_foreach": True, "adamw_loop": False}
NUMERICS = {"adamw_8bit": Numerics.APPROXIMATE} | dict.fromkeys(("adamw_fused", *FOREACH), Numerics.EXACT)
# SGD does not divide by the size of the gradient, and needs a far larger rate: the best of 100, 300, 1,000 and 2,000
# times Adam's, with momentum of 30 and 100, for the embedded model after 30 steps on Shakespeare
LEARNING_RATE_FACTORS = {"sgd": 1000.0, "sgd_momentum": 100.0}


@dataclass(frozen=True)
class Optimizer(Technique):
    """Chooses the optimizer. The three AdamW of PyTorch take the same steps up to rounding, that with 8-bit states the
    same in lower precision; the others are other optimizers.

    Bytes of state for a parameter matrix (C, D) in fp32: AdamW 8·C·D; AdamW with 8-bit states 2·C·D, and 8 for every
    256 parameters (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861); Adafactor
    4·(C + D) (Shazeer and Stern, "Adafactor", arXiv 1804.04235); SGD none, with momentum 4·C·D. bitsandbytes keeps
    32-bit states for tensors of fewer than 4,096 elements, and the Trainer asks it to do so for embeddings too.
    """

    kind: str = setting("adamw_8bit", "which optimizer", choices=(*TRAINER, *FOREACH))

    title = "Optimizer"
    stage = Stage.OPTIMIZE
    attacks = (Category.OPTIMIZER_STATES,)
    costs = "what the states were good for: rounded, factored or missing moments"
    numerics = NUMERICS["adamw_8bit"]  # of the default kind; an instance has that of its own
    brings = frozenset({Capability.OPTIMIZER})
    forbids = frozenset({Capability.OPTIMIZER})
    # those that save: momentum alone keeps more than 8-bit states and adapts less, and plain SGD saves no more than
    # Adafactor's rows and columns, at a learning rate that has to be searched for
    worth_trying = ({"kind": "adamw_8bit"}, {"kind": "adafactor"})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "numerics", NUMERICS.get(self.kind, Numerics.DIFFERENT))
        object.__setattr__(self, "learning_rate_factor", LEARNING_RATE_FACTORS.get(self.kind, 1.0))

    def missing(self, device_type: str) -> str | None:
        if self.kind == "adamw_8bit" and find_spec("bitsandbytes") is None:
            return "optimizer=kind:adamw_8bit needs bitsandbytes. Install it with: pip install bitsandbytes"
        if self.kind == "adamw_8bit" and device_type == "mps":
            return "optimizer=kind:adamw_8bit has no kernels for mps. Use kind:adafactor, or --device cpu."
        return None

    def training_arguments(self, arguments: Arguments) -> Arguments:
        return {**arguments, **TRAINER.get(self.kind, {})}

    def run_context(self) -> AbstractContextManager[Any]:
        if self.kind != "adamw_8bit":
            return super().run_context()
        # The Trainer tells bitsandbytes about embeddings in one object for the whole process, which would hold the
        # embeddings of a model that is gone, and apply its settings, kept by the position of a parameter, to the
        # parameters at these positions in the next model (bitsandbytes 0.50, `GlobalOptimManager.index2config`).
        manager = import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
        manager.initialize()
        stack = ExitStack()
        stack.callback(manager.initialize)
        return stack

    def trainer(self) -> Call | None:
        """None where the Trainer makes the optimizer by itself."""
        return Call(use_adamw, {"foreach": FOREACH[self.kind]}) if self.kind in FOREACH else None


def use_adamw(trainer: Any, foreach: bool) -> None:
    """PyTorch's AdamW: `foreach` updates many parameters at once, the loop one after the other."""
    import torch

    _, options = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    options |= {"weight_decay": trainer.args.weight_decay, "fused": False, "foreach": foreach}
    trainer.optimizer = torch.optim.AdamW([p for p in trainer.model.parameters() if p.requires_grad], **options)
