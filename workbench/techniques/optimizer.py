"""Other optimizers: less state per parameter, or the same state with fewer temporaries."""

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from workbench.errors import ConfigurationError
from workbench.measure.device import Device
from workbench.paths import beside
from workbench.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Numerics, Stage, Technique

KINDS: dict[str, Arguments] = beside(__file__, "optimizer.toml")


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

    kind: str = setting("adamw_8bit", "which optimizer", choices=tuple(KINDS))

    stage = Stage.OPTIMIZE
    brings = frozenset({Capability.OPTIMIZER})
    forbids = frozenset({Capability.OPTIMIZER})
    # those that save: momentum alone keeps more than 8-bit states and adapts less, and plain SGD saves no more than
    # Adafactor's rows and columns, at a learning rate that has to be searched for
    worth_trying = ({"kind": "adamw_8bit"}, {"kind": "adafactor"})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "numerics", Numerics(self._of("numerics", Numerics.DIFFERENT)))
        for name in ("learning_rate_factor", "unsharded", "alone"):
            object.__setattr__(self, name, self._of(name, getattr(self, name)))
        object.__setattr__(self, "forbids", self.forbids | {Capability[each] for each in self._of("forbids", ())})

    def _of(self, name: str, otherwise: Any = None) -> Any:
        """What the kind's table says."""
        return KINDS[self.kind].get(name, otherwise)

    def missing(self, device: Device) -> str | None:
        if device.kind not in self._of("devices", [device.kind]):
            return f"optimizer=kind:{self.kind} has no kernels for {device.kind}. Use kind:{self._of('instead')}."
        for package, name in self._of("packages", {}).items():
            if find_spec(package) is None:
                return f"optimizer=kind:{self.kind} needs {package}. Install it with: pip install {name}"
        return None

    def check_model(self, model: Any) -> None:
        kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
        if self.kind == "adamw_flash" and "float32" in kinds:
            raise ConfigurationError(
                "optimizer=kind:adamw_flash keeps what 16-bit weights round away, and float32 ones are trained here. "
                "Add pure_bf16 and no adapter, or use kind:adamw_8bit."
            )

    def training_arguments(self, arguments: Arguments) -> Arguments:
        return {**arguments, **self._of("trainer", {})}

    def run_context(self) -> AbstractContextManager[Any]:
        if "bitsandbytes" not in self._of("packages", {}):
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
        uses: dict[str, Any] = {"adamw": use_adamw, "muon": use_muon, "library": use_library, "host": use_host}
        return next((Call(use, self._of(name)) for name, use in uses.items() if name in KINDS[self.kind]), None)

    def stand_in(self) -> Technique:
        """Of FlashOptim predictions replace the library, whose kernels are Triton's."""
        return self.replacing(missing=lambda *_: None) if self.kind == "adamw_flash" else self


def use_adamw(trainer: Any, foreach: bool) -> None:
    """PyTorch's AdamW: `foreach` updates many parameters at once, the loop one after the other."""
    import torch

    _, options = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, {**options, "fused": False, "foreach": foreach})


