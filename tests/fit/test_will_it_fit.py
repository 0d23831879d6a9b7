"""`WillItFit` on Trainers that are not ours: what is said, and once the number itself, against a run of the script."""

import re
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from workbench import WillItFit, apply
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.fit import will_it_fit
from workbench.fit.inside import longest_first
from workbench.fit.program import Program, try_out
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import place
from workbench.techniques import Optimizer

MIB = 2**20
SIZES = {
    "weights": 1000 * MIB,
    "gradients": 1000 * MIB,
    "optimizer_states": 2000 * MIB,
    "activations": 9000 * MIB,
    "logits_and_loss": 4000 * MIB,
    "temporaries": 0,
    "unattributed": 0,
}


def trainer_of(folder, kind=Trainer, **others):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_layer=1, n_embd=16, n_head=2, n_positions=16))
    ids = [[1] * 16] * 4
    told = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none", **others}
    args = TrainingArguments(str(folder), save_strategy="no", disable_tqdm=True, **told)
    return kind(model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))


@pytest.fixture
def card(monkeypatch):
    """A card that answers at once, and what was sent to it."""
    payloads = []

    def call_on(card, function, *args, **_):
        payloads.append(args[1])
        seen = {"rows": 2, "tokens": 16}
        return {"peak_allocated_bytes": 17000 * MIB, "peak_reserved_bytes": 17500 * MIB, "by_category": {**SIZES},
                "states": 2000 * MIB, "seen": seen}  # fmt: skip

    monkeypatch.setattr(will_it_fit, "call_on", call_on)
    return payloads


def test_it_is_said_before_the_first_forward_pass(card, tmp_path):
    lines = []
    trainer = trainer_of(tmp_path)
    trainer.add_callback(WillItFit(trainer, gpu="a100-40gb", say=lines.append))
    trainer.model.register_forward_pre_hook(lambda *_: lines.append("forward"))
    trainer.train()
    assert lines[0].startswith("WillItFit: it fits. This training needs 17.6 GiB of")
    assert lines[1:] == ["forward"]
    for words in ("not measured", "2 × 16 tokens, the longest rows", "not counted: evaluation", "8.8 GiB  activations"):
        assert words in lines[0]


def test_a_training_that_does_not_fit_is_not_begun(card, tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.add_callback(WillItFit(trainer, gpu="t4", stop=True, say=lambda _: None))
    cure = "needs 17.6 GiB of 14.6 GiB. By an estimate .* makes it about .*workbench plan --gpu t4"
    with pytest.raises(ConfigurationError, match=cure):
        trainer.train()
    assert trainer.state.global_step == 0


def test_where_nobody_can_say_training_goes_on(card, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise UnavailableError("emulator: needs Linux.")

    monkeypatch.setattr(will_it_fit, "call_on", refuse)
    lines = []
    trainer = trainer_of(tmp_path)
    trainer.add_callback(WillItFit(trainer, gpu="t4", stop=True, say=lines.append))
    trainer.train()
    assert lines == ["WillItFit: it cannot be said whether this fits. emulator: needs Linux."]
    assert trainer.state.global_step == 1


def test_what_is_measured_is_compared_with_a_batch_as_large(card, tmp_path):
    callback = WillItFit(trainer_of(tmp_path), gpu="t4")
    callback.need = callback.predict()
    measured = callback.need.need_bytes
    assert callback.compared(measured, True).endswith("off by +0.0%")
    assert callback.compared(measured * 2, True).endswith("off by -50.0%")
    assert "for the longest batch, which did not come" in callback.compared(measured, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda trainer: vars(trainer.args).update(deepspeed={"zero_optimization": {}}), "uses DeepSpeed"),
        (lambda trainer: vars(trainer.args).update(fsdp=["full_shard"]), "uses FSDP"),
        (lambda trainer: vars(trainer.args).update(_n_gpu=2), "uses 2 GPUs by DataParallel"),
    ],
)
def test_several_processes_or_cards_are_refused_by_name(change, words, tmp_path):
    trainer = trainer_of(tmp_path)
    change(trainer)
    with pytest.raises(ConfigurationError, match=words):
        WillItFit(trainer, gpu="t4")


