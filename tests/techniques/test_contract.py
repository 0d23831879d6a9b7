"""What every registered technique promises, in one place: what it declares is so.

A new technique needs a row in `TRAININGS`, and nothing else here: what is asked of it is derived from its card, its
fields and the committed table of pairs. Its mathematics, and what it alone refuses, is in a test file of its own.
"""

import ast
import csv
import gc
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workbench import techniques
from workbench.base.categories import Category
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError
from workbench.base.paths import DATA
from workbench.base.settings import describe_field, is_optional, type_name
from workbench.recipe import Recipe
from workbench.techniques import (
    REGISTRY,
    ActivationOffloading,
    Attention,
    BatchSize,
    ChunkedCrossEntropy,
    DataLoading,
    Dora,
    FusedGelu,
    GradientAccumulation,
    GradientCheckpointing,
    Ia3,
    Lora,
    MixedPrecision,
    Numerics,
    Optimizer,
    OptimizerOffloading,
    Padding,
    PrefixTuning,
    PromptTuning,
    PureBf16,
    Qlora,
    SelectiveCheckpointing,
    SequenceLength,
    StepInBackward,
    Streaming,
    Technique,
    parse_technique,
    technique,
)

# they change what is trained, which a planner leaves to its user; or are compiled for minutes to be predicted
UNOFFERED = ("batch_size", "sequence_length", "torch_compile")
WRONG_TYPES = {
    "int": (1.5, "8", True),
    "float": ("1", True, math.nan, math.inf),
    "bool": (1, "yes"),
    "str": (1, True),
}

# ---- what a technique declares ----


def test_file_class_and_registry_agree_on_the_name(subtests):
    for name, cls in REGISTRY.items():
        with subtests.test(technique=name):
            assert cls.name == name
            assert cls.__module__ == f"workbench.techniques.{name}"
            assert cls.__name__ == name.title().replace("_", "")