def use_muon(trainer: Any, adjust_lr_fn: str) -> None:
    """PyTorch's Muon for the matrices inside the blocks; its AdamW for embeddings, the head and what is no matrix."""
    import torch

    modules = [m for m in trainer.model.modules() if isinstance(m, torch.nn.Embedding)]
    outside = {id(getattr(m, "weight", None)) for m in (*modules, trainer.model.get_output_embeddings())}
    # a single row or column, as (IA)³ learns, has nothing to be made orthogonal
    inside = {id(p) for p in trainer.model.parameters() if p.ndim == 2 and min(p.shape) > 1} - outside

    class MuonAndAdamW(torch.optim.Optimizer):
        def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
            inner = [{**g, "params": [p for p in g["params"] if id(p) in inside]} for g in groups]
            outer = [{**g, "params": [p for p in g["params"] if id(p) not in inside]} for g in groups]
            muon = torch.optim.Muon(inner, lr=options["lr"], adjust_lr_fn=adjust_lr_fn)
            self.both = muon, torch.optim.AdamW(outer, **options)
            super().__init__([one.param_groups[i] for i in range(len(groups)) for one in self.both], {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for index, one in enumerate(self.both):  # other groups, after a state was loaded
                one.state, one.param_groups = self.state, self.param_groups[index::2]
                one.step()

    trainer.optimizer_cls_and_kwargs = (MuonAndAdamW, trainer.get_optimizer_cls_and_kwargs(trainer.args)[1])


def use_library(trainer: Any, module: str, name: str, settings: dict[str, Any], piece: int) -> None:
    """An optimizer of another library, whose step takes a piece of a parameter at a time; 0: the whole."""
    kind = getattr(import_module(module), name)
    options = {"lr": trainer.args.learning_rate, "eps": trainer.args.adam_epsilon, **settings}
    options["betas"] = (trainer.args.adam_beta1, trainer.args.adam_beta2)
    trainer.optimizer_cls_and_kwargs = (piecewise(kind, piece) if piece else kind, options)


def use_host(trainer: Any) -> None:
    """torchao's AdamW on the host, of tensors of 4,096 elements and more, with gradients as they are when it steps."""
    import torch

    kind: Any = import_module("torchao.optim.cpu_offload").CPUOffloadOptimizer

    class OnHost(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            # torchao's hooks send what is not clipped yet, and would keep the parameters they hang on, for ever
            for parameter in self.param_d2h_map:
                parameter._post_accumulate_grad_hooks.popitem()

        @property
        def state(self) -> Any:
            held = {p: {**self.optim_dict[p].state[h], "w": h, "g": h.grad} for p, h in self.param_d2h_map.items()}
            return held | (self.d_opt.state if self.d_opt else {})

        def step(self, closure: Any = None) -> Any:
            for parameter, host in self.param_d2h_map.items():
                if parameter.grad is not None:
                    self.stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(self.stream):
                        host.grad.copy_(parameter.grad, non_blocking=True)
                    self.queue[parameter] = self.stream.record_event()  # which is waited for before its step
            return super().step(closure)

        def load_state_dict(self, state_dict: Any) -> None:
            # accelerate loads the state once, by which the small parameters' optimizer gets new groups: without this,
            # the scheduler would go on setting the rate in the old ones
            super().load_state_dict(state_dict)
            if self.d_opt:
                self.d_param_groups = self.d_opt.param_groups

    trainer.optimizer_cls_and_kwargs = (OnHost, trainer.get_optimizer_cls_and_kwargs(trainer.args)[1])


def piecewise(kind: Any, elements: int) -> Any:
    """An optimizer that looks at each number by itself, with a step that takes so many elements at a time.

    torchao compiles its step where there is Triton; elsewhere its fp32 copies would be several times a parameter. Nor
    can it be compiled while PyTorch's operations are watched, and what was tried then is not tried again.
    """
    import torch
    from torch.utils._triton import has_triton

    class Piecewise(kind):  # type: ignore[misc]
        def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
            self.pieces = {p: p.detach().view(-1).split(elements) for group in groups for p in group["params"]}
            split = [[piece for p in group["params"] for piece in self.pieces[p]] for group in groups]
            super().__init__([{**g, "params": pieces} for g, pieces in zip(groups, split, strict=True)], **options)

        def step(self, closure: Any = None) -> None:
            for p, pieces in self.pieces.items():
                parts = [None] * len(pieces) if p.grad is None else p.grad.reshape(-1).split(elements)
                for piece, part in zip(pieces, parts, strict=True):
                    piece.grad = part
            eager = torch._C._len_torch_dispatch_stack() > 0 or not has_triton()
            with torch.no_grad(), torch.compiler.set_stance("force_eager" if eager else "default"):
                super().step()
            super().zero_grad()  # of the pieces, which would keep the parameters' alive

    return Piecewise
