"""Compare what the workbench and libraries let wait on the host, on an emulated GPU: data/reference/offloading.md.

    python tools/compare_offloading.py

GPT-2 124M with new weights, 8 × 1,024 tokens a step, three steps of the Trainer in fp32 with AdamW. Each program is
itself, in a process of its own under the emulator. TRL is asked too, where it is installed.
"""

import json
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workbench.base.categories import format_bytes
from workbench.base.paths import DATA, write_whole
from workbench.gpus.catalogue import MIB

GPU = "h100"
BATCH = 8
LENGTH = 1024
STEPS = 3
PAGE = DATA / "reference" / "offloading.md"
TRL = "TRL's `OffloadActivations`"
LEAN = ("gradient_checkpointing", "chunked_cross_entropy")
LIBRARIES = ("trl", "torchao", "torchao gradients")
PROGRAMS: dict[str, tuple[str, ...]] = {  # techniques of the workbench, or a library's own
    "nothing waits": (),
    "**activations**": (),
    "`activation_offloading`": ("activation_offloading",),
    TRL: ("trl",),
    "`gradient_checkpointing`": ("gradient_checkpointing",),
    "the same, `offload:true` (transformers' own)": ("gradient_checkpointing=offload:true",),
    "`gradient_checkpointing`, `activation_offloading`": ("gradient_checkpointing", "activation_offloading"),
    "**the optimizer's states**, all with `gradient_checkpointing` and `chunked_cross_entropy`": (),
    "none waits": LEAN,
    "`optimizer_offloading`": (*LEAN, "optimizer_offloading"),
    "torchao's `CPUOffloadOptimizer`": (*LEAN, "torchao"),
    "the same, `offload_gradients`, which cannot be clipped": (*LEAN, "torchao gradients"),
}
HEAD = f"""# What waits on the host

GPT-2 124M, {BATCH} × {LENGTH:,} tokens a step in fp32 with AdamW, by an emulated H100 (`emulated:{GPU}`): nothing here
was measured on a GPU, and nothing is said of speed. *Device*: the peak that PyTorch's allocator gives out. *Host*: the
peak of its page-locked memory, which it hands out in powers of two, and states of an optimizer beside it. Written by
`python tools/compare_offloading.py`; {{versions}}.

| | device | host |
|---|---|---|
"""


def main() -> None:
    libraries = {"transformers": "transformers", "torchao": "torchao"}
    programs = dict(PROGRAMS)
    if find_spec("trl"):
        libraries["trl"] = "TRL"
    else:
        del programs[TRL]
    versions = ", ".join(f"{title} {version(package)}" for package, title in libraries.items())
    page = HEAD.format(versions=versions)
    for title, program in programs.items():
        is_heading = title.startswith("**")
        page += f"| {title} | {' | ' if is_heading else measure(program)} |\n"
    write_whole(PAGE, page)


def measure(program: tuple[str, ...]) -> str:
    """Return the row's two numbers, which this file, run by the emulator, measures."""
    with tempfile.NamedTemporaryFile() as file:
        emulate = [sys.executable, "-m", "workbench", "emulate", "--gpu", GPU, "--"]
        command = [sys.executable, __file__, file.name, *program]
        subprocess.run([*emulate, *command], check=True)
        peaks = json.loads(Path(file.name).read_text())
    host = format_bytes(peaks["host"]) if peaks["host"] > MIB else "–"
    return f"{format_bytes(peaks['device'])} | {host}"


# ---- in a process under the emulator ----


def train(program: tuple[str, ...]) -> dict[str, int]:
    """Train, and return the peaks on the device and on the host, in bytes."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from workbench.models.family import family_of
    from workbench.techniques import parse_technique

    techniques = [parse_technique(part) for part in program if part not in LIBRARIES]
    model: Any = GPT2LMHeadModel(GPT2Config(use_cache=False))
    for technique in techniques:
        change_model = technique.model(family_of(model.config))
        if change_model:
            model = change_model(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(model, folder)
        for technique in techniques:
            change_trainer = technique.trainer()
            if change_trainer:
                change_trainer(trainer)
        surround_steps(trainer, with_library(trainer, program))
        trainer.train()
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    states = bytes_of_states(trainer.optimizer.optimizer)
    return {"device": torch.cuda.max_memory_allocated(), "host": pinned + states}


def trainer_of(model: Any, folder: str) -> Any:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows = [[1] * LENGTH] * BATCH * STEPS
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(model, arguments, train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}))


def with_library(trainer: Any, program: tuple[str, ...]) -> AbstractContextManager[Any]:
    """Change the trainer as a library asks, and return the context that it wants around each step."""
    import torch

    if "trl" in program:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        return get_act_offloading_ctx_manager(trainer.model)
    if "torchao" in program or "torchao gradients" in program:
        from torchao.optim import CPUOffloadOptimizer

        options = trainer.get_optimizer_cls_and_kwargs(trainer.args)[1]
        options["optimizer_class"] = torch.optim.AdamW
        options["offload_gradients"] = "torchao gradients" in program
        trainer.optimizer_cls_and_kwargs = (CPUOffloadOptimizer, options)
    return nullcontext()


def surround_steps(trainer: Any, surroundings: AbstractContextManager[Any]) -> None:
    step = trainer.training_step

    def step_in_context(*args: Any, **kwargs: Any) -> Any:
        with surroundings:
            return step(*args, **kwargs)

    trainer.training_step = step_in_context


def bytes_of_states(optimizer: Any) -> int:
    """Return the bytes of states that are on the host and not pinned.

    They are torchao's, whose optimizer has one of PyTorch's for each parameter.
    """
    total = 0
    for of_parameter in vars(optimizer).get("optim_dict", {}).values():
        for state in of_parameter.state.values():
            total += sum(tensor.nbytes for tensor in state.values())
    return total


if __name__ == "__main__":
    if sys.argv[1:]:
        file, *program = sys.argv[1:]
        Path(file).write_text(json.dumps(train(tuple(program))))
    else:
        main()
