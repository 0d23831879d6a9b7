from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from workbench.measure.categories import Phase
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.records.record import Status
from workbench.run.run import run
from workbench.run.trainer import collate, prepare_model, training_arguments
from workbench.techniques import GradientAccumulation, Technique
from workbench.techniques.base import Arguments

CALLS: list[tuple[str, str]] = []  # (seam, technique), as they come


@dataclass(frozen=True)
class Probe(Technique):
    """Overrides every seam, notes that it was called, and does through it what a technique would do."""

    name: ClassVar[str] = "probe"
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

    def examples(self, text, seed):
        self.note("examples")
        assert text.tokenizer(text.text[:1000], verbose=False)["input_ids"][: text.sequence_length]
        assert (text.sequence_length, text.batch, seed) == (32, 8, 0)

    def dataset(self, dataset):
        self.note("dataset")
        return dataset.map(lambda row: {"input_ids": [7] * len(row["input_ids"])})

    def collator(self, collator):
        self.note("collator")

        def noted(rows):
            self.note("a batch is collated")
            return collator(rows)

        return noted

    def model_arguments(self, arguments: Arguments) -> Arguments:
        self.note("model_arguments")
        return {**arguments, "dtype": "bfloat16"}

    def model(self, model):
        self.note("model")
        model.requires_grad_(False)
        model.transformer.ln_f.requires_grad_(True)
        return model

    def training_arguments(self, arguments: Arguments) -> Arguments:
        self.note("training_arguments")
        return {**arguments, "max_grad_norm": 0.5}

    def optimizer(self, model, arguments):
        self.note("optimizer")
        assert arguments.max_grad_norm == 0.5
        return self.optimizer_class([p for p in model.parameters() if p.requires_grad], lr=arguments.learning_rate)

    def compute_loss(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        self.note("compute_loss")

        def noted(*args, **kwargs):
            self.note("a loss is computed")
            return compute_loss(*args, **kwargs)

        return noted

    @contextmanager
    def forward_context(self, model):
        self.note("forward_context")
        yield
        self.note("the forward context ends")


@dataclass(frozen=True)
class SecondProbe(Probe):
    name: ClassVar[str] = "second_probe"


SEAMS = [name for name, value in vars(Technique).items() if callable(value) and name in vars(Probe)]


@pytest.fixture(scope="module")
def probed(recipe, tmp_path_factory):
    """A run through every seam, with the calls it made."""
    asked = replace(recipe, steps=2) | Probe()
    CALLS.clear()
    record = run(asked, device="cpu", folder=tmp_path_factory.mktemp("probed"))
    return record, [seam for seam, _ in CALLS]


NO_SEAMS = ("settings", "missing", "variants", "stand_in", "allocator_settings", "script")  # asked outside of a run
ON_CONSTRUCTION = ("shape", "training_arguments")  # asked whenever a recipe is made, which a run does first


def test_the_probe_overrides_every_seam():
    seams = [name for name in vars(Technique) if not name.startswith("_") and name not in NO_SEAMS]
    methods = [name for name in seams if callable(getattr(Technique, name, None))]
    assert methods == SEAMS
    assert len(SEAMS) == 11


def test_every_seam_is_called(probed):
    record, calls = probed
    assert record.status is Status.OK
    assert set(SEAMS) <= set(calls)


def test_the_context_around_the_run_is_the_first_to_begin_and_the_last_to_end(probed):
    during = [call for call in probed[1] if call not in ON_CONSTRUCTION]
    assert during[0] == "run_context"
    assert during[-1] == "the run context ends"


@pytest.mark.parametrize(
    "seam",
    ["run_context", "examples", "dataset", "collator", "model_arguments", "model", "optimizer", "compute_loss"],
)
def test_a_seam_that_builds_something_is_called_once(probed, seam):
    assert probed[1].count(seam) == 1


def test_the_seams_are_called_in_the_order_in_which_they_are_declared(probed):
    """The first call of each counts; of the `training_arguments` the last, when the Trainer gets them. The shape is
    asked for again and again, and no call of it is the first."""
    calls = probed[1]
    when = {seam: calls.index(seam) for seam in SEAMS if seam != "shape"}
    when["training_arguments"] = len(calls) - 1 - calls[::-1].index("training_arguments")
    assert sorted(when, key=when.get) == [seam for seam in SEAMS if seam != "shape"]


def test_the_run_context_is_around_everything(probed):
    _, calls = probed
    before = calls.index("dataset")
    assert calls.index("run_context") < before
    assert calls[-1] == "the run context ends"


def test_the_loss_is_computed_inside_the_forward_context(probed):
    calls = [
        call for call in probed[1] if call in ("forward_context", "a loss is computed", "the forward context ends")
    ]
    assert len(calls) > 6
    assert calls == ["forward_context", "a loss is computed", "the forward context ends"] * (len(calls) // 3)


def test_what_the_seams_did_is_in_the_record(probed, fine_tuned, recipe):
    record, plain = probed[0], fine_tuned(recipe)
    assert record.dtype == "bfloat16"
    assert record.trainable_parameters == 2 * 64  # the last norm alone
    assert record.maximum_by_category["optimizer_states"] == 0  # SGD without momentum
    assert record.maximum_by_category["weights"] == plain.maximum_by_category["weights"] // 2
    assert record.losses[0] != pytest.approx(plain.losses[0], abs=1e-3)  # on sevens, not on Shakespeare


def test_two_techniques_are_applied_in_the_order_of_their_names_whatever_the_recipe_says(recipe, tmp_path):
    asked = replace(recipe, steps=1) | SecondProbe() | Probe()
    CALLS.clear()
    run(asked, device="cpu", folder=tmp_path)
    for seam in ("dataset", "collator", "model_arguments", "model", "compute_loss"):
        assert [name for called, name in CALLS if called == seam] == ["probe", "second_probe"]
    assert [name for called, name in CALLS if called == "optimizer"] == ["probe"]  # the first that brings one
    # the technique applied last is the outermost
    assert [name for called, name in CALLS if called == "a loss is computed"][:2] == ["second_probe", "probe"]


def test_a_technique_that_overrides_nothing_changes_nothing(recipe, fine_tuned):
    @dataclass(frozen=True)
    class Nothing(Technique):
        name: ClassVar[str] = "nothing"

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


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_recipes_dropout_holds_everywhere(recipe, dropout):
    source = locate("random:gpt2-tiny")
    model = prepare_model(replace(recipe, dropout=dropout), load_model(source, load_config(source)))
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert len(rates) > 4
    assert set(rates) == {dropout}


def test_without_a_dropout_in_the_recipe_the_models_own_stays(recipe):
    source = locate("random:gpt2-tiny")
    config = load_config(source)
    model = prepare_model(replace(recipe, dropout=None), load_model(source, config))
    assert model.transformer.drop.p == config.embd_pdrop
    assert model.transformer.h[0].attn.resid_dropout.p == config.resid_pdrop


def test_the_trainers_arguments(recipe, tmp_path):
    asked = recipe | GradientAccumulation(steps=4)
    arguments = training_arguments(asked, 1e-3, torch.device("cpu"), tmp_path)
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
