"""Models that are not what they say: refused in one sentence with a cure, before anything is loaded."""

import json
import os
import resource
import shutil
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count, product

import huggingface_hub.constants
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.base.paths import MODELS
from workbench.models.belongs import check_vocabulary
from workbench.models.load import check_trainable, load_config, load_model, load_tokenizer, quiet, save_model
from workbench.models.source import locate, locate_config
from workbench.prediction.rows import blocks_for, material_for
from workbench.recipe import Recipe
from workbench.techniques import Dora, Ia3, Lora, PrefixTuning, PromptTuning, Qlora
from workbench.training.job import prepare
from workbench.training.world import World

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOGETHER = "Copy or save weights and config again, together, with save_pretrained()."
CORRECT = "Correct it, or save config.json again with save_pretrained()."


@dataclass
class Folder:
    """A copy of the embedded model, to be changed."""

    path: object

    def config(self, **changed):
        config = json.loads((self.path / "config.json").read_text()) | changed
        (self.path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        return self

    def write(self, name, content):
        (self.path / name).unlink(missing_ok=True)
        if content is not None:
            (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return self

    def weights(self, change, name=WEIGHTS):
        kept = change(load_file(self.path / name))
        save_file({n: tensor.contiguous() for n, tensor in kept.items()}, self.path / name, metadata={"format": "pt"})
        return self

    def shards(self, index, without=()):
        tensors = load_file(self.path / WEIGHTS)
        (self.path / WEIGHTS).unlink()
        files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
        for file in {*files.values()} - {*without}:
            save_file(
                {n: t for n, t in tensors.items() if files[n] == file}, self.path / file, metadata={"format": "pt"}
            )
        (self.path / INDEX).write_text(index if isinstance(index, str) else json.dumps(index(files)))
        return self

    def check(self, random=""):
        """As `prepare` does."""
        source = locate(f"{random}{self.path}")
        with quiet():
            config, tokenizer = load_config(source), load_tokenizer(source)
        check_vocabulary(source, config, tokenizer)
        check_trainable(source, config)
        return source, config

    def refused(self, *words, random=""):
        with pytest.raises(ConfigurationError) as caught:
            self.check(random)
        error = caught.value
        assert error.__suppress_context__ or error.__context__ is None  # no foreign traceback
        assert str(error).startswith("model: ")
        assert "\n" not in str(error)
        assert len(str(error)) < 700
        for word in (str(self.path), *words):
            assert word in str(error)


@pytest.fixture
def new_folder(tmp_path):
    """A function that copies the embedded model, to be changed, each time to a new place; the copy before it goes."""
    numbers = count()

    def copy():
        number = next(numbers)
        shutil.rmtree(tmp_path / f"model-{number - 1}", ignore_errors=True)
        return Folder(shutil.copytree(MODELS / "gpt2-tiny", tmp_path / f"model-{number}"))

    return copy


# ---- a config that is not that of the weights ----

OTHERS = {
    "half the layers": ({"n_layer": 2}, "'transformer.h.2.attn.c_attn.weight' is too much; "),
    "twice the layers": ({"n_layer": 8}, "'transformer.h.4.attn.c_attn.bias' is missing; 48 such"),
    "one layer more": ({"n_layer": 5}, "'transformer.h.4.attn.c_attn.bias' is missing; 12 such"),
    "by its other name": ({"num_hidden_layers": 2}, "is too much"),
    "half the width": ({"n_embd": 96}, "has the shape [576], not [288]"),
    "twice the width": ({"n_embd": 384}, "has the shape [576], not [1152]"),
    "more tokens": ({"vocab_size": 5000}, "'transformer.wte.weight' has the shape [4096, 192], not [5000, 192]"),
    "fewer positions": ({"n_positions": 128}, "'transformer.wpe.weight' has the shape [1024, 192], not [128, 192]"),
    "more positions": ({"n_positions": 2048}, "'transformer.wpe.weight' has the shape [1024, 192], not [2048, 192]"),
    "another inner width": ({"n_inner": 100}, "'transformer.h.0.mlp.c_fc.bias' has the shape [768], not [100]"),
    "a head of its own": ({"tie_word_embeddings": False}, "'lm_head.weight' is missing; 1 such"),
    "cross attention": ({"add_cross_attention": True}, "crossattention.c_attn.bias' is missing"),
}


def test_weights_of_another_config_are_refused(new_folder, subtests):
    for name, (config, reason) in OTHERS.items():
        with subtests.test(name):
            new_folder().config(**config).refused("do not suit its config", reason, TOGETHER)


def test_fewer_tokens_than_the_tokenizer_has(new_folder):
    folder = new_folder().config(vocab_size=4000)
    folder.refused("has embeddings for 4000 tokens, but its tokenizer's ids go up to 4095")


def of_old(tensors):
    """As GPT-2's first checkpoints: no prefix, and the mask's constants beside the weights."""
    found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for i in range(4):
        found[f"h.{i}.attn.bias"] = torch.ones(1, 1, 8, 8)
        found[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    return found


SUITABLE = {
    "as it is": lambda tensors: tensors,
    "without the prefix": lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()},
    "an old file": of_old,
    "an old file with the prefix": lambda tensors: {f"transformer.{name}": t for name, t in of_old(tensors).items()},
    "with the tied head": lambda tensors: {**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()},
    "fp32": lambda tensors: {name: tensor.float() for name, tensor in tensors.items()},
    "bf16": lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()},
}


def test_weights_of_this_config_are_taken_however_they_are_stored(new_folder, subtests):
    for name, change in SUITABLE.items():
        with subtests.test(name):
            new_folder().weights(change).check()


def without(name):
    return lambda tensors: {n: tensor for n, tensor in tensors.items() if n != name}


UNSUITABLE = {
    "one tensor more": (lambda t: {**t, "foo": torch.zeros(1)}, "'foo' is too much; 1 such"),
    "a classifier": (lambda t: {**t, "score.weight": torch.zeros(2, 192)}, "'score.weight' is too much"),
    "one tensor less": (without("transformer.ln_f.bias"), "'transformer.ln_f.bias' is missing; 1 such"),
    "no embeddings": (without("transformer.wte.weight"), "'lm_head.weight' is missing"),
    "no tensors": (lambda _: {}, "is missing"),
    "compiled": (lambda t: {f"_orig_mod.{name}": tensor for name, tensor in t.items()}, "is missing"),
    "transposed": (lambda t: {n: x.T if x.ndim == 2 else x for n, x in t.items()}, "has the shape [576, 192], not"),
    "another head": (lambda t: {**t, "lm_head.weight": torch.zeros(7, 7)}, "'lm_head.weight' has the shape [7, 7]"),
}  # fmt: skip


def test_weights_that_are_not_those_of_the_config_are_named(new_folder, subtests):
    for name, (change, reason) in UNSUITABLE.items():
        with subtests.test(name):
            new_folder().weights(change).refused("do not suit its config", reason, TOGETHER)


def test_nothing_is_read_but_the_headers(new_folder):
    """A file of 2 GB that is nearly all hole takes neither time nor memory."""
    tiny = new_folder()
    tiny.config(vocab_size=500_000, n_embd=1024, n_head=8, n_layer=1, n_positions=8)
    shapes = {
        name: tensor.shape for name, tensor in model_on_meta(tiny).state_dict().items() if name != "lm_head.weight"
    }
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at := at + shape.numel() * 4]}
    text = json.dumps(header).encode()
    tiny.write(WEIGHTS, struct.pack("<Q", len(text)) + text)
    os.truncate(tiny.path / WEIGHTS, 8 + len(text) + at)
    assert at > 2_000_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tiny.check()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KB


