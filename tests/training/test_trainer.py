from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset

from workbench.base.categories import Phase
from workbench.journal.record import Status
from workbench.models.family import family_of
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.techniques import GradientAccumulation, Technique
from workbench.techniques.base import Call, Stage
from workbench.training.arguments import build_training_arguments, complete_arguments
from workbench.training.run import run
from workbench.training.trainer import collate

CALLS: list[tuple[str, str]] = []  # (seam, technique), as they come


@dataclass(frozen=True)
class Probe(Technique):
    """Overrides every seam, notes that it was called, and does through it what a technique would do."""

    name: ClassVar[str] = "probe"
    stage: ClassVar[Stage] = Stage.ARCHITECTURE
    optimizer_class: ClassVar[Any] = torch.optim.SGD

    def note(self, seam: str) -> None:
        CALLS.append((seam, self.name))

    @contextmanager
    def run_context(self):
        self.note("run_context")
        yield
        self.note("the run context ends")

    def shape(self, shape):
        self.note("shape")
        return replace(shape, steps=shape.steps)

    def examples(self):
        self.note("examples")
        return Call(see_the_text)

    def dataset(self):
        self.note("dataset")
        return Call(sevens)

    def collator(self):
        self.note("collator")
        return Call(noting_collator, {"name": self.name})

    def model_arguments(self, family):
        self.note("model_arguments")
        assert family.model_type == "gpt2"
        return {"dtype": "bfloat16"}

    def model(self, family):
        self.note("model")
        return Call(train_the_last_norm)

    def check_model(self, model):
        self.note("check_model")
        assert not model.transformer.wte.weight.requires_grad

    def training_arguments(self, arguments):
        self.note("training_arguments")
        return {**arguments, "max_grad_norm": 0.5}

    def trainer(self):
        self.note("trainer")
        return Call(change_trainer, {"name": self.name}, measured={"optimizer_class": self.optimizer_class})


def see_the_text(text, tokenizer, length, batch, seed):
    assert tokenizer(text[:1000], verbose=False)["input_ids"][:length]
    assert (length, batch, seed) == (32, 8, 0)
    ids = tokenizer(text, verbose=False)["input_ids"]
    return Dataset.from_dict({"input_ids": [ids[i : i + length] for i in range(0, 64 * length, length)]})


def sevens(dataset):
    return dataset.map(lambda row: {"input_ids": [7] * len(row["input_ids"])})


def noting_collator(collator, rows, name):
    CALLS.append(("a batch is collated", name))
    return collator(rows)


def train_the_last_norm(model):
    model.requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    return model


def change_trainer(trainer, name, optimizer_class=None):
    plain_loss, plain_context = trainer.compute_loss, trainer.compute_loss_context_manager

    def compute_loss(*args, **kwargs):
        CALLS.append(("a loss is computed", name))
        return plain_loss(*args, **kwargs)

    def context():
        CALLS.append(("the forward context begins", name))
        stack = plain_context()
        stack.callback(CALLS.append, ("the forward context ends", name))
        return stack

    trainer.compute_loss, trainer.compute_loss_context_manager = compute_loss, context
    assert trainer.args.max_grad_norm == 0.5
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    trainer.optimizer = trainer.optimizer or optimizer_class(trained, lr=trainer.args.learning_rate)


@dataclass(frozen=True)
class SecondProbe(Probe):
    """Acts later, although its name comes first."""

    name: ClassVar[str] = "a_second_probe"
    stage: ClassVar[Stage] = Stage.WRAP


SEAMS = [name for name, value in vars(Technique).items() if callable(value) and name in vars(Probe)]


@pytest.fixture(scope="module")
def probed(recipe, tmp_path_factory):
    """A run through every seam, with the calls it made."""
    asked = replace(recipe, steps=2) | Probe()
    CALLS.clear()
    record = run(asked, device="cpu", folder=tmp_path_factory.mktemp("probed"))
    return record, [seam for seam, _ in CALLS]


NO_SEAMS = (  # asked outside of a run
    "settings", "missing", "check_config", "variants", "stand_in", "allocator_settings", "environment", "apply_to",
    "replacing", "from_settings", "card", "switches", "change_loaded_model", "check_loss", "find_in",
)  # fmt: skip
ON_CONSTRUCTION = ("shape", "training_arguments")  # asked whenever a recipe is made, which a run does first
AT_THE_GATE = ("examples", "dataset", "collator")


def test_the_probe_overrides_every_seam():
    seams = [name for name in vars(Technique) if not name.startswith("_") and name not in NO_SEAMS]
    methods = [name for name in seams if callable(getattr(Technique, name, None))]
    assert methods == SEAMS
    assert len(SEAMS) == 10


def test_every_seam_is_called(probed):
    record, calls = probed
    assert record.status is Status.OK
    assert set(SEAMS) <= set(calls)


