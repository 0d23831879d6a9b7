"""The exported script trains what `run` trains: the same losses to the last bit, and the same peak."""

import inspect
import json
import runpy
from dataclasses import replace

import pytest
from transformers import GPT2Config

from workbench.__main__ import main
from workbench.errors import ConfigurationError
from workbench.export.script import script
from workbench.measure.tracker import StorageTracker
from workbench.models.family import family_of
from workbench.paths import MODELS
from workbench.recipe import Recipe
from workbench.run.run import run
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
    Optimizer,
    OptimizerOffloading,
    Padding,
    PrefixTuning,
    PromptTuning,
    PureBf16,
    Qlora,
    SequenceLength,
    StepInBackward,
    Streaming,
)

GPT2 = family_of(GPT2Config())

TECHNIQUES = {
    "baseline": (),
    "gradient_accumulation": (GradientAccumulation(steps=2),),
    "gradient_checkpointing": (GradientCheckpointing(),),
    "every second block": (GradientCheckpointing(every_n_layers=2),),
    "reentrant": (GradientCheckpointing(use_reentrant=True), Lora(rank=2)),
    "mixed_precision": (MixedPrecision(),),
    "lora": (Lora(rank=4, targets="c_attn+c_fc"),),
    "batch_size": (BatchSize(size=4), GradientAccumulation(steps=2)),
    "sequence_length": (SequenceLength(tokens=8), BatchSize(size=2)),
    "pure_bf16": (PureBf16(),),
    "pure_bf16 and an adapter": (PureBf16(), Lora(rank=2)),
    "chunked_cross_entropy": (ChunkedCrossEntropy(chunk=100), GradientAccumulation(steps=2)),
    "chunked_cross_entropy of an adapter": (ChunkedCrossEntropy(chunk=100), Lora(rank=2), MixedPrecision()),
    "optimizer": (Optimizer(kind="sgd_momentum"),),
    "step_in_backward": (StepInBackward(), Optimizer(kind="adafactor")),
    "a library's optimizer": (PureBf16(), Optimizer(kind="adamw_4bit_stochastic")),
    "optimizer made by hand": (Optimizer(kind="adamw_foreach"), Lora(rank=2)),
    "prefix_tuning": (PrefixTuning(virtual_tokens=4),),
    "prompt_tuning": (PromptTuning(virtual_tokens=4),),
    "ia3": (Ia3(),),
    "only the attention of ia3": (Ia3(feedforward=False),),
    "dora": (Dora(rank=4),),
    "qlora": (Qlora(rank=4),),
    "activation_offloading": (ActivationOffloading(to="disk"),),
    "optimizer_offloading": (OptimizerOffloading(to="disk", chunk_elements=4096),),
    "both offloaded": (ActivationOffloading(to="disk"), OptimizerOffloading(to="disk"), GradientCheckpointing()),
    "attention": (Attention(),),
    "fused_gelu": (FusedGelu(),),
    "data_loading": (DataLoading(num_workers=0),),
    "workers": (DataLoading(memory_mapped=False),),
    "padding": (Padding(),),
    "fixed padding": (Padding(dynamic=False),),
    "grouped by length": (Padding(group_by_length=True), DataLoading(num_workers=0)),
    "streaming": (Streaming(shuffle_buffer=16),),
    "all": (GradientAccumulation(steps=4), GradientCheckpointing(), MixedPrecision(), Lora(dropout=0.1)),
}


def test_every_technique_has_a_row():
    rows = {technique.name for techniques in TECHNIQUES.values() for technique in techniques}
    assert REGISTRY.keys() - rows == {"allocator"}  # of CUDA alone: here is no run to compare a script with


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """Runs a script's source in a folder of its own; returns its losses and the peak of its live tensor bytes."""

    def execute(source):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "fine_tune.py").write_text(source, encoding="utf-8")
        with StorageTracker("cpu") as tracker:
            runpy.run_path(str(tmp_path / "fine_tune.py"), run_name="__main__")
        history = json.loads((tmp_path / "fine-tuned" / "trainer_state.json").read_text())["log_history"]
        losses = [entry["loss"] for entry in history if "loss" in entry]
        held_out = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
        return losses, held_out, int(tracker.timeline().total.max())

    return execute


