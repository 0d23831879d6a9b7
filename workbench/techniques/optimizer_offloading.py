"""Optimizer offloading: Adam's two moments live in host memory or on a disk and visit the device in chunks."""

import inspect
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.errors import ConfigurationError, UnavailableError
from workbench.measure.categories import Category, format_bytes
from workbench.measure.offloaded import DISK, HOST, Account, in_memory
from workbench.settings import setting
from workbench.techniques.base import Arguments, Capability, Fragment, Numerics, Technique

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DEEPSPEED = "deepspeed==0.19.8"


def as_bytes(tensor: Any) -> Any:
    """The memory of a tensor of the CPU, for files; NumPy knows no bfloat16."""
    import torch

    return tensor.view(torch.uint8).numpy().data


class HostStates:
    """Tensors in page-locked host memory."""

    def allocate(self, like: "torch.Tensor") -> Any:
        """A tensor's worth of zeros."""
        return like.new_zeros(like.numel(), device="cpu").pin_memory()

    def load(self, place: Any, start: int, buffer: "torch.Tensor") -> None:
        buffer.copy_(place[start : start + len(buffer)], non_blocking=True)

    def store(self, place: Any, start: int, buffer: "torch.Tensor") -> None:
        place[start : start + len(buffer)].copy_(buffer)  # waits, so that the host may use it afterwards


class FileStates:
    """Tensors in one file without a name, which is gone when the optimizer is, even if the process is killed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the finalizer
        weakref.finalize(self, self.file.close)
        self.nbytes = 0

    def allocate(self, like: "torch.Tensor") -> Any:
        """A tensor's worth of zeros, which take no space until they are written over."""
        place, self.nbytes = self.nbytes, self.nbytes + like.numel() * like.element_size()
        self.file.truncate(self.nbytes)
        return place

    def load(self, place: Any, start: int, buffer: "torch.Tensor") -> None:
        host = buffer.cpu()  # the buffer itself, if that is where it is
        self.file.seek(place + start * buffer.element_size())
        data = as_bytes(host)
        if self.file.readinto(data) != len(data):
            raise OSError("the file of the optimizer states was cut short")
        if host is not buffer:
            buffer.copy_(host)

    def store(self, place: Any, start: int, buffer: "torch.Tensor") -> None:
        self.file.seek(place + start * buffer.element_size())
        self.file.write(as_bytes(buffer.cpu()))
        self.file.flush()


def streaming_adamw(parameters: Iterable[Any], states: Any, chunk: int, fused: bool, **options: Any) -> Any:
    """AdamW whose moments are in `states`. A step brings them to the device `chunk` elements at a time."""
    import torch
    from torch.optim.adamw import adamw

    class StreamingAdamW(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else torch.enable_grad()(closure)()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.update(parameter, group)
            return loss

        def update(self, parameter: Any, group: Any) -> None:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device if fused else "cpu")
                state["places"] = [states.allocate(parameter.detach()) for _ in range(2)]
            weights, gradient = parameter.detach().view(-1), parameter.grad.reshape(-1)
            buffers = [torch.empty_like(weights[:chunk]) for _ in range(2)]
            (beta1, beta2), numbers = group["betas"], {name: group[name] for name in ("lr", "weight_decay", "eps")}
            for start in range(0, len(weights), chunk):
                piece = slice(start, start + chunk)
                moments = [buffer[: len(weights[piece])] for buffer in buffers]
                for place, moment in zip(state["places"], moments, strict=True):
                    states.load(place, start, moment)
                adamw(
                    [weights[piece]],
                    [gradient[piece]],
                    [moments[0]],
                    [moments[1]],
                    [],
                    [state["step"].clone()],
                    foreach=False,
                    fused=fused,
                    amsgrad=False,
                    maximize=False,
                    beta1=beta1,
                    beta2=beta2,
                    **numbers,
                )
                for place, moment in zip(state["places"], moments, strict=True):
                    states.store(place, start, moment)
            state["step"] += 1

        def state_dict(self) -> Any:
            if self.state:
                raise NotImplementedError(
                    "the optimizer states are offloaded and cannot be saved in a checkpoint: set save_strategy='no'"
                )
            return super().state_dict()

    return StreamingAdamW(parameters, options)