def test_the_context_around_the_run_is_the_first_to_begin_and_the_last_to_end(probed):
    during = [call for call in probed[1] if call not in (*ON_CONSTRUCTION, *AT_THE_GATE)]
    assert during[0] == "run_context"
    assert during[-1] == "the run context ends"


def test_a_seam_that_builds_something_is_called_once(probed):
    seams = "run_context", "dataset", "collator", "model_arguments", "model", "check_model", "trainer"
    assert {seam: probed[1].count(seam) for seam in seams} == dict.fromkeys(seams, 1)


def test_the_seams_are_called_in_the_order_in_which_they_are_declared(probed):
    """The last call of each counts. Those on construction are asked for again and again, and no call of them is the
    first."""
    calls = probed[1]
    once = [seam for seam in SEAMS if seam not in ON_CONSTRUCTION]
    when = {seam: len(calls) - 1 - calls[::-1].index(seam) for seam in once}
    assert sorted(when, key=when.get) == once


def test_the_loss_is_computed_inside_the_forward_context(probed):
    calls = [
        call
        for call in probed[1]
        if call in ("the forward context begins", "a loss is computed", "the forward context ends")
    ]
    assert len(calls) > 6
    assert calls == ["the forward context begins", "a loss is computed", "the forward context ends"] * (len(calls) // 3)


def test_what_the_seams_did_is_in_the_record(probed, fine_tuned, recipe):
    record, plain = probed[0], fine_tuned(recipe)
    assert record.dtype == "bfloat16"
    assert record.trainable_parameters == 2 * 64  # the last norm alone
    assert record.maximum_by_category["optimizer_states"] == 0  # SGD without momentum
    assert record.maximum_by_category["weights"] == plain.maximum_by_category["weights"] // 2
    assert record.losses[0] != pytest.approx(plain.losses[0], abs=1e-3)  # on sevens, not on Shakespeare


def test_two_techniques_are_applied_in_the_order_of_their_stages_whatever_their_names(recipe, tmp_path):
    asked = replace(recipe, steps=1) | SecondProbe() | Probe()
    CALLS.clear()
    run(asked, device="cpu", folder=tmp_path)
    for seam in ("dataset", "collator", "model_arguments", "model", "trainer"):
        assert [name for called, name in CALLS if called == seam] == ["probe", "a_second_probe"]
    # the technique applied last is the outermost
    assert [name for called, name in CALLS if called == "a loss is computed"][:2] == ["a_second_probe", "probe"]


def test_a_technique_that_overrides_nothing_changes_nothing(recipe, fine_tuned):
    @dataclass(frozen=True)
    class Nothing(Technique):
        name: ClassVar[str] = "nothing"
        stage: ClassVar[Stage] = Stage.WRAP

    plain, same = fine_tuned(recipe), fine_tuned(recipe | Nothing())
    assert same.losses == plain.losses
    assert same.peak_allocated_bytes == plain.peak_allocated_bytes
    assert same.by_category == plain.by_category


def test_collate_makes_a_batch_whose_labels_are_a_copy():
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}])
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["input_ids"].dtype == torch.int64
    batch["labels"][0, 0] = -100
    assert batch["input_ids"][0, 0] == 1


def test_the_recipes_dropout_holds_everywhere(recipe, subtests):
    source = locate("random:gpt2-tiny")
    for dropout in (0.0, 0.3):
        with subtests.test(dropout=dropout):
            config = load_config(source)
            model = load_model(source, config, **replace(recipe, dropout=dropout).model_arguments(family_of(config)))
            rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
            assert len(rates) > 4
            assert set(rates) == {dropout}


def test_without_a_dropout_in_the_recipe_the_models_own_stays(recipe):
    source = locate("random:gpt2-tiny")
    config = load_config(source)
    model = replace(recipe, dropout=None).prepare_model(load_model(source, config))
    assert model.transformer.drop.p == config.embd_pdrop
    assert model.transformer.h[0].attn.resid_dropout.p == config.resid_pdrop


def test_the_trainers_arguments(recipe, tmp_path):
    asked = recipe | GradientAccumulation(steps=4)
    arguments = build_training_arguments(complete_arguments(asked, 1e-3), "cpu", tmp_path)
    assert arguments.per_device_train_batch_size == 2
    assert arguments.gradient_accumulation_steps == 4
    assert arguments.max_steps == asked.steps
    assert arguments.learning_rate == 1e-3
    assert arguments.logging_nan_inf_filter is False  # or a diverged loss would be logged as zero
    assert arguments.save_strategy == "no"


def test_phases_are_measured_in_a_run(recipe, fine_tuned):
    record = fine_tuned(recipe)
    assert set(record.by_phase) == {str(phase) for phase in Phase}
    assert all(size > 0 for size in record.by_phase.values())
    assert record.by_phase[record.peak_phase] == max(record.by_phase.values()) == record.peak_allocated_bytes
