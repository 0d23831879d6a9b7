"""Other optimizers: they keep less state per parameter, or need fewer temporaries."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from workbench.base.device import Device
from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Numerics, Stage, Technique


def use_adamw(trainer: Any, foreach: bool) -> None:
    """Let the trainer use PyTorch's AdamW: with `foreach` it updates many parameters at once, else one by one."""
    import torch

    _, options = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, {**options, "fused": False, "foreach": foreach})


def use_muon(trainer: Any, adjust_lr_fn: str) -> None:
    """Let the trainer use PyTorch's Muon for the matrices inside the blocks, and its AdamW for all other parameters."""
    import torch

    head = trainer.model.get_output_embeddings()
    embeddings = [module for module in trainer.model.modules() if isinstance(module, torch.nn.Embedding)]
    outside = {id(getattr(module, "weight", None)) for module in (*embeddings, head)}
    inside = set()
    for parameter in trainer.model.parameters():
        # (IA)³ learns single rows and columns, in which nothing can be made orthogonal.
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
            in_turns: list[dict[str, Any]] = []  # groups with even indices are Muon's, the others AdamW's
            for pair in zip(muon.param_groups, adamw.param_groups, strict=True):
                in_turns += pair
            super().__init__(in_turns, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for index, optimizer in enumerate(self.both):
                # Loading a state replaces these two objects.
                optimizer.state = self.state
                optimizer.param_groups = self.param_groups[index::2]
                optimizer.step()

    _, options = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    trainer.optimizer_cls_and_kwargs = (MuonAndAdamW, options)


def use_library(trainer: Any, module: str, name: str, settings: dict[str, Any], piece: int) -> None:
    """Let the trainer use an optimizer of another library.

    Args:
        name: its class, in the module of the library.
        piece: the elements of a parameter that its step takes at a time; 0: all.
    """
    optimizer_class = getattr(import_module(module), name)
    if piece:
        optimizer_class = piecewise(optimizer_class, piece)
    betas = (trainer.args.adam_beta1, trainer.args.adam_beta2)
    options = {"lr": trainer.args.learning_rate, "betas": betas, "eps": trainer.args.adam_epsilon, **settings}
    trainer.optimizer_cls_and_kwargs = (optimizer_class, options)


def piecewise(optimizer_class: Any, elements: int) -> Any:
    """Define an optimizer whose step takes so many elements of a parameter at a time.

    The given one has to treat each number by itself. torchao compiles its step where there is Triton. Elsewhere its
    fp32 copies would take several times the bytes of a parameter. Nor can it be compiled while PyTorch's operations
    are watched, and a compilation that failed then is not tried again.
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
            super().zero_grad()  # a piece's gradient is a view, which would keep the parameter's alive

    return Piecewise


@dataclass(frozen=True)
class OptimizerKind:
    """One kind of optimizer: its properties, and the way in which the Trainer gets it."""

    called: str  # the title in tables and pictures
    numerics: Numerics = Numerics.DIFFERENT
    learning_rate_factor: float = 1.0  # the customary rate, as a multiple of AdamW's
    remaining_shares: Mapping[str, float] = field(default_factory=dict)  # see `Technique`
    why_not_on_shards: Mapping[str, str] = field(default_factory=dict)  # see `Technique`
    arguments: Arguments = field(default_factory=dict)  # TrainingArguments with which the Trainer makes it itself
    call: Call | None = None  # otherwise: gives the Trainer its class
    packages: Mapping[str, str] = field(default_factory=dict)  # modules that it needs, and what to install for each
    devices: tuple[str, ...] = ("cuda", "mps", "cpu")  # the kinds of devices that it has kernels for
    instead: str = ""  # the kind to use on other devices


def _in_pieces(called: str, package: str, module: str, name: str, settings: Arguments) -> OptimizerKind:
    """Return a kind for bf16 weights, of a library whose step would take copies of a whole parameter in fp32."""
    return OptimizerKind(
        called,
        Numerics.APPROXIMATE,
        call=Call(use_library, {"module": module, "name": name, "settings": settings, "piece": PIECE}),
        packages={module.partition(".")[0]: package},
        why_not_on_shards={
            "fsdp": "its steps in pieces would change copies of the shards",
            "deepspeed": "its step fails on the flat pieces that DeepSpeed hands it",
        },
    )


STOCHASTIC = {"bf16_stochastic_round": True}
PIECE = 2**22  # elements of a parameter that a step in fp32 takes at a time: 16 MiB a copy
ON_BITSANDBYTES: Arguments = {
    "packages": {"bitsandbytes": "bitsandbytes"},
    "why_not_on_shards": {"fsdp": "bitsandbytes' kernels know no shards"},
}

KINDS = {
    "adamw_fused": OptimizerKind("fused AdamW", Numerics.EXACT, arguments={"optim": "adamw_torch_fused"}),
    # SGD does not divide by the size of the gradient, and needs a far larger rate: the best of 100, 300, 1,000 and
    # 2,000 times Adam's, with momentum of 30 and 100, for the embedded model after 30 steps on Shakespeare.
    "sgd": OptimizerKind("SGD", learning_rate_factor=1000.0, arguments={"optim": "sgd"}),
    "sgd_momentum": OptimizerKind(
        "SGD with momentum",
        learning_rate_factor=100.0,
        arguments={"optim": "sgd", "optim_args": "momentum=0.9"},
    ),
    "adafactor": OptimizerKind(
        "Adafactor",
        remaining_shares={"optimizer_states": 0.02},
        arguments={"optim": "adafactor"},
        why_not_on_shards={
            "fsdp": "transformers' Adafactor adds whole tensors to shards",
            "deepspeed": "its states are rows and columns of matrices, and DeepSpeed hands it flat pieces",
        },
    ),
    "adamw_8bit": OptimizerKind(
        "8-bit AdamW",
        Numerics.APPROXIMATE,
        remaining_shares={"optimizer_states": 0.26},
        arguments={"optim": "adamw_8bit"},
        devices=("cuda", "cpu"),
        instead="adafactor",
        **ON_BITSANDBYTES,
    ),
    "adamw_paged": OptimizerKind(
        "paged AdamW",
        Numerics.EXACT,
        arguments={"optim": "paged_adamw_32bit"},
        devices=("cuda",),
        instead="adamw_8bit",
        **ON_BITSANDBYTES,
    ),
    "adamw_8bit_paged": OptimizerKind(
        "paged 8-bit AdamW",
        Numerics.APPROXIMATE,
        arguments={"optim": "paged_adamw_8bit"},
        devices=("cuda",),
        instead="adamw_8bit",
        **ON_BITSANDBYTES,
    ),
    # The Trainer's `adamw_torch` leaves the choice to PyTorch: foreach on a GPU, the loop on a CPU.
    "adamw_foreach": OptimizerKind("foreach AdamW", Numerics.EXACT, call=Call(use_adamw, {"foreach": True})),
    "adamw_loop": OptimizerKind("AdamW in a loop", Numerics.EXACT, call=Call(use_adamw, {"foreach": False})),
    # Tried were a quarter, a half, 1, 2 and 4 times AdamW's rate, for the embedded model on Shakespeare. After 48 steps
    # 2 and 4 are alike (4.20, two seeds; 4.26 at AdamW's own rate, where AdamW has 4.21), and the smaller one is taken;
    # after 12 steps 4 is the best. `adjust_lr_fn` gives the step in a matrix about the size that AdamW's has.
    "muon": OptimizerKind(
        "Muon",
        learning_rate_factor=2.0,
        call=Call(use_muon, {"adjust_lr_fn": "match_rms_adamw"}),
        why_not_on_shards={"deepspeed": "it makes matrices orthogonal, and DeepSpeed hands it flat pieces"},
    ),
    "adamw_stochastic": _in_pieces("AdamW with stochastic rounding", "torchao", "torchao.optim", "_AdamW", STOCHASTIC),
    "adamw_8bit_stochastic": _in_pieces(
        "8-bit AdamW with stochastic rounding", "torchao", "torchao.optim", "AdamW8bit", STOCHASTIC
    ),
    "adamw_4bit_stochastic": _in_pieces(
        "4-bit AdamW with stochastic rounding", "torchao", "torchao.optim", "AdamW4bit", STOCHASTIC
    ),
    "adamw_kahan": _in_pieces(
        "AdamW with Kahan summation",
        "torch-optimi",
        "optimi",
        "AdamW",
        {"kahan_sum": True, "triton": False, "foreach": False},
    ),
    "adamw_flash": OptimizerKind(
        "FlashAdamW",
        Numerics.APPROXIMATE,
        call=Call(use_library, {"module": "flashoptim", "name": "FlashAdamW", "settings": {}, "piece": 0}),
        packages={"triton": "triton", "flashoptim": "flashoptim"},
        devices=("cuda",),
        instead="adamw_8bit_stochastic",
        why_not_on_shards={"fsdp": "its kernels know no shards"},
    ),
}


@dataclass(frozen=True)
class Optimizer(Technique):
    """The choice of the optimizer. The three AdamW of PyTorch take the same steps up to rounding;
    those with states of fewer bits or for bf16 weights take them in lower precision; the others are other optimizers.

    Bytes of state for a parameter matrix (C, D) in fp32: AdamW 8·C·D; AdamW with 8-bit states 2·C·D, and 8 for every
    256 parameters (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861); Adafactor
    4·(C + D) (Shazeer and Stern, "Adafactor", arXiv 1804.04235); SGD none, with momentum 4·C·D. bitsandbytes keeps
    32-bit states for tensors of fewer than 4,096 elements, and the Trainer asks it to do so for embeddings too. The
    paged ones keep states of 100,000 elements and more in CUDA's unified memory: that is the host's, from where the
    driver moves pages to the GPU and back (Dettmers et al., "QLoRA", arXiv 2305.14314).

    Muon (Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM Training", arXiv
    2502.16982) makes the average of a matrix's gradient orthogonal, by five rounds of Newton and Schulz's products in
    bf16. As its author recommends, Muon steps the matrices inside the blocks, with 4·C·D bytes of state, and AdamW
    all other parameters. For a matrix (m, n), m <= n, its step takes 8·m·n + 4·m² bytes of scratch, one matrix at a
    time. GPT-2's queries, keys and values are packed in one matrix, and orthogonalized as one.

    Under bf16 weights (Zamirai et al., arXiv 2010.06192) the stochastic ones of torchao round an updated weight up or
    down by chance, so that small updates arrive on average; their states are in the weights' type, in 8 bits or in 4
    (Li et al., arXiv 2309.01507). Kahan's sum, of optimi, keeps what was rounded away, 2 more bytes a parameter.
    Both work in fp32 on 2²² elements of a parameter at a time. FlashOptim keeps the next 8 bits of each weight and two
    states of 8 bits, with a scale of 2 bytes for 32 of them, in one kernel of Triton's.
    """

    kind: str = setting("adamw_8bit", "which optimizer", choices=tuple(KINDS), in_label=True)

    stage = Stage.OPTIMIZE
    brings = frozenset({Capability.OPTIMIZER})
    forbids = frozenset({Capability.OPTIMIZER})
    called = MappingProxyType({f"kind={name}": kind.called for name, kind in KINDS.items()})
    # The others save less, or cost more: momentum alone keeps more than 8-bit states and adapts less, and plain SGD
    # saves no more than Adafactor's rows and columns, at a learning rate that has to be searched for.
    worth_trying = ({"kind": "adamw_8bit"}, {"kind": "adafactor"})

    def __post_init__(self) -> None:
        super().__post_init__()
        # The properties of its kind hide those of the class. `object`, because the dataclass is frozen.
        for name in ("numerics", "learning_rate_factor", "why_not_on_shards", "remaining_shares"):
            object.__setattr__(self, name, getattr(KINDS[self.kind], name))

    def missing(self, device: Device) -> str | None:
        kind = KINDS[self.kind]
        if device.kind not in kind.devices:
            return f"optimizer=kind:{self.kind} has no kernels for {device.kind}. Use kind:{kind.instead}."
        for module, distribution in kind.packages.items():
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
        return {**arguments, **KINDS[self.kind].arguments}

    def run_context(self) -> AbstractContextManager[Any]:
        if "bitsandbytes" not in KINDS[self.kind].packages:
            return super().run_context()
        # The Trainer tells bitsandbytes about embeddings in one object for the whole process. It would hold the
        # embeddings of a model that is gone. It would also apply its settings to the next model, because it keeps them
        # by the position of a parameter (bitsandbytes 0.50, `GlobalOptimManager.index2config`).
        manager = import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
        manager.initialize()
        stack = ExitStack()
        stack.callback(manager.initialize)
        return stack

    def trainer(self) -> Call | None:
        return KINDS[self.kind].call

    def stand_in(self) -> Technique:
        """Return the technique with another `trainer`, for kinds whose kernels cannot be traced.

        The stand-in for FlashOptim needs no Triton, so no device lacks anything.
        """
        from workbench.techniques.stand_ins import optimizer as stand_ins

        module = stand_ins.__name__
        calls = {
            "adamw_8bit": Call(stand_ins.use_bitsandbytes, {"bits": 8, "paged": False}),
            "adamw_paged": Call(stand_ins.use_bitsandbytes, {"bits": 32, "paged": True}),
            "adamw_8bit_paged": Call(stand_ins.use_bitsandbytes, {"bits": 8, "paged": True}),
            "adamw_flash": Call(use_library, {"module": module, "name": "FlashStates", "settings": {}, "piece": 0}),
        }
        if self.kind in ("adamw_8bit_stochastic", "adamw_4bit_stochastic"):
            stand_ins.read_code_tables()
        if self.kind not in calls:
            return self
        members: dict[str, Any] = {"trainer": lambda technique: calls[technique.kind]}
        if self.kind == "adamw_flash":
            members["missing"] = lambda *_: None
        return self.replacing(**members)