@dataclass(frozen=True)
class OptimizerOffloading(Technique):
    """Where the optimizer states are kept and how they meet the weights.

    `pytorch` streams the two moments to the device, a chunk at a time, and steps there with PyTorch's own AdamW
    kernel: 16 bytes a parameter and step cross the bus in fp32. `deepspeed` is ZeRO-Offload (Ren et al., arXiv
    2101.06840) in the Trainer: the gradients go to the host, the processor steps on its own fp32 copy of the weights,
    and the new weights come back: 8 bytes. Its way to a disk, ZeRO-Infinity (Rajbhandari et al., arXiv 2104.07857), is
    refused: it exists in stage 3 alone, which takes the weights out of the model between their uses.
    """

    backend: str = setting("pytorch", "who moves the states", choices=("pytorch", "deepspeed"))
    to: str = setting("cpu", "where they are: host memory, or a file in TMPDIR", choices=("cpu", "disk"))
    chunk_elements: int = setting(2**20, "elements on the device at a time", minimum=1024)

    name: ClassVar[str] = "optimizer_offloading"
    title: ClassVar[str] = "Optimizer offloading"
    attacks: ClassVar[tuple[Category, ...]] = (Category.OPTIMIZER_STATES,)
    costs: ClassVar[str] = "8 to 16 bytes of every trained parameter cross the bus in each step"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    family: ClassVar[str] = "offloading"
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.OPTIMIZER})
    forbids: ClassVar[frozenset[Capability]] = frozenset({Capability.OPTIMIZER})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "deepspeed" and self.to == "disk":
            raise ConfigurationError(
                "optimizer_offloading: backend deepspeed reaches a disk through ZeRO-Infinity alone, whose stage 3 "
                "leaves empty tensors in the model: its parameters could not be counted, sampled or saved here. Use "
                "backend:pytorch,to:disk."
            )

    @property
    def can_be_resumed(self) -> bool:
        return False  # the moments are on the host or on a disk, and the optimizer's state holds their places alone

    def missing(self, device_type: str) -> str | None:
        if self.to == "cpu" and device_type != "cuda":
            return (
                f"optimizer_offloading=backend:{self.backend},to:cpu needs a CUDA device, and this run is on the "
                f"{device_type}: its memory is the host's own, so nothing would move. "
                "Use backend:pytorch,to:disk."
            )
        if self.to == "disk" and in_memory(Path(tempfile.gettempdir())):
            return (
                f"optimizer_offloading=to:disk: {tempfile.gettempdir()} is itself held in memory (tmpfs), so nothing "
                "would be saved. Let the environment variable TMPDIR name a folder on a disk."
            )
        return self._deepspeed_missing() if self.backend == "deepspeed" else None

    def _deepspeed_missing(self) -> str | None:
        words = "optimizer_offloading=backend:deepspeed"
        if find_spec("deepspeed") is None:
            return f"{words} needs a package: pip install {DEEPSPEED}. Or use backend:pytorch."
        for tool in ("g++", "ninja"):
            if shutil.which(tool) is None:
                return f"{words} compiles its CPU optimizer and finds no {tool} on the PATH. Install it (apt, or pip)."
        return None

    def training_arguments(self, arguments: Arguments) -> Arguments:
        if "optim" in arguments:
            raise ConfigurationError(
                f"optimizer_offloading brings an AdamW of its own, so optim={arguments['optim']!r} cannot be used. "
                "Drop one of the two."
            )
        if self.backend == "pytorch":
            return arguments
        if arguments.get("bf16") or arguments.get("fp16"):
            raise ConfigurationError(
                "optimizer_offloading: DeepSpeed has no autocast; it would keep the weights in 16 bits. "
                "Use backend:pytorch with mixed precision."
            )
        return {**arguments, "deepspeed": self._deepspeed_config()}

    def optimizer(self, model: "PreTrainedModel", arguments: Any) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        options = adamw_options(arguments)
        if self.backend == "deepspeed":
            return _deepspeed_adamw(trained, options)
        states, account = (FileStates(), DISK) if self.to == "disk" else (HostStates(), HOST)
        fused = "fused" in arguments.optim  # as the baseline: the same kernel, the same rounding
        return streaming_adamw(trained, Counted(states, account), self.chunk_elements, fused, **options)

    def run_context(self) -> AbstractContextManager[Any]:
        return single_process() if self.backend == "deepspeed" else nullcontext()

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> tuple[Technique, ...]:
        return (cls(to="disk" if compute_capability is None else "cpu"),)  # a CPU's memory is the host's already

    def stand_in(self) -> "Technique":
        """The states take no device memory at all; what passes through the device are two buffers of a chunk."""
        if self.backend == "deepspeed":
            raise ConfigurationError(
                "predict: optimizer_offloading=backend:deepspeed steps in DeepSpeed's own kernels and buckets, which "
                "cannot be traced. Measure it with `run`, or predict backend:pytorch."
            )
        return Traced(**self.settings())

    def _deepspeed_config(self) -> dict[str, Any]:
        """With DeepSpeed's default buckets of 5 · 10⁸ elements, a small model would need 2 GB more instead of less."""
        zero: dict[str, Any] = {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "reduce_bucket_size": self.chunk_elements,
            "allgather_bucket_size": self.chunk_elements,
        }
        return {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",  # as the Trainer clips; unset, DeepSpeed would not do the same
            "communication_data_type": "fp32",
            "zero_optimization": zero,
        }

    def script(self) -> Fragment:
        if self.backend == "deepspeed":
            return _deepspeed_script()
        store = FileStates if self.to == "disk" else HostStates
        return Fragment(
            imports=(
                "import tempfile",
                "import weakref",
                "from collections.abc import Iterable",
                "from typing import Any",
            ),
            definitions=tuple(inspect.getsource(part) + "\n" for part in (as_bytes, store, streaming_adamw)),
            trainer=(
                "trainer.optimizer = streaming_adamw(",
                "    [p for p in model.parameters() if p.requires_grad],",
                f"    {store.__name__}(),",
                f"    chunk={self.chunk_elements},",
                '    fused="fused" in trainer.args.optim,',
                "    lr=trainer.args.learning_rate,",
                "    betas=(trainer.args.adam_beta1, trainer.args.adam_beta2),",
                "    eps=trainer.args.adam_epsilon,",
                "    weight_decay=trainer.args.weight_decay,",
                ")",
            ),
        )