@pytest.mark.parametrize("techniques", TECHNIQUES.values(), ids=TECHNIQUES)
def test_it_finds_the_same_losses_and_the_same_peak(recipe, executed, techniques):
    recipe = replace(recipe, techniques=techniques)
    record = run(recipe, device="cpu")
    losses, held_out, peak = executed(script(recipe))
    assert losses == record.losses
    assert held_out == [record.held_out_loss_before, record.held_out_loss]
    assert peak == pytest.approx(record.peak_allocated_bytes, rel=0.01)


def test_it_starts_from_saved_weights_and_the_embedded_text_too(executed):
    recipe = Recipe(model="gpt2-tiny", effective_batch_size=2, sequence_length=32, steps=2)
    losses, held_out, _ = executed(script(recipe))
    record = run(recipe, device="cpu")
    assert losses == record.losses
    assert held_out[-1] == record.held_out_loss


def test_saved_weights_are_quantized_as_they_load(executed, text_file):
    recipe = (
        Recipe(model="gpt2-tiny", corpus=str(text_file), effective_batch_size=2, sequence_length=32, steps=2) | Qlora()
    )
    source = script(recipe)
    assert "quantization_config=quantization_config" in source
    losses, held_out, _ = executed(source)
    record = run(recipe, device="cpu")
    assert losses == record.losses
    assert held_out[-1] == record.held_out_loss


@pytest.mark.parametrize("techniques", TECHNIQUES.values(), ids=TECHNIQUES)
def test_the_functions_that_a_run_calls_are_the_scripts_own(recipe, techniques):
    """Nothing is written twice, as code and as a string: the script has the very source."""
    source, called = script(replace(recipe, techniques=techniques)), []
    for technique in techniques:
        calls = [technique.examples(), technique.dataset(), technique.collator(), technique.model(GPT2)]
        called += [call.function for call in (*calls, technique.trainer()) if call is not None]
    for function in called:
        assert inspect.getsource(function) in source + "\n"
    compile(source, "script", "exec")


def test_it_needs_no_workbench_and_reads_like_a_script(recipe):
    source = script(recipe | Lora() | GradientCheckpointing())
    assert "workbench" not in source
    assert source.startswith('"""Fine-tune random:')
    assert "model = add_adapter(" in source
    assert "model = checkpoint_blocks(" in source
    assert max(len(line) for line in source.splitlines() if "/" not in line) <= 120
    compile(source, "script", "exec")


def test_the_command_prints_nothing_but_the_script(recipe, capsys):
    assert main(["script", recipe.model, "--corpus", recipe.corpus, "--technique", "lora=rank:3"]) == 0
    captured = capsys.readouterr()
    compile(captured.out, "script", "exec")
    assert "r=3," in captured.out
    assert main(["script", recipe.model, "--corpus", "missing.txt"]) == 2


def test_a_small_vocabulary_gets_the_tokenizer_that_a_run_takes():
    source = script(Recipe(model="random:mistralai/Mistral-7B-v0.1"))  # 32,000 tokens, GPT-2's ids go up to 50,256
    assert f'from_pretrained("{MODELS / "gpt2-tiny"}"' in source
    assert "MistralConfig(vocab_size=32000," in source.replace("\n    ", "")


def test_sizes_and_dropout_are_spelled_out():
    source = script(Recipe(model="random:gpt2-medium", dropout=0.2))
    assert "GPT2Config(n_embd=1024, n_layer=24, n_head=16, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)" in source
    assert "learning_rate=5e-05," in source


def test_an_adapter_is_refused_with_the_cure(recipe):
    kept = run(replace(recipe, steps=1) | Lora(rank=1), device="cpu", save="adapter")
    with pytest.raises(ConfigurationError, match="is an adapter. Save the model as 'merged'"):
        script(replace(recipe, model=kept.model_path))
