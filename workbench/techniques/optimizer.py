"""Other optimizers: less state per parameter, or the same state with fewer temporaries."""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from workbench.base.device import Device
from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Numerics, Stage, Technique

ON_BITSANDBYTES: Arguments = {
    "packages": {"bitsandbytes": "bitsandbytes"},
    "unsharded": {"fsdp": "bitsandbytes' kernels know no shards"},
}
IN_PIECES: Arguments = {
    "numerics": Numerics.APPROXIMATE,
    "unsharded": {
        "fsdp": "its steps in pieces would change copies of the shards",
        "deepspeed": "its step fails on the flat pieces that DeepSpeed hands it",
    },
}
PIECE = 2**22  # elements


def _stochastic(called: str, name: str) -> Arguments:
    library = {"module": "torchao.optim", "name": name, "settings": {"bf16_stochastic_round": True}, "piece": PIECE}
    return {**IN_PIECES, "called": called, "packages": {"torchao": "torchao"}, "library": library}


# What is particular of each kind: what people call it (`called`), what the loss does (`numerics`; else it is another
# optimizer), the customary rate relative to AdamW's, and how the Trainer gets it: by a name that it has itself
# (`trainer`), or by one of the functions below, from `use_adamw` on (`adamw`, `muon`, `library`), with their settings.
# `packages`: modules that it needs, and what to install for each; `devices` that it has kernels for, and what to use
# `instead` on others; why it cannot be used on shards (`unsharded`).
KINDS: dict[str, Arguments] = {
    "adamw_fused": {"called": "fused AdamW", "numerics": Numerics.EXACT, "trainer": {"optim": "adamw_torch_fused"}},
    # SGD does not divide by the size of the gradient, and needs a far larger rate: the best of 100, 300, 1,000 and
    # 2,000 times Adam's, with momentum of 30 and 100, for the embedded model after 30 steps on Shakespeare
    "sgd": {"called": "SGD", "learning_rate_factor": 1000.0, "trainer": {"optim": "sgd"}},
    "sgd_momentum": {
        "called": "SGD with momentum",
        "learning_rate_factor": 100.0,
        "trainer": {"optim": "sgd", "optim_args": "momentum=0.9"},
    },
    "adafactor": {
        "called": "Adafactor",
        "trainer": {"optim": "adafactor"},
        "leaves": {"optimizer_states": 0.02},
        "unsharded": {
            "fsdp": "transformers' Adafactor adds whole tensors to shards",
            "deepspeed": "its states are rows and columns of matrices, and DeepSpeed hands it flat pieces",
        },
    },
    "adamw_8bit": {
        "called": "8-bit AdamW",
        **ON_BITSANDBYTES,
        "numerics": Numerics.APPROXIMATE,
        "trainer": {"optim": "adamw_8bit"},
        "leaves": {"optimizer_states": 0.26},
        "devices": ["cuda", "cpu"],
        "instead": "adafactor",
    },
    "adamw_paged": {
        "called": "paged AdamW",
        **ON_BITSANDBYTES,
        "numerics": Numerics.EXACT,
        "trainer": {"optim": "paged_adamw_32bit"},
        "devices": ["cuda"],
        "instead": "adamw_8bit",
    },
    "adamw_8bit_paged": {
        "called": "paged 8-bit AdamW",
        **ON_BITSANDBYTES,
        "numerics": Numerics.APPROXIMATE,
        "trainer": {"optim": "paged_adamw_8bit"},
        "devices": ["cuda"],
        "instead": "adamw_8bit",
    },
    # the Trainer's `adamw_torch` leaves the choice to PyTorch: foreach on a GPU, the loop on a CPU
    "adamw_foreach": {"called": "foreach AdamW", "numerics": Numerics.EXACT, "adamw": {"foreach": True}},
    "adamw_loop": {"called": "AdamW in a loop", "numerics": Numerics.EXACT, "adamw": {"foreach": False}},
    # of a quarter, a half, 1, 2 and 4 times AdamW's rate the last two are alike for the embedded model after 48 steps
    # on Shakespeare (4.20, two seeds; 4.26 at AdamW's own rate, where AdamW has 4.21), and the smaller one is taken;
    # after 12 steps 4 times is the best. `adjust_lr_fn` gives the step in a matrix about the size that AdamW's has
    "muon": {
        "called": "Muon",
        "learning_rate_factor": 2.0,
        "muon": {"adjust_lr_fn": "match_rms_adamw"},
        "unsharded": {"deepspeed": "it makes matrices orthogonal, and DeepSpeed hands it flat pieces"},
    },
    "adamw_stochastic": _stochastic("AdamW with stochastic rounding", "_AdamW"),
    "adamw_8bit_stochastic": _stochastic("8-bit AdamW with stochastic rounding", "AdamW8bit"),
    "adamw_4bit_stochastic": _stochastic("4-bit AdamW with stochastic rounding", "AdamW4bit"),
    "adamw_kahan": {
        "called": "AdamW with Kahan summation",
        **IN_PIECES,
        "packages": {"optimi": "torch-optimi"},
        "library": {
            "module": "optimi",
            "name": "AdamW",
            "settings": {"kahan_sum": True, "triton": False, "foreach": False},
            "piece": PIECE,
        },
    },
    "adamw_flash": {
        "called": "FlashAdamW",
        "numerics": Numerics.APPROXIMATE,
        "packages": {"triton": "triton", "flashoptim": "flashoptim"},
        "devices": ["cuda"],
        "instead": "adamw_8bit_stochastic",
        "library": {"module": "flashoptim", "name": "FlashAdamW", "settings": {}, "piece": 0},
        "unsharded": {"fsdp": "its kernels know no shards"},
    },
}