class NoStates:
    """For predictions: what is not on the device is nowhere, and moving it allocates nothing there either.

    A transfer between page-locked or file-backed host memory and a buffer on the device is a copy in place.
    """

    def allocate(self, like: "torch.Tensor") -> Any:
        return None

    def load(self, place: Any, start: int, buffer: "torch.Tensor") -> None: ...

    def store(self, place: Any, start: int, buffer: "torch.Tensor") -> None: ...


class Traced(OptimizerOffloading):
    """The same optimizer, with buffers, steps and kernels as they are, and states that are elsewhere."""

    def optimizer(self, model: "PreTrainedModel", arguments: Any) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        fused = "fused" in str(arguments.optim)
        return streaming_adamw(trained, NoStates(), self.chunk_elements, fused, **adamw_options(arguments))


class Counted:
    """The same states, with an account of what they hold and move, and a clear word when the disk is full."""

    def __init__(self, states: HostStates | FileStates, account: Account) -> None:
        self.states, self.account = states, account

    def allocate(self, like: "torch.Tensor") -> Any:
        place, nbytes = self.states.allocate(like), like.numel() * like.element_size()
        self.account.take(nbytes)
        self.account.moved_bytes -= nbytes  # zeros: nothing has crossed yet
        weakref.finalize(self, self.account.release, nbytes).atexit = False
        return place

    def load(self, place: Any, start: int, buffer: "torch.Tensor") -> None:
        self.states.load(place, start, buffer)
        self.account.fetch(buffer.numel() * buffer.element_size())

    def store(self, place: Any, start: int, buffer: "torch.Tensor") -> None:
        nbytes = buffer.numel() * buffer.element_size()
        try:
            self.states.store(place, start, buffer)
        except OSError as error:
            raise UnavailableError(
                f"optimizer_offloading: {tempfile.gettempdir()} cannot take {format_bytes(nbytes)} of optimizer states "
                f"({error.strerror}). Free space there, or let the environment variable TMPDIR name a folder on a "
                "larger disk."
            ) from error
        self.account.fetch(nbytes)


def adamw_options(arguments: Any) -> dict[str, Any]:
    """AdamW's settings out of the `TrainingArguments`."""
    return {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
        "weight_decay": arguments.weight_decay,
    }


def _deepspeed_adamw(parameters: list[Any], options: dict[str, Any]) -> Any:
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if torch.distributed.get_world_size() != 1:
        raise UnavailableError("optimizer_offloading: DeepSpeed found other processes. Start one process only.")
    return DeepSpeedCPUAdam(parameters, adamw_mode=True, **options)


def environment() -> dict[str, str]:
    """What a launcher would say to the only process of a group; the port is one that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **alone}


@contextmanager
def single_process() -> Iterator[None]:
    """A process group of one, for DeepSpeed. Afterwards the process is as before.

    The Trainer notes DeepSpeed in the environment and in global objects, and nobody takes it back: without the second
    half of this function every later run of the process would silently use DeepSpeed too.
    """
    before = dict(os.environ)
    os.environ.update(environment())
    try:
        yield
    finally:
        _forget_deepspeed()
        os.environ.clear()
        os.environ.update(before)


def _forget_deepspeed() -> None:
    import deepspeed
    import torch
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if torch.distributed.is_initialized():
        deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)


def _deepspeed_script() -> Fragment:
    return Fragment(
        imports=("import os", "from deepspeed.ops.adam import DeepSpeedCPUAdam"),
        definitions=(
            "# one process; or start the script with torchrun, which sets these itself",
            'alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}',
            'for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **alone}.items():',
            "    os.environ.setdefault(name, value)",
        ),
        trainer=(
            "trainer.optimizer = DeepSpeedCPUAdam(",
            "    [p for p in model.parameters() if p.requires_grad],",
            "    lr=trainer.args.learning_rate,",
            "    betas=(trainer.args.adam_beta1, trainer.args.adam_beta2),",
            "    eps=trainer.args.adam_epsilon,",
            "    weight_decay=trainer.args.weight_decay,",
            "    adamw_mode=True,",
            ")",
        ),
    )