def model_on_meta(folder):
    from transformers import AutoConfig, GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(AutoConfig.from_pretrained(folder.path))


# ---- configs ----

NUMBERS = {
    "n_head": [5, 7, 0, -1, "6", None, True, 1e300, 10**30], "n_layer": [0, -1, 10**9, 2**63, "4", None, True, 4.0],
    "n_embd": [0, -192, 10**30, "192", None, 191], "vocab_size": [0, -1, None, "4096", 10**12],
    "n_positions": [0, -1, None, 10**12], "resid_pdrop": [5.0, -1, "0.1", None, float("nan"), float("inf"), [0.1]],
    "embd_pdrop": [1.5, -0.1, 2**70], "attn_pdrop": [5, {}, "x"], "layer_norm_epsilon": [0.0, -1.0, float("nan"), "x"],
    "initializer_range": [-1.0, float("nan"), float("inf"), None], "activation_function": ["nope", 7, None, []],
    "n_inner": [-1, "x", 2.5], "dtype": ["float7", "x.y"], "use_cache": ["x"], "eos_token_id": ["x"],
    "attn_implementation": ["nope"], "id2label": [[]], "quantization_config": [[]], "num_labels": ["x"],
}  # fmt: skip


def test_a_value_that_no_model_can_be_made_with_is_refused(new_folder, subtests):
    for field, values in NUMBERS.items():
        for value in values:
            with subtests.test(field=field, value=value):
                new_folder().config(**{field: value}).refused("the config of", "cannot be used (", CORRECT)