def test_what_is_no_trainer_or_has_no_card_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="uses no CUDA card. Name one"):
        WillItFit(trainer_of(tmp_path))
    with pytest.raises(ConfigurationError, match="it takes a transformers Trainer"):
        WillItFit(torch.nn.Linear(1, 1), gpu="t4")


class Quantized(torch.nn.Parameter):
    """More than its shape."""


def test_a_parameter_that_is_more_than_its_shape_is_refused_by_name(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.model.lm_head.weight = Quantized(torch.zeros(97, 16))
    with pytest.raises(ConfigurationError, match="kind Quantized cannot be predicted"):
        WillItFit(trainer, gpu="t4").predict()


def test_data_that_can_be_read_once_is_left_to_the_training(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train_dataset = iter([{"input_ids": [1]}])
    with pytest.raises(ConfigurationError, match="can be read once"):
        WillItFit(trainer, gpu="t4").predict()


def test_a_trainer_is_sent_without_values_as_accelerate_found_it(card, tmp_path, monkeypatch):
    """Tied weights stay tied, classes stay themselves, autocast is not wrapped twice; the values stay here."""

    class Own(Trainer):
        pass

    trainer = apply(trainer_of(tmp_path, Own, bf16=True), Optimizer("adamw_loop"))
    trainer.add_callback(WillItFit(trainer, gpu="a100-40gb", say=lambda _: None))
    trainer.train()
    path, shapes, _, content = card[0]
    assert "forward" in vars(trainer.model)  # accelerate's, here
    assert path == sys.path
    assert len(shapes) == len({*trainer.model.parameters()}) + len([*trainer.model.buffers()])
    assert len(content) < 200_000
    plain = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *args, device, **kwargs: plain(*args, **kwargs))
    there = will_it_fit.ShapesUnpickler(content, shapes, "the arguments").load()
    twin = there["trainer"]
    assert type(twin).__name__ == "Own"
    assert twin.optimizer_cls_and_kwargs[0] is torch.optim.AdamW
    assert twin.model.lm_head.weight is twin.model.transformer.wte.weight
    assert not {"forward", "_is_accelerate_prepared"} & vars(twin.model).keys()
    assert not set(will_it_fit.REMADE) & vars(twin).keys()


def test_each_of_the_first_steps_has_the_longest_rows():
    """A peak with the optimizer's states is that of the second step: one row that is long must be in it, too."""
    assert longest_first([1, 9, 2, 8], 2, 3) == [1, 3, 1, 3, 1, 3, 2, 0]


@pytest.mark.dear
def test_it_says_what_the_script_of_the_page_takes(tmp_path, monkeypatch):
    """To the byte, against the program itself on the emulated card."""
    if not place.is_set_up():
        pytest.skip("the emulated GPU is not set up")
    page = Path(__file__).parents[2].joinpath("docs", "your_script.md").read_text(encoding="utf-8")
    (source,) = re.findall(
        r"```python\n(import torch\nfrom transformers import GPT2LMHeadModel.*?)```", page, re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2)).save_pretrained("gpt2")
    Path("train.py").write_text(source)
    names = {}
    exec(source.replace("trainer.train()", ""), names)
    said = WillItFit(names["trainer"], gpu="t4").predict()
    trial = try_out(Program.parse(["python", "train.py"]), gpu("t4"), steps=3, time_limit_s=100)
    assert said.peak_reserved_bytes == trial.reserved_bytes
    assert sum(said.by_category.values()) == said.peak_allocated_bytes
    assert said.seen == {"rows": 2, "tokens": 1024, "longest_row": 1024}
