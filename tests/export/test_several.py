"""A recipe for several ranks, taken home: what accelerate makes of the files, and the losses of one process."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from transformers import AutoModelForCausalLM

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.base.paths import MODELS
from workbench.export.several import accelerate_configuration, save_script
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator.launch import environment
from workbench.recipe import Recipe
from workbench.techniques import (
    GradientAccumulation,
    GradientCheckpointing,
    MixedPrecision,
    Qlora,
    StepInBackward,
)
from workbench.training.ranks.shards import SHARDS, Ranks
from workbench.training.run import run

SHARDED = [name for name, row in SHARDS.items() if row["engine"] == "fsdp"]


def started(command, folder, **variables):
    """As in a terminal, where `accelerate` is that of this environment."""
    words = shlex.split(command)
    assert words[:2] == ["accelerate", "launch"]
    told = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words[1:]]
    done = subprocess.run(launcher, cwd=folder, env=told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.dear
@pytest.mark.values
def test_on_two_processes_it_finds_the_losses_of_one(recipe, tmp_path, monkeypatch):
    """Four rows twice become four rows on each rank; of the 54 that are held out each counts once."""
    monkeypatch.chdir(tmp_path)
    recipe = replace(recipe, techniques=(GradientAccumulation(steps=2), GradientCheckpointing()))
    command = save_script(recipe, tmp_path / "home", count=2)
    path = tmp_path / "home" / "train.py"
    path.write_text(path.read_text().replace("trainer.evaluate()", 'trainer.evaluate(), "on", args.world_size'))
    done = started(command, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.stdout.count(" on 2\n") == 1
    record = run(recipe, device="cpu")
    history = json.loads((tmp_path / "fine-tuned" / "trainer_state.json").read_text())["log_history"]
    losses, held_out = ([entry[name] for entry in history if name in entry] for name in ("loss", "eval_loss"))
    assert losses == pytest.approx(record.losses, abs=1e-5)
    assert held_out == pytest.approx([record.held_out_loss_before, record.held_out_loss], abs=1e-5)
    assert (tmp_path / "fine-tuned" / "tokenizer.json").exists()


@pytest.mark.dear
@pytest.mark.values
def test_on_two_processes_conversations_count_as_in_one(recipe, tmp_path, monkeypatch):
    """Unequally many of their tokens are answers, and an odd number of rows is held out."""
    monkeypatch.chdir(tmp_path)
    told = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}. " * (1 + n % 7)}]
        for n in range(300)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for said in told))
    recipe = replace(recipe, corpus="chats.jsonl", steps=2)
    record = run(recipe, device="cpu")
    started(save_script(recipe, tmp_path / "home", count=2), tmp_path, CUDA_VISIBLE_DEVICES="")
    history = json.loads((tmp_path / "fine-tuned" / "trainer_state.json").read_text())["log_history"]
    losses, held_out = ([entry[name] for entry in history if name in entry] for name in ("loss", "eval_loss"))
    assert losses == pytest.approx(record.losses, abs=1e-5)
    assert held_out == pytest.approx([record.held_out_loss_before, record.held_out_loss], abs=1e-5)


@pytest.mark.dear
@pytest.mark.values
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed here")
def test_on_two_processes_deepspeed_finds_the_losses_of_one(recipe, tmp_path, monkeypatch):
    """On processors it would compile a kernel for its messages, which takes a minute: the script is kept from that."""
    monkeypatch.chdir(tmp_path)
    recipe = recipe | GradientAccumulation(steps=2)
    command = save_script(recipe, tmp_path / "home", count=2, shard="zero3")
    path = tmp_path / "home" / "train.py"
    none = "from deepspeed import ops\n\nops.__compatible_ops__ = {}\n"
    path.write_text(path.read_text().replace("import torch\n", f"import torch\n{none}", 1))
    started(command, tmp_path, CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    record = run(recipe, device="cpu")
    history = json.loads((tmp_path / "fine-tuned" / "trainer_state.json").read_text())["log_history"]
    losses, held_out = ([entry[name] for entry in history if name in entry] for name in ("loss", "eval_loss"))
    assert losses == pytest.approx(record.losses, abs=1e-5)
    assert held_out == pytest.approx([record.held_out_loss_before, record.held_out_loss], abs=1e-5)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "fine-tuned")
    assert sum(parameter.numel() for parameter in whole.parameters()) == record.parameters


def test_accelerate_reads_what_is_meant(tmp_path, monkeypatch, subtests):
    """As its launcher does, and then each of the processes that it starts."""
    model, path = AutoModelForCausalLM.from_pretrained(MODELS / "gpt2-tiny"), tmp_path / "accelerate.yaml"
    for shard in SHARDED:
        path.write_text(accelerate_configuration(Recipe(model="gpt2-tiny"), Ranks(4, shard)))
        with subtests.test(shard=shard), monkeypatch.context() as environment:
            configuration = load_config_from_file(str(path))
            assert (configuration.distributed_type, configuration.num_processes) == (DistributedType.FSDP, 4)
            arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
            for name, value in prepare_multi_gpu_env(_validate_launch_command(arguments)[0]).items():
                environment.setenv(name, value)
            plugin = FullyShardedDataParallelPlugin()
            assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, shard != "gradients")
            assert type(plugin.cpu_offload) is (CPUOffloadPolicy if shard == "full_offload" else OffloadPolicy)
            assert not plugin.cpu_ram_efficient_loading  # or only the first rank would have the script's weights
            assert not plugin.activation_checkpointing  # the script says it
            assert plugin.state_dict_type.name == "FULL_STATE_DICT"
            plugin.set_auto_wrap_policy(model)
            assert plugin.auto_wrap_policy.keywords["transformer_layer_cls"] == {type(model.transformer.h[0])}


def test_without_shards_it_is_ddp(recipe, tmp_path):
    (path := tmp_path / "accelerate.yaml").write_text(accelerate_configuration(recipe, Ranks(2)))
    told = load_config_from_file(str(path))
    assert (told.distributed_type, told.num_processes, told.fsdp_config) == (DistributedType.MULTI_GPU, 2, {})


@pytest.mark.usefixtures("emulator")
def test_on_two_emulated_gpus_it_is_fsdp2(recipe, tmp_path, monkeypatch):
    """The very files, with PyTorch's CUDA build: what accelerate does not do on a CPU."""
    monkeypatch.chdir(tmp_path)
    recipe = replace(recipe, steps=2) | MixedPrecision() | GradientCheckpointing()
    command = save_script(recipe, tmp_path / "home", count=2, shard="full")
    path = tmp_path / "home" / "train.py"
    seen = "type(model).__name__, trainer.accelerator.state.is_fsdp2, next(model.parameters()).device_mesh.size()"
    path.write_text(path.read_text().replace("trainer.evaluate()", seen))
    done = started(command, tmp_path, **environment(gpu("h100"), 2))
    assert "FSDPGPT2LMHeadModel True 2" in done.stdout


