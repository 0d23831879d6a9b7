"""The exported script trains what `run` trains: the same losses to the last bit, and the same peak."""

import ast
import inspect
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tokenize
import tomllib
from dataclasses import replace
from functools import cache
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec

import pytest
from transformers import GPT2Config

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.base.paths import CORPORA, MODELS
from workbench.export.script import DEFAULTS, script
from workbench.measure.tracker import StorageTracker
from workbench.models.family import family_of
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
    TorchCompile,
)
from workbench.training.run import run

GPT2 = family_of(GPT2Config())

TECHNIQUES = {
    "baseline": (),
    "gradient_accumulation": (GradientAccumulation(steps=2),),
    "gradient_checkpointing": (GradientCheckpointing(),),
    "every second block": (GradientCheckpointing(every_n_layers=2),),
    "selective_checkpointing": (SelectiveCheckpointing(), Lora(rank=2)),
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
    "two optimizers as one": (Optimizer(kind="muon"), Lora(rank=2)),
    "optimizer made by hand": (Optimizer(kind="adamw_foreach"), Lora(rank=2)),
    "prefix_tuning": (PrefixTuning(virtual_tokens=4),),
    "prompt_tuning": (PromptTuning(virtual_tokens=4),),
    "ia3": (Ia3(),),
    "dora": (Dora(rank=4),),
    "qlora": (Qlora(rank=4),),
    "activation_offloading": (ActivationOffloading(to="disk"),),
    "optimizer_offloading": (OptimizerOffloading(to="disk", chunk_elements=4096),),
    "both offloaded": (ActivationOffloading(to="disk"), OptimizerOffloading(to="disk"), GradientCheckpointing()),
    "attention": (Attention(),),
    "fused_gelu": (FusedGelu(),),
    "torch_compile": (TorchCompile(memory_budget=0.5),),
    "data_loading": (DataLoading(num_workers=0),),
    "workers": (DataLoading(memory_mapped=False),),
    "padding": (Padding(),),
    "fixed padding": (Padding(dynamic=False),),
    "grouped by length": (Padding(group_by_length=True), DataLoading(num_workers=0)),
    "streaming": (Streaming(shuffle_buffer=16),),
    "all": (GradientAccumulation(steps=4), GradientCheckpointing(), MixedPrecision(), Lora(dropout=0.1)),
}


SMOKE = ("baseline", "chunked_cross_entropy", "step_in_backward", "padding", "streaming", "all")  # each seam, once
ROWS = [pytest.param(name, marks=pytest.mark.smoke if name in SMOKE else ()) for name in TECHNIQUES]


def unbroken(source):
    """With calls in one line again."""
    return re.sub(r",\n *\)", ")", re.sub(r"([(,])\n +", lambda m: m[1] + " " * (m[1] == ","), source))


def test_every_technique_has_a_row():
    rows = {technique.name for techniques in TECHNIQUES.values() for technique in techniques}
    assert REGISTRY.keys() - rows == {"allocator"}  # of CUDA alone: here is no run to compare a script with


def losses_in(folder):
    history = json.loads((folder / "fine-tuned" / "trainer_state.json").read_text())["log_history"]
    return tuple([entry[name] for entry in history if name in entry] for name in ("loss", "eval_loss"))


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """Runs a script's source in the folder where it was written, one of the test's own; returns its losses and the
    peak of its live tensor bytes."""
    monkeypatch.chdir(tmp_path)

    def execute(source):
        (tmp_path / "fine_tune.py").write_text(source, encoding="utf-8")
        with StorageTracker("cpu") as tracker:
            runpy.run_path(str(tmp_path / "fine_tune.py"), run_name="__main__")
        return *losses_in(tmp_path), int(tracker.timeline().total.max())

    return execute


@pytest.fixture(scope="module")
def source_of(recipe):
    """The script of each row of TECHNIQUES, written once."""
    return cache(lambda name: script(replace(recipe, techniques=TECHNIQUES[name])))


