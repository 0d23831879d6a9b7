"""`WillItFit` on Trainers that are not ours: what is said, and once the number itself, against a run of the script."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from workbench import WillItFit, apply
from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.fit import will_it_fit
from workbench.fit.any_training import longest_first
from workbench.fit.card import Card
from workbench.fit.edit import edits_of
from workbench.fit.inside import Run
from workbench.fit.program import Program, try_out
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator.card import with_memory
from workbench.techniques import ChunkedCrossEntropy, GradientAccumulation, Lora, Optimizer

MIB = 2**20
SIZES = {"weights": 1000 * MIB, "trained": 1000 * MIB, "states": 2000 * MIB, "peak": 17000 * MIB}


def trainer_of(folder, kind=Trainer, **others):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_layer=1, n_embd=16, n_head=2, n_positions=16))
    ids = [[1] * 16] * 4
    told = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none", **others}
    args = TrainingArguments(str(folder), save_strategy="no", disable_tqdm=True, **told)
    return kind(model=model, args=args, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))


@pytest.fixture
def card(monkeypatch):
    """A card that answers at once, and what was sent to it: with the second set of changes there is room."""
    payloads = []

    def call_on(card, function, gpu, payload, *changes, **_):
        payloads.append(payload)
        facts = {"rows": 2, "tokens": 16}
        reserved = 10000 if len(payloads) == 3 else 17500
        return {"reserved": reserved * MIB, "sizes": SIZES, "facts": facts}

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
    for words in (
        "not measured",
        "2 × 16 tokens, the longest rows",
        "not counted: evaluation",
        "13.7 GiB  activations, logits and gradients",
    ):
        assert words in lines[0]


def test_a_training_that_does_not_fit_is_not_begun(card, tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.add_callback(WillItFit(trainer, gpu="t4", stop=True, say=lambda _: None))
    with pytest.raises(ConfigurationError, match="needs 17.6 GiB of 14.6 GiB. .*workbench plan --gpu t4") as refusal:
        trainer.train()
    assert "makes it 10.3 GiB, emulated too (loss exact)" in str(refusal.value)
    assert trainer.state.global_step == 0
    assert len(card) == 3


def test_changes_are_named_as_a_script_has_them():
    """In the words of a plan, whose script is known."""
    arguments = vars(TrainingArguments("out", per_device_train_batch_size=4, use_cpu=True))
    changes = [GradientAccumulation(steps=2), ChunkedCrossEntropy(), Lora(rank=2)]
    edits = edits_of(changes, {"kind": "trainer", "arguments": arguments})
    assert [str(edit) for edit in edits] == [
        "TrainingArguments(…, gradient_accumulation_steps=2, per_device_train_batch_size=2)",
        "Trainer(model=apply(model, Lora(rank=2)), …)",
        "apply(Trainer(…), ChunkedCrossEntropy())",
    ]


def test_on_a_card_in_software_nothing_is_said_twice(card, tmp_path, monkeypatch):
    monkeypatch.setenv("EMULATED_CARD", "t4")
    lines = []
    trainer = trainer_of(tmp_path)
    trainer.add_callback(WillItFit(trainer, gpu="t4", stop=True, say=lines.append))
    trainer.train()
    assert lines == ["WillItFit: this card is an emulated t4 already; the report at the end says what is needed."]
    assert card == []


def test_a_module_beside_the_script_is_sent_by_its_name(tmp_path, monkeypatch):
    """And not what is in it, which may be anything."""
    tmp_path.joinpath("beside.py").write_text("import threading\nhere = threading.local()\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside

    trainer = trainer_of(tmp_path)
    trainer.data_collator = lambda rows: beside.here
    _, _, _, content = will_it_fit.pack_trainer(trainer, [], None)[0]
    assert b"beside" in content


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
    need = WillItFit(trainer_of(tmp_path), gpu="t4").predict()
    measured = need.need_bytes
    assert need.compare(measured, True).endswith("off by +0.0%")
    assert need.compare(measured * 2, True).endswith("off by -50.0%")
    assert "for the longest batch, which did not come" in need.compare(measured, False)


def test_a_second_training_is_compared_with_its_own_batches(card, tmp_path, monkeypatch):
    """Batches of a training that failed do not make a smaller one of the next training look as large."""
    trainer = trainer_of(tmp_path)
    callback = WillItFit(trainer, gpu="a100-40gb", say=lambda _: None)
    need = callback.predict()
    monkeypatch.setattr(callback, "predict", lambda: need)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    callback.is_here = True
    for rows in (2, 1):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
        trainer.model(torch.ones(rows, 16, dtype=torch.long))
        assert callback.facts["rows"] == rows


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


def test_batches_that_are_dealt_out_by_cost_are_left_to_the_emulated_card(card, tmp_path):
    trainer = trainer_of(tmp_path, train_sampling_strategy="batch_rebalance", gradient_accumulation_steps=2)
    with pytest.raises(ConfigurationError, match="unequal numbers of rows.*workbench emulate --gpu t4"):
        WillItFit(trainer, gpu="t4").predict()
    assert card == []


@pytest.mark.parametrize("strategy", ["random", "batch_rebalance"])
def test_a_program_whose_batches_are_dealt_out_by_cost_keeps_them(strategy, tmp_path):
    trainer = trainer_of(tmp_path, train_sampling_strategy=strategy, gradient_accumulation_steps=2)
    job = {"padding": "PADDING", "steps": 3, "life": False}
    Run(job).on_train(trainer)
    assert ("_get_train_sampler" in vars(trainer)) is (strategy == "random")


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
    args = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=1)
    rows = [{"input_ids": [0] * length} for length in (1, 9, 2, 8)]
    assert longest_first(SimpleNamespace(args=args, train_dataset=rows), 3) == ([1, 3, 1, 3, 1, 3, 2, 0], 9)


@pytest.mark.usefixtures("emulator")
def test_it_says_what_the_script_of_the_page_takes(tmp_path, monkeypatch):
    """To the byte, against the program itself on the emulated card."""
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
    trial = try_out(Program.parse(["python", "train.py"]), Card(gpu("t4")), steps=3, time_limit_s=100)
    assert said.reserved_bytes == trial.reserved_bytes
    assert sum(said.parts.values()) == said.need_bytes
    assert said.sizes == trial.facts["sizes"]
    assert said.facts == {"rows": 2, "tokens": 1024, "longest_row": 1024}


@pytest.mark.usefixtures("emulator")
def test_what_finds_no_room_is_what_a_larger_card_of_its_kind_says_and_so_is_the_cure(tmp_path):
    """A training that found no room leaves nothing behind that would be counted in the next one."""
    needs = []
    for memory in (2**30, 2**34):
        callback = WillItFit(large_trainer(tmp_path), gpu="t4")
        callback.gpu = with_memory(callback.gpu, memory)
        needs.append(callback.predict())
    small, large = needs
    assert (small.fits, large.fits) == (False, True)
    assert small.reserved_bytes == large.reserved_bytes
    changed = WillItFit(apply(large_trainer(tmp_path), ChunkedCrossEntropy()), gpu="t4").predict()
    said = f"apply(Trainer(…), ChunkedCrossEntropy()) makes it {format_bytes(changed.need_bytes)}, emulated too"
    assert small.cure.startswith(said)


class Boundless(GPT2LMHeadModel):
    def forward(self, input_ids=None, **others):
        torch.empty(2**44, dtype=torch.uint8, device=input_ids.device)
        return super().forward(input_ids=input_ids, **others)


@pytest.mark.usefixtures("emulator")
def test_what_no_card_has_room_for_is_said_in_the_words_of_a_trainer(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.model.__class__ = Boundless
    with pytest.raises(ConfigurationError, match="this Trainer needs more than 8192 GiB.*Lower per_device_train"):
        WillItFit(trainer, gpu="t4").predict()


def large_trainer(folder):
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2))
    ids = [[1] * 256] * 32
    told = {"max_steps": 1, "per_device_train_batch_size": 8, "use_cpu": True, "report_to": "none"}
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    return Trainer(model=model, args=TrainingArguments(str(folder), save_strategy="no", **told), train_dataset=data)


REAL = """
import os
os.environ.pop("EMULATED_CARD")  # from here on it is a card as any
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from workbench import WillItFit

rows = [[1] * 256] * 32
data = Dataset.from_dict({"input_ids": rows, "labels": rows})

model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2))
args = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=4, report_to="none", save_strategy="no")
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.add_callback(WillItFit(trainer))
trainer.train()
"""


@pytest.mark.usefixtures("emulator")
def test_on_a_card_that_looks_real_it_says_how_far_it_was_off(tmp_path):
    tmp_path.joinpath("train.py").write_text(REAL)
    words = [sys.executable, "-m", "workbench", "emulate", "--gpu", "t4", "--", sys.executable, "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "WillItFit: it fits. This training needs" in done.stdout
    (off,) = re.findall(r"WillItFit: measured .*; predicted .*, off by ([+-]\d+\.\d)%", done.stdout)
    assert abs(float(off)) < 1
