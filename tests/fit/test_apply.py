"""`apply` on Trainers and loops that are not ours, on the CPU: the same losses, and what is refused."""

import copy
import re
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, Trainer
from transformers import TrainingArguments as Arguments

from workbench import apply
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.fit.places import site_of
from workbench.models.family import family_of
from workbench.techniques import (
    REGISTRY,
    ActivationOffloading,
    Allocator,
    Attention,
    ChunkedCrossEntropy,
    FusedGelu,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Optimizer,
    OptimizerOffloading,
    PureBf16,
    SelectiveCheckpointing,
    SequenceLength,
    StepInBackward,
    TorchCompile,
)

T, V = 16, 97
EXACT = {
    "checkpointing and a loss in chunks": [GradientCheckpointing(), ChunkedCrossEntropy(chunk=7)],
    "selective checkpointing": [SelectiveCheckpointing()],
    "offloading": [ActivationOffloading(to="disk", minimum_bytes=0), OptimizerOffloading(to="disk")],
    "fused": [FusedGelu()],
    "eager attention": [Attention("eager")],
    "another loop": [Optimizer("adamw_loop")],
}


def gpt2():
    torch.manual_seed(0)
    rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_layer=2, n_embd=16, n_head=2, n_positions=T, **rates))


def rows(count=12):
    torch.manual_seed(1)
    ids = torch.randint(V, (count, T)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trainer_of(model, folder, kind=Trainer, arguments=(), **others):
    told = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "use_cpu": True}
    told |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "max_grad_norm": 0.0}
    args = Arguments(str(folder), **{**told, **dict(arguments)})
    return kind(model=model, args=args, train_dataset=rows(), eval_dataset=rows(4), **others)


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def batch():
    ids = torch.tensor(rows(4)["input_ids"])
    return {"input_ids": ids, "labels": ids}


def losses_of_a_loop(model, optimizer):
    model.train()
    history = []
    for _ in range(3):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory):
    return losses(trainer_of(gpt2(), tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("techniques", EXACT.values(), ids=EXACT)
def test_a_trainer_has_the_same_losses(techniques, plain_losses, tmp_path):
    trainer = trainer_of(gpt2(), tmp_path)
    assert apply(trainer, *techniques) is trainer
    assert losses(trainer) == pytest.approx(plain_losses, rel=1e-5)


def test_it_does_something(tmp_path, monkeypatch):
    """Each shows by itself that it is there: what it replaces is not called, or what it calls is."""
    trainer = apply(trainer_of(gpt2(), tmp_path), GradientCheckpointing(), ChunkedCrossEntropy(chunk=7), FusedGelu())
    assert [block.gradient_checkpointing for block in trainer.model.transformer.h] == [True, True]
    assert trainer.model.config.activation_function == "gelu_pytorch_tanh"
    shapes = []
    whole = torch.nn.functional.cross_entropy
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda x, *a, **k: (shapes.append(len(x)), whole(x, *a, **k))[1]
    )
    trainer.train()
    assert max(shapes) == 7


def test_who_asks_for_logits_gets_them(tmp_path):
    shapes = []
    seen = {"compute_metrics": lambda prediction: shapes.append(prediction.predictions.shape) or {}}
    trainer = apply(trainer_of(gpt2(), tmp_path, **seen), ChunkedCrossEntropy())
    trainer.evaluate()
    assert shapes == [(4, T, V)]
    assert trainer.predict(rows(4)).predictions.shape == (4, T, V)


@pytest.mark.parametrize(
    "techniques",
    [
        [GradientCheckpointing(), ChunkedCrossEntropy(chunk=7), FusedGelu()],
        [ActivationOffloading(to="disk", minimum_bytes=0), OptimizerOffloading(to="disk")],
        [StepInBackward(max_grad_norm=0.0)],
        [Optimizer("adamw_loop")],
    ],
    ids=lambda techniques: techniques[-1].name,
)
def test_a_loop_has_the_same_losses(techniques):
    model = gpt2()
    plain = losses_of_a_loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = apply((model, optimizer), *techniques)
    assert losses_of_a_loop(model, optimizer) == pytest.approx(plain, rel=1e-5)


def test_an_optimizer_that_the_trainer_has_a_name_for():
    model = gpt2()
    _, optimizer = apply((model, torch.optim.AdamW(model.parameters(), lr=1e-2)), Optimizer("adafactor"))
    assert type(optimizer).__name__ == "Adafactor"
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_a_copy_of_a_model_computes_with_its_own_weights():
    model = apply(gpt2(), ChunkedCrossEntropy())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.transformer.wte.weight.zero_()
    assert twin.train()(**batch()).loss.item() != pytest.approx(model.train()(**batch()).loss.item())


def test_logits_of_a_loop_are_whole_or_not_there():
    model = apply(gpt2(), ChunkedCrossEntropy())
    assert model.train()(**batch()).logits is None
    assert model.eval()(**batch()).logits.shape == (4, T, V)
    with pytest.raises(ConfigurationError, match="called without labels"):
        model.train()(batch()["input_ids"])


def test_an_adapter_goes_on_a_model(tmp_path):
    model = apply(gpt2(), Lora(rank=2), GradientCheckpointing())
    assert model.print_trainable_parameters is not None
    assert len(losses(trainer_of(model, tmp_path))) == 3
    with pytest.raises(ConfigurationError, match=r"lora replaces the model.*model = apply\(model, Lora"):
        apply(trainer_of(gpt2(), tmp_path), Lora())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigurationError, match="make the optimizer afterwards"):
        apply((gpt2(), optimizer), Lora())


