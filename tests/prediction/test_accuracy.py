"""The shadow with the CPU's own choices against what PyTorch's profiler sees allocated in the real step.

The profiler reads the allocator; it shares nothing with the workbench's tracker, nor with the shadow. The real step is
`Trainer.train` itself.
"""

import gc
import itertools
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.conftest import END_OF_TEXT_ID
from workbench import predict
from workbench.base.paths import MODELS
from workbench.measure.meter import MemoryReport, Meter
from workbench.models.load import load_config, load_model, load_tokenizer, quiet
from workbench.models.source import locate
from workbench.prediction.prediction import Prediction
from workbench.recipe import Recipe
from workbench.techniques import parse_technique
from workbench.texts.corpus import Blocks
from workbench.training.arguments import build_training_arguments, complete_arguments
from workbench.training.trainer import build_trainer, prepare_data

pytestmark = pytest.mark.dear
MEAN, WORST = 0.01, 0.025
ALL = "lora=targets:c_attn+c_fc+c_proj"

# layers, width, heads, vocabulary, dropout
SHAPES = {"deep": (6, 96, 3, 4096, 0.0), "wide": (2, 256, 4, 4096, 0.1), "large-vocabulary": (2, 64, 2, 20000, 0.1)}

# model, B, T, techniques
GRID: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("gpt2-tiny", 4, 128, ()),
    ("gpt2-tiny", 2, 32, ()),
    ("gpt2-tiny", 2, 256, ()),
    ("gpt2-tiny", 4, 128, ("gradient_checkpointing",)),
    ("gpt2-tiny", 4, 128, ("gradient_checkpointing=use_reentrant:true",)),
    ("gpt2-tiny", 4, 128, ("gradient_accumulation",)),
    ("gpt2-tiny", 4, 128, ("mixed_precision",)),
    ("gpt2-tiny", 4, 128, ("lora",)),
    ("gpt2-tiny", 4, 128, ("gradient_checkpointing", "lora", "mixed_precision")),
    ("gpt2-tiny", 8, 64, ("gradient_accumulation=steps:2", "gradient_checkpointing", "mixed_precision")),
    ("deep", 4, 128, ()),
    ("deep", 1, 100, ()),
    ("deep", 4, 128, ("gradient_checkpointing",)),
    ("deep", 4, 128, ("gradient_checkpointing=every_n_layers:2",)),
    ("deep", 8, 64, ("mixed_precision",)),
    ("deep", 2, 128, (ALL, "gradient_checkpointing")),
    ("wide", 8, 64, ()),
    ("wide", 3, 50, ()),
    ("wide", 8, 64, ("gradient_checkpointing",)),
    ("wide", 8, 64, ("lora=rank:4,dropout:0.1",)),
    ("wide", 8, 64, ("gradient_accumulation=steps:8",)),
    ("wide", 8, 64, ("mixed_precision", ALL)),
    ("large-vocabulary", 4, 64, ()),
    ("large-vocabulary", 4, 64, ("gradient_checkpointing", "mixed_precision")),
    ("large-vocabulary", 4, 64, ("lora",)),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    predicted: Prediction
    profiled_bytes: int
    measured: MemoryReport

    @property
    def error(self) -> float:
        return self.predicted.peak_allocated_bytes / self.profiled_bytes - 1


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("accuracy")
    names = {"gpt2-tiny": "random:gpt2-tiny"} | {name: f"random:{_folder(folder / name, name)}" for name in SHAPES}
    found = []
    gc.freeze()  # or every run would walk the half million objects of the libraries several times
    for model, batch, length, techniques in GRID:
        recipe = Recipe(
            model=names[model], effective_batch_size=batch, sequence_length=length, steps=2,
            techniques=tuple(parse_technique(text) for text in techniques),
        )  # fmt: skip
        profiled, measured = _real(recipe, folder)
        case = Case(recipe, predict(recipe, "cpu"), profiled, measured)
        print(f"{case.error:+9.4%}  {profiled / 2**20:8.1f} MiB  {model} B={batch} T={length} {recipe.label}")
        found.append(case)
    gc.unfreeze()
    return found


def _folder(folder: Path, name: str) -> Path:
    from transformers import GPT2Config

    layers, width, heads, vocabulary, dropout = SHAPES[name]
    GPT2Config(
        vocab_size=vocabulary, n_layer=layers, n_embd=width, n_head=heads, n_positions=128, embd_pdrop=dropout,
        attn_pdrop=dropout, resid_pdrop=dropout, bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID,
    ).save_pretrained(folder)  # fmt: skip
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "gpt2-tiny" / file, folder / file)
    return folder


def _real(recipe: Recipe, folder: Path) -> tuple[int, MemoryReport]:
    """Two real steps: the profiler's peak, the weights included, and the meter's report."""
    from datasets import Dataset

    source = locate(recipe.model)
    rows = Dataset.from_dict({"input_ids": [list(range(recipe.sequence_length))] * recipe.effective_batch_size})
    with quiet():
        model = recipe.prepare_model(load_model(source, load_config(source)))
        arguments = build_training_arguments(complete_arguments(recipe, 1e-4), "cpu", folder / "trainer")
        arguments.eval_on_start = False
        meter = Meter(model, before_bytes=0)
        text = "", load_tokenizer(source), recipe.sequence_length, recipe.effective_batch_size
        trainer = build_trainer(recipe, model, prepare_data(recipe, Blocks(rows, rows, text)), arguments, meter, [])
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
        gc.collect()  # else an earlier run's tensors would be freed, and subtracted, in this one
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, meter:
            trainer.train()
    return sum(storages.values()) + _peak_of_events(profiler), meter.report()


def _peak_of_events(profiler: profile) -> int:
    events: list[tuple[int, int]] = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, change in sorted(events, key=lambda entry: entry[0]):
        live += change
        peak = max(peak, live)
    return peak


def test_there_are_twenty_configurations_and_more() -> None:
    assert len(set(GRID)) == len(GRID) >= 20


def test_predicted_peak_is_what_the_profiler_saw(cases: list[Case]) -> None:
    errors = [abs(case.error) for case in cases]
    print(f"mean {statistics.mean(errors):.4%}, worst {max(errors):.4%} of {len(errors)} configurations")
    assert statistics.mean(errors) <= MEAN
    assert max(errors) <= WORST


def test_categories_sum_to_the_peak(cases: list[Case]) -> None:
    for case in cases:
        assert sum(case.predicted.by_category.values()) == case.predicted.peak_allocated_bytes


def test_categories_are_those_that_the_meter_attributes(cases: list[Case]) -> None:
    for case in cases:
        allowed = WORST * case.profiled_bytes
        for category, measured in case.measured.by_category.items():
            assert case.predicted.by_category[category] == pytest.approx(measured, abs=allowed), (
                case.recipe.label,
                category,
            )


def test_order_of_techniques_by_peak_is_right(cases: list[Case]) -> None:
    groups: dict[tuple[str, int, int], list[Case]] = {}
    for case in cases:
        key = (case.recipe.model, case.recipe.effective_batch_size, case.recipe.sequence_length)
        groups.setdefault(key, []).append(case)
    for group in groups.values():
        by_truth = sorted(group, key=lambda case: case.profiled_bytes)
        for smaller, larger in itertools.pairwise(by_truth):
            if larger.profiled_bytes > 1.01 * smaller.profiled_bytes:
                assert larger.predicted.peak_allocated_bytes > smaller.predicted.peak_allocated_bytes