def test_new_weights_are_refused_for_the_same_values(new_folder, subtests):
    """Of each field the first: the config is read in the same way."""
    for field, values in NUMBERS.items():
        with subtests.test(field=field, value=values[0]):
            folder = new_folder().config(**{field: values[0]})
            folder.refused("the config of", "cannot be used (", CORRECT, random="random:")


def test_a_number_out_of_range_is_named_with_its_range(new_folder):
    new_folder().config(embd_pdrop=1.5).refused("embd_pdrop is 1.5, which is not from 0 to 1")


TEXTS = {
    "a list": "[]", "nothing": "", "half": "{", "null": "null", "a number": "7", "a text": '"gpt2"', "{}": "{}",
    "brackets": "[" * 200_000, "objects": '{"a":' * 200_000, "a mark": '\ufeff{"model_type": "gpt2"}', "NaN": "NaN",
    "two": "{}{}", "an empty type": '{"model_type": ""}', "a type as a list": '{"model_type": [1]}',
    "no type": '{"n_layer": 4, "n_embd": 192}', "an infinite number": '{"model_type": "gpt2", "n_layer": 1e999}',
    "bytes": b"\xff\xfe{}",
}  # fmt: skip


def test_a_config_that_is_none_is_refused(new_folder, subtests):
    for name, text in TEXTS.items():
        with subtests.test(name):
            new_folder().write("config.json", text).refused("the config of", "cannot be used (", CORRECT)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.lists(st.integers(), max_size=2),
    st.sampled_from([10**9, -1, 0, 2**63, 192, 96, "gpt2", "float16", {}, [[]], 1e308]),
)  # fmt: skip
FIELDS = [*json.loads((MODELS / "gpt2-tiny" / "config.json").read_text()), "n_ctx", "auto_map", "torch_dtype"]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(changed=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_whatever_a_config_says_it_is_taken_or_refused_in_one_sentence(tmp_path, changed):
    shutil.rmtree(tmp_path / "any", ignore_errors=True)
    folder = Folder(shutil.copytree(MODELS / "gpt2-tiny", tmp_path / "any")).config(**changed)
    with suppress(ConfigurationError):
        source, config = folder.check()
        assert (config.n_layer, config.n_embd, config.vocab_size, config.n_positions) == (4, 192, 4096, 1024)
        load_model(source, config)
        return
    folder.refused()  # outside of any handler, so that what it raises has no context but its own


# ---- files that are none ----

KINDS = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link to nothing": lambda path: os.symlink("/nowhere/x", path),
    "a link to itself": lambda path: os.symlink(path, path),
    "an endless device": lambda path: os.symlink("/dev/zero", path),
}


def test_what_is_no_file_is_never_opened(new_folder, subtests):
    for name in ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        for kind, make in KINDS.items():
            with subtests.test(name=name, kind=kind):
                tiny = new_folder().write(name, None)
                make(tiny.path / name)
                reason = f"{name} is not a file that can be read"
                tiny.refused("cannot be used (", reason, "Put the files themselves there")