@pytest.mark.dear
@pytest.mark.parametrize("name", ROWS)
def test_it_finds_the_same_losses_and_the_same_peak(recipe, executed, source_of, name, request):
    if name == "torch_compile":
        request.getfixturevalue("cpp_compiler")
    record = run(replace(recipe, techniques=TECHNIQUES[name]), device="cpu")
    losses, held_out, peak = executed(source_of(name))
    assert losses == record.losses
    assert held_out == [record.held_out_loss_before, record.held_out_loss]
    assert peak == pytest.approx(record.peak_allocated_bytes, rel=0.01)


REFUSED = {  # by TRL's trainer: what it is that it has no arguments for
    "sequence_length", "chunked_cross_entropy", "chunked_cross_entropy of an adapter", "step_in_backward", "qlora",
    "a library's optimizer", "two optimizers as one", "optimizer made by hand", "prompt_tuning",
    "selective_checkpointing", "activation_offloading", "optimizer_offloading", "both offloaded", "data_loading",
    "padding", "fixed padding", "grouped by length", "streaming", "torch_compile",
}  # fmt: skip
ROUNDED = {"mixed_precision", "pure_bf16", "pure_bf16 and an adapter", "all"}  # TRL's loss rounds elsewhere


@pytest.mark.dear
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("name", [row for row in ROWS if row.values[0] not in REFUSED])
def test_trls_trainer_finds_the_same_losses_up_to_rounding(recipe, executed, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = replace(recipe, techniques=TECHNIQUES[name])
    losses, held_out, _ = executed(script(recipe, "trl"))
    record = run(recipe, device="cpu")
    rounding = 2e-3 if name in ROUNDED else 1e-6
    assert losses == pytest.approx(record.losses, rel=rounding)
    assert held_out == pytest.approx([record.held_out_loss_before, record.held_out_loss], rel=rounding)


def test_what_trls_trainer_has_no_arguments_for_is_refused(recipe, subtests):
    words = "set as it is, does what TRL's trainer has no arguments for"
    for name in sorted(REFUSED):
        with subtests.test(name):
            with pytest.raises(ConfigurationError, match=words) as error:
                script(replace(recipe, techniques=TECHNIQUES[name]), "trl")
            assert str(error.value).split()[1].strip(",") in {technique.name for technique in TECHNIQUES[name]}


def test_another_flavour_is_refused(recipe):
    with pytest.raises(ConfigurationError, match="script: 'axolotl' is no flavour. Choose one of trainer, trl."):
        script(recipe, "axolotl")


@pytest.mark.dear
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_its_workers_may_begin_in_any_way(recipe, tmp_path, monkeypatch, method):
    """As on macOS, on Windows and with Python 3.14: a worker imports the script, and is sent what makes batches."""
    monkeypatch.chdir(tmp_path)
    recipe = replace(recipe, steps=2) | DataLoading(num_workers=1) | PromptTuning(virtual_tokens=4)
    (tmp_path / "fine_tune.py").write_text(script(recipe), encoding="utf-8")
    words = f"import multiprocessing\nmultiprocessing.set_start_method({method!r})\n"
    (tmp_path / "sitecustomize.py").write_text(words, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "fine_tune.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    record = run(recipe, device="cpu")
    assert losses_in(tmp_path) == (record.losses, [record.held_out_loss_before, record.held_out_loss])


@pytest.mark.dear
@pytest.mark.smoke
def test_it_starts_from_saved_weights_and_the_embedded_text_too(executed):
    recipe = Recipe(model="gpt2-tiny", effective_batch_size=2, sequence_length=32, steps=2)
    losses, held_out, _ = executed(script(recipe))
    record = run(recipe, device="cpu")
    assert losses == record.losses
    assert held_out[-1] == record.held_out_loss


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neox", "opt"])
def test_other_kinds_of_models_and_strange_names_of_files(executed, kinds, tmp_path, kind):
    path = tmp_path / 'a "play" of {Will\'s}, 100 %.txt'
    path.write_text((CORPORA / "shakespeare" / "train.txt").read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    recipe = Recipe(
        model=f"random:{kinds / kind}", corpus=str(path), effective_batch_size=2, sequence_length=16, steps=2
    )
    losses, held_out, _ = executed(script(recipe | Lora(rank=1) | MixedPrecision()))
    record = run(recipe | Lora(rank=1) | MixedPrecision(), device="cpu")
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


def calls_of(technique):
    calls = [
        technique.examples(),
        technique.dataset(),
        technique.collator(),
        technique.model(GPT2),
        technique.trainer(),
    ]
    return [call for call in calls if call is not None]


@pytest.mark.dear
def test_the_functions_that_a_run_calls_are_the_scripts_own(source_of, subtests):
    """Nothing is written twice, as code and as a string: the script has the very source."""
    for name, techniques in TECHNIQUES.items():
        with subtests.test(name):
            source = source_of(name)
            calls = [(technique, call) for technique in techniques for call in calls_of(technique)]
            for technique, call in calls:
                switches = technique.switches()
                if switches.keys() & DEFAULTS:  # the Trainer's own arguments stand for it, where it has them
                    assert call.function.__name__ not in source
                    assert all(f"{name}=" in source for name, value in switches.items() if value is not None)
                elif call.function.__module__.startswith("workbench"):
                    assert inspect.getsource(call.function) in source + "\n"
                else:
                    assert f"model = {call.function.__name__}(model, " in source
            compile(source, "script", "exec")


def test_it_needs_no_workbench_and_reads_like_a_script(recipe):
    source = script(recipe | Lora() | GradientCheckpointing())
    assert "workbench" not in source
    assert '\n"""Fine-tune random:' in source
    assert "    model = get_peft_model(model, peft_config=LoraConfig(\n" in source
    if "activation_checkpointing" in DEFAULTS:  # of older versions the function is there
        assert " activation_checkpointing=True,\n" in source
        assert max(len(line) for line in source.splitlines() if "/" not in line) <= 88
    compile(source, "script", "exec")


SEVERAL = ["baseline", "lora", "qlora", "all", "both offloaded", "padding", "streaming", "a library's optimizer"]


def test_no_model_of_the_hub_may_bring_code(text_file, monkeypatch):
    """A folder was looked at when the script was written; a repository of the hub may change."""
    recipe = Recipe(model="gpt2-tiny", corpus=str(text_file), techniques=(Lora(),))
    assert "trust_remote_code" not in script(recipe)
    for hub in (lambda: script(replace(recipe, model="random:gpt2")), lambda: script(recipe)):
        source = hub()  # the first one's tokenizer is the hub's
        monkeypatch.setattr("workbench.export.script.relative_path", lambda path: path.replace(str(MODELS), "someone"))
        assert source.count(".from_pretrained(") == source.count("trust_remote_code=False") > 0
    assert '"someone/gpt2-tiny"' in source


def test_lora_with_checkpointing_is_35_lines():
    """Of code: without the header, docstrings, comments and what separates them."""
    source = script(Recipe(model="gpt2-tiny", techniques=(Lora(), GradientCheckpointing())))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = (each for each in tokens if each.string.strip() and each.type != tokenize.COMMENT)
    assert len({each.start[0] for each in code if not each.string.startswith('"""')}) <= 35


def test_ruff_finds_nothing_and_formats_nothing(source_of, tmp_path, subtests):
    """By its defaults; a function of ours is as wide as it is in its file, up to 120 characters."""
    sources = {f"{name}.py": source_of(name) for name in SEVERAL}
    wide = {file for file, source in sources.items() if "\nclass " in source or source.count("\ndef ") > 2}
    assert not wide & {"baseline.py", "lora.py"}
    for file, source in sources.items():
        (tmp_path / file).write_text(source, encoding="utf-8")
    formats = [(["format", "--check", f"--line-length={width}"], sources.keys() - wide) for width in (88, 100)]
    for options, files in ((["check"], sources), *formats, (["format", "--check", "--line-length=120"], sources)):
        with subtests.test(options=options):
            command = [sys.executable, "-m", "ruff", *options, "--isolated", "--no-cache", *files]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


def test_its_first_lines_say_what_it_needs(source_of, subtests):
    """PEP 723: the packages that are imported, in the versions that are here, and what these load by a name."""
    pattern = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"  # of the specification
    for name in (*SEVERAL, "optimizer made by hand", "workers"):
        with subtests.test(name):
            source = source_of(name)
            (block,) = re.finditer(pattern, source)
            said = tomllib.loads("\n".join(line[2:] for line in block["content"].splitlines()))
            assert (block.start(), block["type"], said["requires-python"]) == (0, "script", ">=3.11")
            pins = (pin.replace("transformers[torch]", "transformers") for pin in said["dependencies"])
            needed = {package: version(package).split("+")[0] for package in packages_behind(source)}
            assert dict(pin.split("==") for pin in pins) == needed


PACKAGES = packages_distributions()


def packages_behind(source):
    """What a script imports, wherever; torch, which the Trainer is made of; and what is imported by its name."""
    modules = {"torch"}
    for node in ast.walk(ast.parse(source)):
        modules |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        modules |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    modules |= {"torchao"} if "import_module(" in source else set()
    modules |= {"bitsandbytes"} if "BitsAndBytesConfig" in source else set()
    tops = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
    return {PACKAGES[top][0] for top in tops}


def test_it_names_files_as_seen_from_where_it_will_run(recipe, tmp_path, monkeypatch):
    """What lies below the working directory is relative to it; elsewhere the whole path is what is found."""
    folder = tmp_path / "here"
    (folder / "texts").mkdir(parents=True)
    shutil.copy(recipe.corpus, folder / "texts" / "play.txt")
    monkeypatch.chdir(folder)
    source = script(replace(recipe, corpus=str(folder / "texts" / "play.txt")))
    assert 'with open("texts/play.txt", encoding=' in source
    assert "on texts/play.txt: baseline." in source
    assert str(folder) not in source
    assert f'"{recipe.model.removeprefix("random:")}"' in source


def test_the_command_prints_nothing_but_the_script(recipe, capsys):
    assert main(["script", recipe.model, "--corpus", recipe.corpus, "--technique", "lora=rank:3"]) == 0
    captured = capsys.readouterr()
    compile(captured.out, "script", "exec")
    assert "r=3," in captured.out
    assert main(["script", recipe.model, "--corpus", "missing.txt"]) == 2


def test_a_small_vocabulary_gets_the_tokenizer_that_a_run_takes(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = script(
        Recipe("random:mistralai/Mistral-7B-v0.1", corpus=str(text_file))
    )  # 32,000 tokens, GPT-2's ids go up to 50,256
    assert f'AutoTokenizer.from_pretrained("{MODELS / "gpt2-tiny"}"' in unbroken(source)
    assert 'AutoConfig.for_model("mistral", vocab_size=32000,' in unbroken(source)
    assert "loss_type" not in source  # which Mistral's class sets


def test_sizes_and_dropout_are_spelled_out(text_file):
    source = script(Recipe(model="random:gpt2-medium", corpus=str(text_file), dropout=0.2))
    assert 'AutoConfig.for_model("gpt2", n_embd=1024, n_layer=24, n_head=16, resid_pdrop=0.2,' in unbroken(source)
    assert "learning_rate=5e-05," in source


def test_an_adapter_is_refused_with_the_cure(recipe):
    kept = run(replace(recipe, steps=1) | Lora(rank=1), device="cpu", save="adapter")
    with pytest.raises(ConfigurationError, match="is an adapter. Save the model as 'merged'"):
        script(replace(recipe, model=kept.model_path))
