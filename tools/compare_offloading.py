"""What waits on the host, by the workbench and by libraries, on an emulated GPU: data/reference/offloading.md.

    python tools/compare_offloading.py

GPT-2 124M with new weights, 8 × 1,024 tokens a step, three steps of the Trainer in fp32 with AdamW. Each program is
itself, in a process of its own under the emulator. TRL is asked too, where it is installed.
"""

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workbench.base.categories import format_bytes

GPU, BATCH, LENGTH, STEPS = "h100", 8, 1024, 3
PAGE = Path(__file__).parents[1] / "data" / "reference" / "offloading.md"
TRL = "TRL's `OffloadActivations`"
LEAN = "gradient_checkpointing", "chunked_cross_entropy"
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


def train(words: tuple[str, ...]) -> dict[str, int]:
    """In a process under the emulator."""
    import torch
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from workbench.models.family import family_of
    from workbench.techniques import parse_technique

    techniques = [parse_technique(each) for each in words if each.partition(" ")[0] not in ("trl", "torchao")]
    model: Any = GPT2LMHeadModel(GPT2Config(use_cache=False))
    for technique in techniques:
        model = call(model) if (call := technique.model(family_of(model.config))) else model
    rows = Dataset.from_dict(dict.fromkeys(("input_ids", "labels"), [[1] * LENGTH] * BATCH * STEPS))
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        arguments = TrainingArguments(folder, per_device_train_batch_size=BATCH, num_train_epochs=1, **quiet)
        trainer: Any = Trainer(model, arguments, train_dataset=rows)
        for technique in techniques:
            if call := technique.trainer():
                call(trainer)
        around = libraries(trainer, words)
        step = trainer.training_step

        def inside(*args: Any, **kwargs: Any) -> Any:
            with around:
                return step(*args, **kwargs)

        trainer.training_step = inside
        trainer.train()
    optimizer = trainer.optimizer.optimizer
    parts = vars(optimizer).get("optim_dict", {}).values()
    states = [t for held in parts for state in held.state.values() for t in state.values()]
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    return {"device": torch.cuda.max_memory_allocated(), "host": pinned + sum(t.nbytes for t in states)}


def libraries(trainer: Any, words: tuple[str, ...]) -> Any:
    """What a library does to the trainer, and what it wants around each step."""
    import torch

    if "trl" in words:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        return get_act_offloading_ctx_manager(trainer.model)
    if words[-1:] in (("torchao",), ("torchao gradients",)):
        from torchao.optim import CPUOffloadOptimizer

        options = trainer.get_optimizer_cls_and_kwargs(trainer.args)[1]
        options |= {"optimizer_class": torch.optim.AdamW, "offload_gradients": "gradients" in words[-1]}
        trainer.optimizer_cls_and_kwargs = CPUOffloadOptimizer, options
    return nullcontext()


def emulated(words: tuple[str, ...]) -> str:
    """The row's two numbers."""
    with tempfile.NamedTemporaryFile() as file:
        mine = [sys.executable, __file__, file.name, *words]
        subprocess.run([sys.executable, "-m", "workbench", "emulate", "--gpu", GPU, "--", *mine], check=True)
        found = json.loads(Path(file.name).read_text())
    return f"{format_bytes(found['device'])} | {format_bytes(found['host']) if found['host'] > 2**20 else '–'}"


def main() -> None:
    import torchao
    import transformers

    versions = f"transformers {transformers.__version__}, torchao {torchao.__version__}"
    if find_spec("trl"):
        import trl

        versions += f", TRL {trl.__version__}"
    programs = {name: words for name, words in PROGRAMS.items() if words != ("trl",) or find_spec("trl")}
    rows = (f"| {name} | {' | ' if name.startswith('**') else emulated(words)} |" for name, words in programs.items())
    PAGE.write_text(HEAD.format(versions=versions) + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(train(tuple(sys.argv[2:]))))
    else:
        main()