@dataclass(frozen=True)
class Optimizer(Technique):
    """Chooses the optimizer. The three AdamW of PyTorch take the same steps up to rounding, those with states of fewer
    bits or for bf16 weights the same in lower precision; the others are other optimizers.

    Bytes of state for a parameter matrix (C, D) in fp32: AdamW 8·C·D; AdamW with 8-bit states 2·C·D, and 8 for every
    256 parameters (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861); Adafactor
    4·(C + D) (Shazeer and Stern, "Adafactor", arXiv 1804.04235); SGD none, with momentum 4·C·D. bitsandbytes keeps
    32-bit states for tensors of fewer than 4,096 elements, and the Trainer asks it to do so for embeddings too. The
    paged ones have states of 100,000 elements and more in CUDA's unified memory: the host's, from where the driver
    moves pages to the GPU and back (Dettmers et al., "QLoRA", arXiv 2305.14314).

    Muon (Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM Training", arXiv
    2502.16982) makes the average of a matrix's gradient orthogonal, by five rounds of Newton and Schulz's products in
    bf16. As its author recommends, it has the matrices inside the blocks, 4·C·D bytes of state, and AdamW the rest. For
    a matrix (m, n), m <= n, its step takes 8·m·n + 4·m² bytes of scratch, one matrix at a time. GPT-2's queries, keys
    and values are packed in one matrix, and orthogonalized as one.

    Under bf16 weights (Zamirai et al., arXiv 2010.06192) the stochastic ones of torchao round an updated weight up or
    down by chance, so that small updates arrive on average; their states are in the weights' type, in 8 bits or in 4
    (Li et al., arXiv 2309.01507). Kahan's sum, of optimi, keeps what was rounded away, 2 more bytes a parameter. They
    work in fp32 on 2²² elements of a parameter at a time. FlashOptim keeps the next 8 bits of each weight and two
    states of 8 bits, with a scale of 2 bytes for 32 of them, in one kernel of Triton's.
    """

    kind: str = setting("adamw_8bit", "which optimizer", choices=tuple(KINDS), in_label=True)

    stage = Stage.OPTIMIZE
    brings = frozenset({Capability.OPTIMIZER})
    forbids = frozenset({Capability.OPTIMIZER})
    called = MappingProxyType({f"kind={kind}": table["called"] for kind, table in KINDS.items()})
    # those that save: momentum alone keeps more than 8-bit states and adapts less, and plain SGD saves no more than
    # Adafactor's rows and columns, at a learning rate that has to be searched for
    worth_trying = ({"kind": "adamw_8bit"}, {"kind": "adafactor"})

    def __post_init__(self) -> None:
        super().__post_init__()
        # the instance's own, over what the class and its card say; `object`, because the dataclass is frozen
        table = KINDS[self.kind]
        object.__setattr__(self, "numerics", table.get("numerics", Numerics.DIFFERENT))
        for name in ("learning_rate_factor", "unsharded", "leaves"):
            if name in table:
                object.__setattr__(self, name, table[name])

    def missing(self, device: Device) -> str | None:
        table = KINDS[self.kind]
        if device.kind not in table.get("devices", [device.kind]):
            return f"optimizer=kind:{self.kind} has no kernels for {device.kind}. Use kind:{table['instead']}."
        for module, distribution in table.get("packages", {}).items():
            if find_spec(module) is None:
                return f"optimizer=kind:{self.kind} needs {module}. Install it with: pip install {distribution}"
        return None

    def check_model(self, model: Any) -> None:
        types = {str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
        if self.kind == "adamw_flash" and "torch.float32" in types:
            raise ConfigurationError(
                "optimizer=kind:adamw_flash keeps what 16-bit weights round away, and float32 ones "
                "are trained here. Add pure_bf16 and no adapter, or use kind:adamw_8bit."
            )

    def training_arguments(self, arguments: Arguments) -> Arguments:
        return {**arguments, **KINDS[self.kind].get("trainer", {})}

    def run_context(self) -> AbstractContextManager[Any]:
        if "bitsandbytes" not in KINDS[self.kind].get("packages", {}):
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
        functions: dict[str, Any] = {"adamw": use_adamw, "muon": use_muon, "library": use_library}
        for name, function in functions.items():
            if name in KINDS[self.kind]:
                return Call(function, KINDS[self.kind][name])
        return None

    def stand_in(self) -> Technique:
        """Another function in place of `trainer`, for kinds whose kernels cannot be traced.

        That of FlashOptim needs no Triton, so there is nothing that a device can lack.
        """
        from workbench.techniques.stand_ins import optimizer as stand_ins

        here = stand_ins.__name__
        calls = {
            "adamw_8bit": Call(stand_ins.use_bitsandbytes, {"bits": 8, "paged": False}),
            "adamw_paged": Call(stand_ins.use_bitsandbytes, {"bits": 32, "paged": True}),
            "adamw_8bit_paged": Call(stand_ins.use_bitsandbytes, {"bits": 8, "paged": True}),
            "adamw_flash": Call(use_library, {"module": here, "name": "FlashStates", "settings": {}, "piece": 0}),
        }
        if self.kind in ("adamw_8bit_stochastic", "adamw_4bit_stochastic"):
            stand_ins.read_code_tables()
        if self.kind not in calls:
            return self
        members: dict[str, Any] = {"trainer": lambda technique: calls[technique.kind]}
        if self.kind == "adamw_flash":
            members["missing"] = lambda *_: None
        return self.replacing(**members)


def use_adamw(trainer: Any, foreach: bool) -> None:
    """PyTorch's AdamW: `foreach` updates many parameters at once, the loop one after the other."""
    import torch

    _, options = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, {**options, "fused": False, "foreach": foreach})