def test_type_checkers_and_editors_are_told_of_every_technique():
    lines = ast.parse(Path(techniques.__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    modules = {name.asname: line.module for line in lines if isinstance(line, ast.ImportFrom) for name in line.names}
    assert modules.items() >= {cls.__name__: cls.__module__ for cls in REGISTRY.values()}.items()
    for name in modules:
        assert hasattr(techniques, name)


def test_it_says_what_it_is_for_and_when_it_acts(subtests):
    for name, cls in REGISTRY.items():
        with subtests.test(technique=name):
            assert issubclass(cls, Technique)
            assert cls.title
            assert cls.costs
            assert set(cls.attacks) < set(Category)
            assert cls.numerics in Numerics
            assert cls().learning_rate_factor > 0
            assert any("stage" in vars(base) for base in cls.__mro__ if base is not Technique)


def test_it_is_frozen_and_made_of_documented_settings(subtests):
    for name, cls in REGISTRY.items():
        with subtests.test(technique=name):
            default = cls()
            assert {default: 1}[cls()] == 1
            for field in fields(cls):
                assert field.metadata["help"]
                with pytest.raises(FrozenInstanceError):
                    setattr(default, field.name, field.default)


def test_a_stand_in_differs_in_what_it_does_alone(subtests):
    """A prediction drives it: what is decided by name, stage and capabilities is decided as in a run."""
    kinds = REGISTRY["optimizer"].__dataclass_fields__["kind"].metadata["choices"]
    techniques = [cls() for cls in REGISTRY.values() if cls is not REGISTRY["torch_compile"]]  # it is refused
    techniques += [Optimizer(kind=name) for name in kinds]
    techniques.append(GradientCheckpointing(offload=True))
    same = (
        "name",
        "title",
        "stage",
        "numerics",
        "brings",
        "forbids",
        "learning_rate_factor",
        "why_not_on_ranks",
        "why_not_on_shards",
    )
    for plain in techniques:
        with subtests.test(technique=str(plain)):
            stand_in = plain.stand_in()
            assert isinstance(stand_in, type(plain))
            assert stand_in.settings() == plain.settings()
            assert [getattr(stand_in, name) for name in same] == [getattr(plain, name) for name in same]


def acceptable_values(field):
    """The choices of a setting, or the ends of its range."""
    if type_name(field) == "bool":
        return [True, False]
    ends = [field.metadata[end] for end in ("minimum", "maximum") if field.metadata[end] is not None]
    return [*field.metadata["choices"], *ends, *([None] if is_optional(field) else [])]


def unacceptable_values(field):
    """Values beyond the ends of a setting's range, beside its choices, and of other types."""
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    beyond = [low - 1] if low is not None else []
    beyond += [high + 1] if high is not None else []
    beyond += ["no such choice"] if field.metadata["choices"] else []
    return [*beyond, *WRONG_TYPES[type_name(field)], *([] if is_optional(field) else [None])]


def settings_of_every_technique():
    """(class, field) of every setting."""
    return [(cls, field) for cls in REGISTRY.values() for field in fields(cls)]


def test_a_setting_takes_its_choices_and_the_ends_of_its_range_and_comes_back_from_text(subtests):
    """By name and value as in a file, on a command line, and in another process."""
    for cls, field in settings_of_every_technique():
        for value in (field.default, *acceptable_values(field)):
            with subtests.test(technique=cls.name, setting=field.name, value=value):
                instance = cls(**{field.name: value})
                assert instance.settings()[field.name] == value
                assert technique(cls.name, **instance.settings()) == instance
                text = ",".join(f"{name}:{value}" for name, value in instance.settings().items())
                assert parse_technique(f"{cls.name}={text}") == instance
                assert pickle.loads(pickle.dumps(instance)) == instance
    for name, cls in REGISTRY.items():
        with subtests.test(technique=name):
            assert parse_technique(name) == technique(name) == cls()


def test_a_setting_that_went_is_read_at_the_value_that_is_left_and_stays_in_the_id(subtests):
    """Records of older versions have it, and committed predictions lie under a key that it is part of."""
    for name, cls in REGISTRY.items():
        with subtests.test(technique=name):
            written = Recipe(techniques=[cls()]).to_dict()["techniques"][name]
            assert written == {**cls().settings(), **cls.retired}
            assert cls.from_settings(written) == cls()
            for setting in cls.retired:
                with pytest.raises(ConfigurationError, match=f"{name} has no setting '{setting}'"):
                    cls.from_settings({**written, setting: "another"})
    assert Recipe(techniques=[REGISTRY["activation_offloading"]()]).id == "cf582e7bb9c0"


def test_a_setting_refuses_all_else_naming_itself_the_value_and_what_it_takes(subtests):
    for cls, field in settings_of_every_technique():
        for value in unacceptable_values(field):
            with subtests.test(technique=cls.name, setting=field.name, value=value):
                with pytest.raises(ConfigurationError) as caught:
                    cls(**{field.name: value})
                words = f"{cls.name}: {field.name} must be {describe_field(field)}, got {value!r}."
                assert str(caught.value) == words


def test_a_planner_is_offered_what_saves_and_what_runs_there(subtests):
    for name, cls in REGISTRY.items():
        for compute_capability in (None, (7, 5), (9, 0)):  # a CPU, a T4, an H100
            with subtests.test(technique=name, compute_capability=compute_capability):
                offered = cls.variants(compute_capability)
                assert all(isinstance(variant, cls) for variant in offered)
                assert len(set(offered)) == len(offered)
                if not cls.attacks:
                    assert offered == ()
                if compute_capability is None:
                    assert not any("CUDA" in (variant.missing(Device("cpu")) or "") for variant in offered)
                else:
                    assert offered or compute_capability < (8, 0) or name in UNOFFERED or not cls.attacks


def refusal(*chosen):
    """Why a recipe does not take these techniques together; empty if it does."""
    try:
        Recipe(techniques=chosen)
    except ConfigurationError as error:
        return str(error).removeprefix("recipe: ")
    return ""


def test_two_exclude_each_other_in_either_order_where_the_committed_table_of_pairs_says_so_and_nowhere_else(subtests):
    with (DATA / "reference" / "cpu" / "gpt2-tiny" / "pairs.csv").open(encoding="utf-8", newline="") as file:
        reasons = {
            (row["one"], row["other"]): row["reason"] for row in csv.DictReader(file) if row["verdict"] == "refused"
        }
    for one, other in combinations(sorted(REGISTRY), 2):
        with subtests.test(one=one, other=other):
            reason = reasons.get((one, other), "")
            assert refusal(REGISTRY[one](), REGISTRY[other]()) == reason
            assert refusal(REGISTRY[other](), REGISTRY[one]()) == reason


# ---- what a training with it shows ----

MODEL = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES)
MODEL_AND_LOSS = (*MODEL, Category.LOGITS_AND_LOSS)
ALL_BUT_STATES = (Category.WEIGHTS, Category.GRADIENTS, Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)
ALL_BUT_TEMPORARIES = tuple(category for category in Category if category is not Category.TEMPORARIES)
ROUNDING = 2e-5  # of the loss, in fp32: as far as an exact technique may be from the baseline


def below(share):
    return 0.0, share


def about(share):
    return 0.95 * share, 1.05 * share


@dataclass(frozen=True)
class Training:
    """What the recipe of these tests shows with a technique, beside the same recipe without.

    Attributes:
        losses: how far they may be from the baseline's, relative to them; 0: not at all, and the weights are the same
            to the last bit; None: it learns something else.
        attacked: between which shares of the baseline's maximum lie those of the categories that its card names.
        same: the categories whose maximum is the baseline's to the byte.
        peak: it is below this share of the baseline's; None: nothing is claimed.
        start: how far the loss before training may be from the baseline's; None: the model is another one from the
            beginning.
    """

    technique: Technique
    losses: float | None = None
    attacked: tuple[float, float] = below(1.0)
    same: tuple[Category, ...] = MODEL
    peak: float | None = 1.0
    start: float | None = 1e-6


TRAININGS = [
    Training(ActivationOffloading(to="disk", minimum_bytes=4096), losses=0, attacked=below(0.05), peak=0.85),
    Training(Attention(), losses=1e-5, same=MODEL_AND_LOSS, peak=None),
    Training(Attention(implementation="sdpa"), losses=0, same=tuple(Category), peak=None),
    Training(BatchSize(size=2), attacked=about(2 / 8)),
    Training(BatchSize(size=4), attacked=about(4 / 8)),
    Training(ChunkedCrossEntropy(chunk=100), losses=2e-5),
    Training(ChunkedCrossEntropy(), losses=2e-5),
    Training(DataLoading(), losses=0, same=ALL_BUT_TEMPORARIES, peak=None),
    Training(DataLoading(num_workers=0), losses=0, same=ALL_BUT_TEMPORARIES, peak=None),
    Training(DataLoading(memory_mapped=False, num_workers=1), losses=0, same=ALL_BUT_TEMPORARIES, peak=None),
    Training(Dora(), attacked=below(0.12), same=()),
    Training(Dora(rank=4, targets="c_attn+c_fc+c_proj"), attacked=below(0.12), same=()),
    Training(FusedGelu(), losses=1e-5, same=MODEL_AND_LOSS),
    Training(GradientAccumulation(steps=2), losses=2e-5, attacked=about(1 / 2)),
    Training(GradientAccumulation(steps=8), losses=2e-5, attacked=about(1 / 8)),
    Training(GradientCheckpointing(), losses=0, attacked=below(0.85), same=MODEL_AND_LOSS),
    Training(GradientCheckpointing(use_reentrant=True), losses=0, attacked=below(0.85), same=MODEL_AND_LOSS),
    Training(GradientCheckpointing(every_n_layers=2), losses=0, attacked=below(0.85), same=MODEL_AND_LOSS),
    Training(Ia3(), attacked=below(0.1), same=()),
    Training(Lora(), attacked=below(0.1), same=()),
    Training(Lora(rank=4, targets="c_attn+c_fc+c_proj"), attacked=below(0.1), same=()),
    Training(MixedPrecision(), losses=0.01, attacked=below(0.75), start=0.01),
    Training(Optimizer(), losses=0.01, same=ALL_BUT_STATES),
    Training(Optimizer(kind="adafactor"), same=ALL_BUT_STATES),
    Training(OptimizerOffloading(to="disk", chunk_elements=2**14), losses=2e-6, same=ALL_BUT_STATES),
    Training(Padding(dynamic=False), peak=None),
    Training(Padding(), peak=None),
    Training(Padding(group_by_length=True), peak=None),
    Training(PrefixTuning(), attacked=below(0.1), same=(), start=None),
    Training(PromptTuning(), attacked=below(0.1), same=(), peak=None, start=None),
    Training(PureBf16(), losses=0.03, attacked=below(0.55), same=(), start=0.03),
    Training(Qlora(), attacked=below(0.9), same=(), start=0.01),
    Training(SelectiveCheckpointing(), losses=0, same=MODEL_AND_LOSS),
    Training(SequenceLength(tokens=8), attacked=about(8 / 32)),
    Training(SequenceLength(tokens=16), attacked=about(16 / 32)),
    Training(StepInBackward(), attacked=below(0.8), peak=None),  # the logits of so small a model are its peak
    Training(Streaming(), losses=0.05, peak=None),  # 256 tokens a step: other batches differ by so much
]
ELSEWHERE = {
    "allocator": "of CUDA alone: test_allocator.py",
    "torch_compile": "it is compiled for longer than all these train: test_torch_compile.py",
}


def test_every_technique_has_a_row():
    assert {training.technique.name for training in TRAININGS} | ELSEWHERE.keys() == REGISTRY.keys()


def test_the_baseline_learns(recipe, fine_tuned):
    """So that equal losses mean equal gradients."""
    plain = fine_tuned(recipe)
    assert plain.losses[-1] < plain.losses[0] - 0.1
    assert plain.held_out_loss < plain.held_out_loss_before - 0.1
    assert plain.tokens_seen == recipe.steps * 8 * 32


def weights(record):
    return load_file(Path(record.model_path) / "model.safetensors")


def check_losses(training, plain, record):
    numerics, band = training.technique.numerics, training.losses
    assert numerics is not Numerics.EXACT or band <= ROUNDING, "it claims to be exact"
    assert numerics is not Numerics.APPROXIMATE or band > ROUNDING, "it claims to be approximate"
    if band == 0:
        assert record.losses == plain.losses
        assert record.held_out_loss == plain.held_out_loss
        assert record.held_out_loss_before == plain.held_out_loss_before
        expected, actual = weights(plain), weights(record)
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
    elif band is not None:
        assert record.losses == pytest.approx(plain.losses, rel=band)
        assert record.held_out_loss == pytest.approx(plain.held_out_loss, rel=band)
    if numerics is not Numerics.EXACT:
        assert record.losses[1:] != plain.losses[1:]
        assert record.held_out_loss != plain.held_out_loss
    if training.start is not None:
        assert record.held_out_loss_before == pytest.approx(plain.held_out_loss_before, rel=training.start)
    assert record.held_out_loss < record.held_out_loss_before, "it learns nothing"


def check_memory(training, plain, record):
    low, high = training.attacked
    for category in training.technique.attacks:
        share = record.maximum_by_category[category] / plain.maximum_by_category[category]
        assert low <= share < high, category
    for category in set(training.same) - set(training.technique.attacks):
        assert record.maximum_by_category[category] == plain.maximum_by_category[category], category
    if training.peak is not None:
        assert record.peak_allocated_bytes < training.peak * plain.peak_allocated_bytes


def living_parameters():
    """Those of a model that nobody has any more are among them if a hook holds its optimizer: no collector finds it."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter]


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: (Recipe() | training.technique).label)
def test_a_training_shows_what_is_declared(recipe, fine_tuned, training, subtests):
    chosen = recipe | training.technique
    if reason := training.technique.missing(Device("cpu")):
        pytest.skip(reason)
    plain = fine_tuned(recipe)
    before = living_parameters()
    record = fine_tuned(chosen)
    with subtests.test("nothing of the run stays alive"):
        known = {id(parameter) for parameter in before}
        assert [tuple(parameter.shape) for parameter in living_parameters() if id(parameter) not in known] == []
    with subtests.test("the losses are as near to the baseline's as it says"):
        check_losses(training, plain, record)
    with subtests.test("what it attacks shrinks, and the rest stays"):
        check_memory(training, plain, record)
    with subtests.test("it sees as many tokens, in as many steps as it makes of them"):
        assert record.steps_done == len(record.losses) == chosen.shape.steps
        assert record.tokens_seen + record.padding_tokens <= plain.tokens_seen
        if not isinstance(training.technique, Padding):
            assert (record.tokens_seen, record.padding_tokens) == (plain.tokens_seen, 0)