ONLY_ARGUMENTS = {
    GradientAccumulation(steps=2): "TrainingArguments(gradient_accumulation_steps=2, per_device_train_batch_size=2)",
    MixedPrecision("bf16"): "TrainingArguments(bf16=True)",
    Optimizer("adafactor"): "TrainingArguments(optim='adafactor')",
    PureBf16(): "from_pretrained(…, dtype='bfloat16')",
    SequenceLength(tokens=8): "max_length=8",
}


@pytest.mark.parametrize("technique", ONLY_ARGUMENTS, ids=lambda technique: technique.name)
def test_what_is_only_an_argument_is_refused_with_it(technique, tmp_path):
    words = sorted(re.split(r"[(), ]+", ONLY_ARGUMENTS[technique]))
    with pytest.raises(ConfigurationError, match=f"{technique.name} can only be set as an argument") as refusal:
        apply(trainer_of(gpt2(), tmp_path), technique)
    assert set(words) <= set(re.split(r"[(), ]+", str(refusal.value).rstrip(".")))


def sgd():
    return torch.optim.SGD(gpt2().parameters())


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        output = model(**inputs)
        return (output.logits.mean(), output) if return_outputs else output.logits.mean()


REFUSED = {
    "no Trainer": (lambda _: apply(torch.nn.Linear(1, 1), FusedGelu()), "got a Linear"),
    "no technique": (lambda _: apply(gpt2(), "lora"), "'lora' is not a technique"),
    "none": (lambda _: apply(gpt2()), "name at least one"),
    "twice": (lambda _: apply(gpt2(), Lora(), Lora(rank=2)), "lora is given twice"),
    "exclusive": (lambda f: apply(trainer_of(gpt2(), f), GradientCheckpointing(), SelectiveCheckpointing()), "forbids"),
    "there already": (
        lambda f: apply(trainer_of(gpt2(), f, arguments={"gradient_accumulation_steps": 2}), StepInBackward()),
        "gradient_accumulation brings",
    ),
    "another model": (
        lambda _: apply(
            BertForSequenceClassification(BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2)),
            GradientCheckpointing(),
        ),
        "a BertForSequenceClassification is no causal language model",
    ),
    "another loss": (
        lambda f: apply(trainer_of(gpt2(), f, OwnLoss), ChunkedCrossEntropy()),
        r"compute_loss\(\) of OwnL",
    ),
    "smoothing": (
        lambda f: apply(trainer_of(gpt2(), f, arguments={"label_smoothing_factor": 0.1}), ChunkedCrossEntropy()),
        "label smoothing makes the loss",
    ),
    "a function": (
        lambda f: apply(trainer_of(gpt2(), f, compute_loss_func=lambda *_, **__: 0), ChunkedCrossEntropy()),
        "compute_loss_func makes the loss",
    ),
    "an optimizer": (
        lambda f: apply(
            trainer_of(gpt2(), f, optimizers=(torch.optim.SGD(gpt2().parameters()), None)), StepInBackward()
        ),
        "takes the optimizer that it has already",
    ),
    "made later": (lambda f: apply(trainer_of(None, f, model_init=gpt2), FusedGelu()), "model_init"),
    "checkpoints": (
        lambda f: apply(trainer_of(gpt2(), f, arguments={"save_strategy": "steps"}), OptimizerOffloading("disk")),
        "save_strategy='no'",
    ),
    "an optimizer's, on a model": (lambda _: apply(gpt2(), StepInBackward()), "decides about the optimizer"),
    "not AdamW": (
        lambda _: apply((gpt2(), sgd()), OptimizerOffloading("disk")),
        "takes the place of torch.optim.AdamW, not of SGD",
    ),
    "not here": (lambda f: apply(trainer_of(gpt2(), f), Allocator()), "settings of PyTorch's allocator for CUDA"),
    "not this kind": (lambda f: apply(trainer_of(gpt2(), f), Optimizer("adamw_paged")), "no kernels for cpu"),
}


@pytest.mark.parametrize(("refused", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_suit_is_refused(refused, words, tmp_path):
    with pytest.raises((ConfigurationError, UnavailableError), match=words):
        refused(tmp_path)


def test_a_model_without_a_trainer_is_compiled_by_pytorch_itself(monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)  # any program: nothing is compiled here
    with pytest.raises(ConfigurationError, match=r"torch\.compile\(model\)"):
        apply(gpt2(), TorchCompile())


def test_the_page_has_every_technique_in_its_row():
    family = family_of(GPT2Config(n_layer=1))
    page = Path(__file__).parents[2].joinpath("docs", "your_script.md").read_text(encoding="utf-8")
    for name, kind in REGISTRY.items():
        rows_of_site = re.findall(rf"(?m)^\| {site_of(kind(), family)} \|.*$", page)
        assert f"`{name}`" in rows_of_site[0]