def test_a_pointer_of_git_lfs_is_named_with_its_cure(new_folder, subtests):
    """As a clone without Git LFS has them."""
    for name in (WEIGHTS, "tokenizer.json"):
        with subtests.test(name=name):
            tiny = new_folder().write(name, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
            tiny.refused(f"{name} only names a file of Git LFS: git lfs pull fetches it")


def test_a_tokenizer_of_sentencepiece_names_the_package_that_is_missing(new_folder, monkeypatch):
    tiny = new_folder().write("tokenizer.json", None).write("tokenizer.model", b"\n")
    monkeypatch.setattr("workbench.models.load.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="needs the package sentencepiece. Install it"):
        load_tokenizer(locate(str(tiny.path)))


def test_a_file_of_another_user_is_named(new_folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != WEIGHTS)  # root may read everything
    new_folder().refused(f"{WEIGHTS} is not a file that can be read", "give yourself the right to read them")


def test_a_header_that_lies_about_its_length_is_damage(new_folder, subtests):
    content = (MODELS / "gpt2-tiny" / WEIGHTS).read_bytes()[8:]
    for length in (0, 1, 10**8, 2**31, 2**60, 2**64 - 1):
        with subtests.test(length=length):
            tiny = new_folder().write(WEIGHTS, struct.pack("<Q", length) + content)
            tiny.refused("model.safetensors is damaged or cut off")


def test_weights_in_several_files_are_taken(new_folder):
    new_folder().shards(lambda files: {"metadata": {}, "weight_map": files}).check()


INDEXES = {
    "outside": lambda files: {"weight_map": {**files, "x": "../../etc/passwd"}},
    "absolute": lambda files: {"weight_map": {**files, "x": "/etc/passwd"}},
    "another name": lambda files: {"weight_map": {**files, "x": "model-00009-of-00002.safetensors"}},
    "no map": lambda files: {"metadata": {}},
    "a list": lambda files: {"weight_map": list(files)},
    "numbers": lambda files: {"weight_map": {**files, "x": 7}},
    "lists": lambda files: {"weight_map": {**files, "x": [7]}},
    "nulls": lambda files: {"weight_map": {**files, "x": None}},
    "half": "{",
    "brackets": "[" * 200_000,
}  # fmt: skip


def test_an_index_that_names_other_files_is_refused(new_folder, subtests):
    for name, index in INDEXES.items():
        with subtests.test(name):
            new_folder().shards(index).refused(f"{INDEX} does not fit its folder (", "Copy or save it again.")


def test_an_index_of_which_a_file_is_missing_is_refused(new_folder):
    tiny = new_folder()
    tiny.shards(lambda files: {"weight_map": files}, without=["model-00002-of-00002.safetensors"])
    tiny.refused("'model-00002-of-00002.safetensors' is not a file there")


def test_an_index_that_forgets_a_file_is_refused(new_folder):
    tiny = new_folder()
    tiny.shards(lambda files: {"metadata": {}, "weight_map": {n: f for n, f in files.items() if "1-of" in f}})
    tiny.refused("do not suit its config", "is missing")


def test_a_tokenizer_that_cannot_be_read_is_named(new_folder, subtests):
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
        for text in ("[]", "", "{", "null", "[" * 200_000, b"\xff\xfe"):
            with subtests.test(name=name, text=text[:20]):
                cure = "Save it again with save_pretrained()"
                new_folder().write(name, text).refused("the tokenizer of", "cannot be read (", cure)


def test_the_largest_id_counts_not_the_number_of_tokens(new_folder):
    """One token fewer, one id more: as many as the model has embeddings for."""
    tiny = new_folder()
    tokenizer = json.loads((tiny.path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max((token for token in vocabulary if token != "<|endoftext|>"), key=vocabulary.get)
    vocabulary[last] += 100
    tiny.write("tokenizer.json", json.dumps(tokenizer))
    assert len(load_tokenizer(locate(str(tiny.path)))) == 4096
    tiny.refused("has embeddings for 4096 tokens, but its tokenizer's ids go up to 4194")


def test_an_older_tokenizer_in_two_files_is_the_models_own(new_folder):
    tiny = new_folder()
    bpe = json.loads((tiny.path / "tokenizer.json").read_text())["model"]
    merges = "\n".join(merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"])
    tiny.write("tokenizer.json", None).write("tokenizer_config.json", None)
    tiny.write("vocab.json", json.dumps(bpe["vocab"])).write("merges.txt", f"#version: 0.2\n{merges}").check()
    assert len(load_tokenizer(locate(str(tiny.path)))) == 4096


# ---- adapters ----


@pytest.fixture(scope="module")
def saved_adapter(tmp_path_factory):
    """A function that saves a technique's adapter of the embedded model, once."""

    @cache
    def save(technique):
        source, path = locate("gpt2-tiny"), tmp_path_factory.mktemp("adapter")
        adapted = technique.apply_to(load_model(source, load_config(source)))
        save_model(adapted, load_tokenizer(source), source, "adapter", path)
        return path

    return save


@pytest.fixture
def adapter(tmp_path, saved_adapter):
    """A function that copies a saved adapter to a new place, its settings changed."""
    numbers = count()

    def copy(technique=None, **changed):
        path = shutil.copytree(saved_adapter(technique or Lora()), tmp_path / f"adapter-{next(numbers)}")
        config = json.loads((path / "adapter_config.json").read_text()) | changed
        (path / "adapter_config.json").write_text(json.dumps(config))
        return Folder(path)

    return copy


def test_an_adapter_of_its_base_is_taken(adapter, subtests):
    for technique in (Lora(targets="c_attn+c_fc+c_proj"), Dora(), Ia3()):
        with subtests.test(technique.name):
            adapter(technique).check()
            adapter(technique, init_lora_weights="pissa").check()


def test_an_adapter_with_biases_is_taken(adapter, new_folder):
    folder = adapter(bias="all", base_model_name_or_path=f"random:{new_folder().path}")
    assert folder.check()[0].adapter


ADAPTERS = {
    "unknown matrices": ({"target_modules": ["nope"]}, "Target modules {'nope'} not found"),
    "no matrices": ({"target_modules": []}, "`target_modules`"),
    "a broken pattern": ({"target_modules": "("}, "unterminated"),
    "rank 0": ({"r": 0}, "`r` should be a positive integer value but the value passed is 0"),
    "rank -1": ({"r": -1}, "`r` should be a positive"),
    "rank as text": ({"r": "8"}, "not supported between"),
    "no rank": ({"r": None}, "not supported between"),
    "a huge rank": ({"r": 10**9}, "size mismatch"),
    "a rank beyond all": ({"r": 2**70}, "empty()"),
    "another rank": ({"r": 4}, "size mismatch"),
    "dropout 5": ({"lora_dropout": 5.0}, "dropout probability has to be between 0 and 1, but got 5.0"),
    "alpha as text": ({"lora_alpha": "x"}, "unsupported operand"),
    "fewer layers": ({"layers_to_transform": [0]}, "h.1.attn.c_attn.lora_A.weight' is too much"),
    "another kind": ({"peft_type": "IA3"}, "is missing"),
    "with lengths": ({"use_dora": True}, "lora_magnitude_vector"),
}


def test_an_adapter_that_does_not_suit_its_base_is_refused(adapter, subtests):
    together = "Copy or save weights and base again, together, with save_pretrained()."
    for name, (changed, reason) in ADAPTERS.items():
        with subtests.test(name):
            adapter(**changed).refused("do not suit its base (", reason, together)


def test_an_adapter_of_another_base_is_refused(adapter, new_folder, subtests):
    bases = (
        ("fewer layers", {"n_layer": 2}, "is too much; 4 such"),
        ("more layers", {"n_layer": 8}, "is missing; 8 such"),
        ("another width", {"n_embd": 96}, "size mismatch"),
    )
    for name, config, reason in bases:
        with subtests.test(name):
            base = new_folder().config(**config)
            adapter(base_model_name_or_path=f"random:{base.path}").refused("do not suit its base (", reason)


def test_an_adapter_whose_base_does_not_suit_its_own_config_names_the_base(adapter, new_folder):
    name = str(new_folder().config(n_layer=2).path)
    with pytest.raises(ConfigurationError, match=f"the weights of '{name}' do not suit its config"):
        adapter(base_model_name_or_path=name).check()


def test_an_adapter_config_that_is_none_is_refused(adapter, subtests):
    for text in ("[]", "", "{", "null", "7", "[" * 200_000):
        with subtests.test(text[:20]):
            folder = adapter().write("adapter_config.json", text)
            folder.refused("the adapter_config.json of", "Save the adapter again.")


def test_an_adapter_of_no_known_kind_is_refused(adapter, subtests):
    for peft_type in ("NOPE", None, 7):
        with subtests.test(peft_type=peft_type):
            adapter(peft_type=peft_type).refused("the adapter_config.json of", "Save the adapter again.")


# ---- names ----

NAMES = {
    "gpt2-", "-a", "gpt2--medium", "a..b", "ünï", "模型", "x.git", "a/x.git", "g" * 97, "a" * 97 + "/b", "a/b/c",
    ".", "..", "", " ", "gpt2 ", "gpt2 large", "gpt2\n", "\n", "a\tb", "a\0b", "x" * 5000, "a/" * 2500, "\udcff",
    "a/\udcff", "https://huggingface.co/gpt2", "~nobody-here", "/", "//", "./", "a/", "/a", "gpt2/", ".git",
    "a\\b", "%00", "gpt2?", "*", "gpt2@", "gpt2@a..b", "\x1b[31m",
}  # fmt: skip


def test_a_name_that_the_hub_does_not_allow_is_refused(tmp_path, monkeypatch, subtests):
    """For a run and for a prediction, with weights and without."""
    monkeypatch.chdir(tmp_path)
    for name in sorted(NAMES, key=ascii):
        for find, random in product((locate, locate_config), ("", "random:")):
            with subtests.test(name=ascii(name)[:60], find=find.__name__, random=random):
                with pytest.raises(ConfigurationError) as caught:
                    find(random + name)
                message = str(caught.value)
                assert message.startswith("model: ")
                assert "Known without a download: gpt2-tiny" in message or "has no config.json" in message
                assert len(message) < 700
                assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.text(min_size=1, max_size=120) | st.from_regex(r"[a-zA-Z0-9._/-]{1,100}", fullmatch=True))
def test_any_name_is_found_refused_or_out_of_reach(offline, name):
    for find in (locate, locate_config):
        with suppress(ConfigurationError, UnavailableError):
            find(name)


def test_a_folder_named_like_a_size_of_gpt2_hides_nothing(tmp_path, monkeypatch, subtests):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "gpt2-xl"):
        with subtests.test(name):
            shutil.copytree(MODELS / "gpt2-tiny", tmp_path / name)
            cure = f"Write ./{name} for the folder, or openai-community/{name} for the hub's."
            with pytest.raises(ConfigurationError, match=f"'{name}' is GPT-2 on the hub, and a folder here. {cure}"):
                locate(name)
            assert locate(f"./{name}").location == str(tmp_path / name)
            assert locate_config(name).random  # a prediction is of the published size


def test_a_folder_that_the_hub_could_have_too_is_taken_and_said(tmp_path, monkeypatch, capsys, subtests):
    monkeypatch.chdir(tmp_path)
    for name in ("distilgpt2", "mine/model"):
        with subtests.test(name):
            shutil.copytree(MODELS / "gpt2-tiny", tmp_path / name)
            assert locate(name).location == str(tmp_path / name)
            remark = f"model: {name} is the folder of that name here, not the hub's; ./{name} says so\n"
            assert capsys.readouterr().out == remark
            for plain in (f"./{name}", str(tmp_path / name)):
                locate(plain)
            assert capsys.readouterr().out == ""


# ---- ranks ----


@pytest.fixture
def config(model_name):
    return load_config(locate(model_name))  # 64 wide


def test_a_rank_beyond_the_smallest_matrix_is_refused(config, subtests):
    for technique, rank in product((Lora, Dora, Qlora), (65, 100_000, 10**9, 2**62)):
        with subtests.test(technique=technique.name, rank=rank):
            message = rf"{technique.name}: rank {rank} is more than the width .*, 64\. Use at most that; 8"
            with pytest.raises(ConfigurationError, match=message):
                technique(rank=rank).check_config(config)
            technique(rank=64).check_config(config)


def test_the_inner_width_counts_where_it_is_a_side(config, subtests):
    for targets in ("c_fc", "c_proj", "c_attn+c_proj"):
        with subtests.test(targets):
            config.n_inner = 16
            with pytest.raises(ConfigurationError, match=r"rank 17 is more than .*, 16\."):
                Lora(rank=17, targets=targets).check_config(config)
            Lora(rank=17).check_config(config)  # attention's matrices have no such side
            config.n_inner = 1000
            Lora(rank=64, targets=targets).check_config(config)


def test_a_rank_is_refused_wherever_the_technique_is_applied():
    recipe = Recipe(model="gpt2-tiny") | Lora(rank=193)
    for check in (lambda: material_for(recipe, blocks_for(recipe)), lambda: prepare(recipe, World.find("cpu"))):
        with pytest.raises(ConfigurationError, match="rank 193 is more than the width"):
            check()


def test_a_rank_or_a_number_of_virtual_tokens_that_is_none_is_refused(subtests):
    techniques = {
        Lora: "rank",
        Dora: "rank",
        Qlora: "rank",
        PrefixTuning: "virtual_tokens",
        PromptTuning: "virtual_tokens",
    }
    for (technique, field), value in product(techniques.items(), (0, -1, 1.5, "8", None, True)):
        with subtests.test(technique=technique.name, value=value):
            message = f"{technique.name}: {field} must be an integer of at least 1"
            with pytest.raises(ConfigurationError, match=message):
                technique(**{field: value})