def use_muon(trainer: Any, adjust_lr_fn: str) -> None:
    """PyTorch's Muon for the matrices inside the blocks; its AdamW for embeddings, the head and what is no matrix."""
    import torch

    head = trainer.model.get_output_embeddings()
    embeddings = [module for module in trainer.model.modules() if isinstance(module, torch.nn.Embedding)]
    outside = {id(getattr(module, "weight", None)) for module in (*embeddings, head)}
    inside = set()
    for parameter in trainer.model.parameters():
        # a single row or column, as (IA)³ learns, has nothing to be made orthogonal
        is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        if is_matrix and id(parameter) not in outside:
            inside.add(id(parameter))

    class MuonAndAdamW(torch.optim.Optimizer):
        def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
            inner_groups = []
            outer_groups = []
            for group in groups:
                inner_groups.append({**group, "params": [p for p in group["params"] if id(p) in inside]})
                outer_groups.append({**group, "params": [p for p in group["params"] if id(p) not in inside]})
            muon = torch.optim.Muon(inner_groups, lr=options["lr"], adjust_lr_fn=adjust_lr_fn)
            adamw = torch.optim.AdamW(outer_groups, **options)
            self.both = (muon, adamw)
            in_turns: list[dict[str, Any]] = []  # Muon's are those of even numbers
            for pair in zip(muon.param_groups, adamw.param_groups, strict=True):
                in_turns += pair
            super().__init__(in_turns, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for index, optimizer in enumerate(self.both):
                # after a state was loaded, these are other objects
                optimizer.state = self.state
                optimizer.param_groups = self.param_groups[index::2]
                optimizer.step()

    _, options = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    trainer.optimizer_cls_and_kwargs = (MuonAndAdamW, options)


def use_library(trainer: Any, module: str, name: str, settings: dict[str, Any], piece: int) -> None:
    """An optimizer of another library, whose step takes a piece of a parameter at a time; 0: the whole."""
    optimizer_class = getattr(import_module(module), name)
    if piece:
        optimizer_class = piecewise(optimizer_class, piece)
    options = {"lr": trainer.args.learning_rate, "eps": trainer.args.adam_epsilon, **settings}
    options["betas"] = (trainer.args.adam_beta1, trainer.args.adam_beta2)
    trainer.optimizer_cls_and_kwargs = (optimizer_class, options)


def piecewise(optimizer_class: Any, elements: int) -> Any:
    """An optimizer that looks at each number by itself, with a step that takes so many elements at a time.

    torchao compiles its step where there is Triton; elsewhere its fp32 copies would be several times a parameter. Nor
    can it be compiled while PyTorch's operations are watched, and a compilation that failed then is not tried again.
    """
    import torch
    from torch.utils._triton import has_triton

    class Piecewise(optimizer_class):  # type: ignore[misc]
        def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
            self.pieces: dict[Any, Any] = {}
            groups_of_pieces = []
            for group in groups:
                group_pieces = []
                for parameter in group["params"]:
                    self.pieces[parameter] = parameter.detach().view(-1).split(elements)
                    group_pieces += self.pieces[parameter]
                groups_of_pieces.append({**group, "params": group_pieces})
            super().__init__(groups_of_pieces, **options)

        def step(self, closure: Any = None) -> None:
            for parameter, pieces in self.pieces.items():
                gradients = [None] * len(pieces)
                if parameter.grad is not None:
                    gradients = parameter.grad.reshape(-1).split(elements)
                for piece, gradient in zip(pieces, gradients, strict=True):
                    piece.grad = gradient
            eager = torch._C._len_torch_dispatch_stack() > 0 or not has_triton()
            with torch.no_grad(), torch.compiler.set_stance("force_eager" if eager else "default"):
                super().step()
            super().zero_grad()  # of the pieces, which would keep the parameters' alive

    return Piecewise
