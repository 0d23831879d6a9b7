"""Models and arguments that cannot be used. More on folders, the hub and weights: tests/test_models.py."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.base.paths import MODELS
from workbench.journal.record import read_all
from workbench.models.source import locate
from workbench.training.run import run


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def tiny(folder: Path) -> Path:
    return Path(shutil.copytree(MODELS / "gpt2-tiny", folder / "model"))


def changed(name: str, content: bytes | str | None):
    def make(folder: Path) -> str:
        path = tiny(folder) / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path.parent)

    return make


def cut(folder: Path) -> str:
    path = tiny(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    return str(path.parent)


def remote_code(folder: Path) -> str:
    model = tiny(folder)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "mine.py").write_text(f"open({str(folder / 'trapped')!r}, 'w')")
    return str(model)


def configured(**changed):
    def make(folder: Path) -> str:
        model = tiny(folder)
        config = json.loads((model / "config.json").read_text()) | changed
        (model / "config.json").write_text(json.dumps(config))
        return str(model)

    return make


def piped(name: str):
    def make(folder: Path) -> str:
        path = tiny(folder) / name
        path.unlink()
        os.mkfifo(path)
        return str(path.parent)

    return make


def adapter(weights: str | None = "adapter_model.safetensors", base: str = "gpt2-tiny", config: str | None = None):
    def make(folder: Path) -> str:
        path = folder / "adapter"
        path.mkdir()
        written = {"peft_type": "LORA", "base_model_name_or_path": base or str(path)}
        (path / "adapter_config.json").write_text(config if config is not None else json.dumps(written))
        if weights:
            from safetensors.numpy import save_file

            save_file({}, path / weights)
        return str(path)

    return make


FAULTS = {
    "./nope": (lambda _: "./nope", ("is neither an existing folder nor a hub id", "Known without a download: gpt2-t")),
    "a file": (lambda _: "/etc/hostname", ("'/etc/hostname' is a file. Give the folder of a causal",)),
    "nothing": (lambda _: "random:", ("is neither an existing folder",)),
    "too long": (lambda _: "x/" * 3000, ("is neither an existing folder",)),
    "nobody's home": (lambda _: "~nobody-here/x/y", ("is neither an existing folder",)),
    "an empty folder": (lambda folder: str(folder), ("has no config.json",)),
    "no weights": (changed("model.safetensors", None), ("no *.safetensors weights", "train from new weights")),
    "cut weights": (cut, ("model.safetensors is damaged or cut off", "save it again")),
    "empty weights": (changed("model.safetensors", b""), ("is damaged or cut off",)),
    "text as weights": (changed("model.safetensors", "hello " * 99), ("is damaged or cut off",)),
    "broken config": (changed("config.json", "{"), ("the config of", "cannot be used")),
    "another kind": (changed("config.json", '{"model_type": "bert"}'), ("is a 'bert', which is not a causal",)),
    "broken tokenizer": (changed("tokenizer.json", "{"), ("the tokenizer of", "Save it again")),
    "another tokenizer": (changed("tokenizer.json", None), ("has embeddings for 4096 tokens, but its tokenizer",)),
    "half the layers": (configured(n_layer=2), ("do not suit its config", "is too much", "again, together")),
    "heads that do not divide": (
        configured(n_head=7),
        ("the config of", "must be divisible by num_heads", "Correct it"),
    ),
    "dropout 5": (configured(resid_pdrop=5.0), ("resid_pdrop is 5.0, which is not from 0 to 1", "Correct it")),
    "layers as text": (configured(n_layer="4"), ("expected int, got str", "Correct it")),
    "a pipe for a config": (piped("config.json"), ("config.json is not a file that can be read", "Put the files")),
    "a pipe for weights": (piped("model.safetensors"), ("model.safetensors is not a file that can be read",)),
    "a name with a dash": (
        lambda _: "gpt2-",
        ("'gpt2-' is neither an existing folder nor a hub id (", "Known without a"),
    ),
    "a name with two": (lambda _: "gpt2--medium", ("nor a hub id (Cannot have -- or .. in repo_id",)),
    "remote code": (remote_code, ("brings code of its own, which the workbench does not run",)),
    "adapter without weights": (adapter(None), ("has no adapter_model.safetensors; pickled ones are not read",)),
    "adapter of itself": (adapter(base=""), ("is for another adapter. Save it as 'merged'",)),
    "broken adapter": (adapter(config="{"), ("the adapter_config.json of", "Save the adapter again")),
    "adapter without base": (
        adapter(config='{"peft_type": "LORA"}'),
        ("does not name its base: base_model_name_or_path in its adapter_config.json is empty",),
    ),
    "adapter whose base is gone": (
        adapter(config='{"peft_type": "LORA", "base_model_name_or_path": "./gone"}'),
        ("'./gone' is neither an existing folder", "It is the base that the adapter "),
    ),
}


def test_it_is_refused_before_a_model_loads(tmp_path, recipe, refused, subtests):
    for number, (fault, (make, reasons)) in enumerate(FAULTS.items()):
        with subtests.test(fault):
            folder = tmp_path / str(number)
            folder.mkdir()
            name = make(folder)
            refused(partial(replace, recipe, model=name), [name, "--corpus", recipe.corpus], ("model: ", *reasons))
            assert not (folder / "trapped").exists()


def test_a_pickle_is_never_opened(tmp_path, recipe):
    """Neither alone nor beside whole weights."""
    model = tiny(tmp_path)
    for name in ("pytorch_model.bin", "adapter_model.bin", "optimizer.pt"):
        (model / name).write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    run(replace(recipe, model=str(model), steps=1), device="cpu")
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="no \\*.safetensors weights"):
        locate(str(model))
    assert not (tmp_path / "trapped").exists()


ARGUMENTS = {
    "batch 0": ({"effective_batch_size": 0}, ["--batch-size", "0"], "effective_batch_size must be an integer of at l"),
    "batch as text": ({"effective_batch_size": "8"}, ["--batch-size", "eight"], "effective_batch_size must be an int"),
    "rate as text": ({"learning_rate": "1e-3"}, ["--learning-rate", "fast"], "learning_rate must be a number"),
    "negative rate": ({"learning_rate": -1.0}, ["--learning-rate", "-1"], "learning_rate must be a number of at least"),
    "infinite rate": ({"learning_rate": float("inf")}, ["--learning-rate", "inf"], "learning_rate must be a number"),
    "rate nan": ({"learning_rate": float("nan")}, ["--learning-rate", "nan"], "learning_rate must be a number"),
    "no steps": ({"steps": 0}, ["--steps", "0"], "steps must be an integer of at least 1"),
    "half a step": ({"steps": 0.5}, ["--steps", "0.5"], "steps must be an integer of at least 1"),
    "one token": (
        {"sequence_length": 1},
        ["--sequence-length", "1"],
        "sequence_length must be an integer of at least 2",
    ),
    "beyond the positions": ({"sequence_length": 129}, ["--sequence-length", "129"], "beyond the 128 positions"),
    "dropout 1": ({"dropout": 1.0}, ["--dropout", "1"], "dropout must be a number of at least 0.0 and at most 0.9"),
    "seed -1": ({"seed": -1}, ["--seed", "-1"], "seed must be an integer of at least 0"),
    "a huge batch": ({"effective_batch_size": 10**6}, ["--batch-size", str(10**6)], "but a batch needs 1000000"),
}


def test_an_argument_is_refused_before_a_model_loads(recipe, refused, subtests):
    for fault, (fields, flags, reason) in ARGUMENTS.items():
        with subtests.test(fault):
            refused(partial(replace, recipe, **fields), [recipe.model, "--corpus", recipe.corpus, *flags], (reason,))


TECHNIQUES = {
    "unknown": ("loraa", "no technique 'loraa'. Known: "),
    "unknown setting": ("lora=r:8", "lora has no setting 'r'. Known: rank"),
    "rank 0": ("lora=rank:0", "lora: rank must be an integer of at least 1"),
    "rank as text": ("lora=rank:eight", "lora: rank must be an integer"),
    "accumulation 0": ("gradient_accumulation=steps:0", "gradient_accumulation: steps must be an integer of at least"),
    "does not divide": ("gradient_accumulation=steps:3", "a batch of 8 cannot be split into 3"),
    "no such type": ("mixed_precision=dtype:fp8", "mixed_precision: dtype must be one of"),
    "no value": ("lora=rank", "lora"),
    "rank 100000": (
        "lora=rank:100000",
        "lora: rank 100000 is more than the width of the smallest matrix that it adapts, 64",
    ),
    "rank 2^62": (f"dora=rank:{2**62}", f"dora: rank {2**62} is more than the width of the smallest matrix"),
    "a long prefix": (
        "prefix_tuning=virtual_tokens:97",
        "with the 97 positions that prefix_tuning takes is beyond the 128",
    ),
    "a prompt 2^62": (f"prompt_tuning=virtual_tokens:{2**62}", "Take fewer of them."),
}


def test_a_technique_is_refused_before_a_model_loads(recipe, no_model, earlier, capsys, runs_folder, subtests):
    """The Python API's own: tests/test_recipe.py, tests/techniques."""
    arguments = [recipe.model, "--corpus", recipe.corpus, "--sequence-length", "32"]
    for fault, (technique, reason) in TECHNIQUES.items():
        with subtests.test(fault):
            assert main(["run", *arguments, "--technique", technique]) == 2
            message = capsys.readouterr().err
            assert message.startswith("error: ")
            assert reason in message.splitlines()[0]
            assert [record.id for record in read_all(runs_folder)] == [earlier.id]


def test_an_option_of_a_run_that_cannot_be_used(recipe, no_model, runs_folder):
    for options, words in (({"save": "whole"}, "save must be one of"), ({"device": "tpu"}, "is not one of")):
        with pytest.raises(ConfigurationError, match=words):
            run(recipe, **{"device": "cpu", **options})
    assert not read_all(runs_folder)