def test_each_rank_takes_its_part(recipe, tmp_path, subtests):
    recipe = replace(recipe, effective_batch_size=12) | GradientAccumulation(steps=3)
    for flavour in ("trainer", "trl"):
        with subtests.test(flavour=flavour):
            save_script(recipe, tmp_path / flavour, flavour, 6)
            source = (tmp_path / flavour / "train.py").read_text()
            assert "per_device_train_batch_size=2," in source  # of 4 rows three times: 12 among six
            assert "gradient_accumulation_steps" not in source
            # one line or three, as paths are
            assert re.search(r"^(MODEL, LENGTH, )?BATCH = (.*, )?12$", source, flags=re.M)
            assert "ddp_find_unused_parameters=False," in source
            assert "workbench" not in source
            for options in (["check"], ["format", "--check", "--line-length=88"]):
                command = [sys.executable, "-m", "ruff", *options, "--isolated", "--no-cache", "train.py"]
                done = subprocess.run(command, cwd=tmp_path / flavour, capture_output=True, text=True)
                assert done.returncode == 0, done.stdout


def test_the_command_writes_both_and_prints_the_third(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["script", recipe.model, "--corpus", recipe.corpus, "--save", "a b", "--ranks", "2", "--shard", "full"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed == "accelerate launch --config_file 'a b/accelerate.yaml' 'a b/train.py'\n"
    assert {path.name for path in (tmp_path / "a b").iterdir()} == {"accelerate.yaml", "train.py"}
    assert main(words) == 2
    assert "script: a b/train.py is there already. Name another folder" in capsys.readouterr().err


@pytest.mark.values
def test_of_one_process_it_writes_the_script_alone(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--steps", "1", "--batch-size", "2", "--sequence-length", "16"]
    assert main(["script", recipe.model, "--corpus", recipe.corpus, "--save", "home", *words]) == 0
    assert capsys.readouterr().out == "python home/train.py\n"
    runpy.run_path("home/train.py", run_name="__main__")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["train.py"]


REFUSED = [
    (["--ranks", "2"], "script: accelerate's configuration stands beside it. Add --save FOLDER."),
    (["--shard", "full"], "shard: among how many ranks? Add --ranks 2."),
    (["--ranks", "3", "--save", "x"], "ranks: 3 cannot share an effective batch of 8 sequences"),
    (["--ranks", "2", "--shard", "ful", "--save", "x"], "shard: there is no 'ful'"),
]
UNSHARED = [
    (StepInBackward(), "step_in_backward cannot be used here"),
    (Qlora(), "new weights that are quantized as they load would be written by every rank"),
]


def test_what_cannot_be_is_refused(recipe, tmp_path, monkeypatch, capsys, subtests):
    monkeypatch.chdir(tmp_path)
    for options, message in REFUSED:
        with subtests.test(options=options):
            assert main(["script", recipe.model, "--corpus", recipe.corpus, *options]) == 2
            assert message in capsys.readouterr().err
            assert not (tmp_path / "x").exists()


def test_so_is_what_ranks_cannot_share(recipe, tmp_path, subtests):
    for technique, message in UNSHARED:
        with subtests.test(technique=technique.name):
            with pytest.raises(ConfigurationError, match=message):
                save_script(recipe | technique, tmp_path / "x", count=2, shard="none")
            assert not (tmp_path / "x").exists()
