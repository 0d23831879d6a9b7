"""From a model's name to its weights: what is found, what the hub says, and what is saved comes back."""

import json
import random
import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub.constants
import numpy as np
import pytest
import torch

from workbench.base.errors import ConfigurationError, UnavailableError, WorkbenchError
from workbench.models.belongs import check_vocabulary
from workbench.models.family import positions
from workbench.models.generate import generate
from workbench.models.gpt2 import gpt2_tokenizer, learning_rate
from workbench.models.load import check_trainable, load_config, load_model, load_tokenizer, save_model
from workbench.models.source import ModelSource, check_positions, locate, locate_config, resolve_auto
from workbench.techniques import Lora
from workbench.texts.corpus import load_corpus

NOWHERE = "nobody/no-such-model-at-all"


@pytest.fixture(scope="module")
def source(model_name):
    return locate(model_name)


@pytest.fixture
def model(source):
    return load_model(source, load_config(source)).eval()


@pytest.fixture
def tokenizer(source):
    return load_tokenizer(source)


@pytest.fixture
def saved(tmp_path, model, tokenizer, source):
    """A folder with weights, as `save` writes it."""
    folder = tmp_path / "saved"
    save_model(model, tokenizer, source, "merged", folder)
    return folder


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hub(monkeypatch, empty_cache):
    """Point the hub to an address on this machine."""

    def at(port):
        endpoint = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)

    return at


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 33).view(2, 16)).logits


# ---- names ----


def test_the_embedded_model_is_found_and_is_what_it_says(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source = locate("gpt2-tiny")
    config = load_config(source)
    assert not source.random
    assert (config.vocab_size, config.n_layer, config.n_embd) == (4096, 4, 192)
    assert len(load_tokenizer(source)) == 4096


def test_the_embedded_model_was_trained():
    source = locate("gpt2-tiny")
    model, tokenizer = load_model(source, load_config(source)).eval(), load_tokenizer(source)
    ids = tokenizer(
        "It was a fine morning, and she went out to walk in the garden with her sister.", return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < 5.5  # 8.3 = ln 4096 without training


def test_a_random_model_from_a_folder(gpt2_folder, source):
    assert source == ModelSource(f"random:{gpt2_folder}", str(gpt2_folder), random=True)


def test_a_folder_with_weights(saved):
    assert locate(str(saved)) == ModelSource(str(saved), str(saved), random=False)


def test_auto_says_which_and_why(capsys):
    assert resolve_auto("auto", "cpu") == "gpt2-tiny"
    assert "auto is gpt2-tiny (embedded" in "".join(capsys.readouterr())
    assert resolve_auto("auto", "cuda") == "gpt2"
    assert "auto is gpt2 (from the hub" in "".join(capsys.readouterr())
    assert resolve_auto("gpt2-xl", "cpu") == "gpt2-xl"
    assert "".join(capsys.readouterr()) == ""


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"has no config.json. Give the folder of a causal language model"):
        locate(str(tmp_path))


OTHERS = {
    "m.gguf": "llama.cpp", "modules.json": "sentence-transformers", "model_index.json": "diffusers",
    "params.json": "in their maker's own form", "checkpoint-9/adapter_config.json": "give .*checkpoint-9",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_of_another_kind_is_named(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigurationError, match=f"has no config.json. .*{OTHERS[name]}"):
        locate(str(tmp_path))


def test_what_cannot_be_trained_is_said_before_its_weights_are_missed(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ConfigurationError, match="is a 't5', which is not a causal language model"):
        locate(str(tmp_path))


def test_new_weights_and_predictions_need_no_file_of_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert locate_config(str(tmp_path)).random
    assert locate(f"random:{tmp_path}").random
    with pytest.raises(ConfigurationError, match="git lfs pull"):
        locate(str(tmp_path))


def test_a_folder_without_weights_is_refused_with_the_random_form_as_a_cure(gpt2_folder):
    with pytest.raises(ConfigurationError) as caught:
        locate(str(gpt2_folder))
    assert "has no *.safetensors weights" in str(caught.value)
    assert f"random:{gpt2_folder}" in str(caught.value)


def test_pickled_weights_are_not_taken(tmp_path, gpt2_folder):
    folder = tmp_path / "pickled"
    shutil.copytree(gpt2_folder, folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ConfigurationError, match=r"has no \*.safetensors weights"):
        locate(str(folder))


def test_what_is_neither_folder_nor_hub_id_is_refused_at_once(subtests):
    message = r"is neither an existing folder nor a hub id \(.*\)\. Known without a download: gpt2-tiny"
    for name in ("./nope", "/no/such/folder", "~/nope/nope", "a/b/c", "random:./nope", "gpt2 large"):
        with subtests.test(name), pytest.raises(ConfigurationError, match=message):
            locate(name)


# ---- the hub ----


class Answer(BaseHTTPRequestHandler):
    """What the hub says of any repository; whether the user may read it is asked at a second address."""

    def do_GET(self):  # noqa: N802
        status, code = self.server.status, ""
        if status == "gated":
            status, code = (403, "GatedRepo") if self.path.endswith("/auth-check") else (200, "")
        about = {"id": NOWHERE, "sha": "0" * 40, "siblings": [], "gated": self.server.status == "gated" and "auto"}
        body = json.dumps(about).encode()
        self.send_response(status)
        for name, value in {"X-Error-Code": code, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    found = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def test_a_model_the_hub_does_not_have_is_a_spelling_mistake(hub, server, subtests):
    hub(server.server_port)
    for status in (401, 403, 404):
        server.status = status
        message = rf"has no public model '{NOWHERE}' \(HTTP {status}\). Check the spelling"
        with subtests.test(status=status), pytest.raises(ConfigurationError, match=message):
            locate(NOWHERE)


def test_a_name_that_is_nearly_a_known_one_is_guessed(hub, server):
    hub(server.server_port)
    server.status = 404
    with pytest.raises(ConfigurationError, match=r"Check the spelling \(did you mean gpt2-medium\?\)"):
        locate("gpt2-medum")


def test_of_a_gated_one_the_page_of_its_conditions_is_told(hub, server, subtests):
    hub(server.server_port)
    server.status = "gated"
    for kind, owner, page in (("model", "model:", ""), ("dataset", "corpus:", "datasets/")):
        with subtests.test(kind):
            with pytest.raises(ConfigurationError) as caught:
                locate(NOWHERE) if kind == "model" else load_corpus(NOWHERE)
            address = f"http://127.0.0.1:{server.server_port}/{page}{NOWHERE}"
            message = f"{NOWHERE!r} is gated on the Hugging Face hub (HTTP 403). Accept its conditions at {address}"
            assert str(caught.value).startswith(owner)
            assert f"{message} and log in with `hf auth" in str(caught.value)


def refused_within_five_seconds(name, fault="cannot be reached"):
    start = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        locate(name)
    assert time.monotonic() - start < 5
    assert f"{name!r} is not in the local cache, and the Hugging Face hub {fault}" in str(caught.value)
    assert "gpt2-tiny (embedded) or random:gpt2 (no download)" in str(caught.value)


def test_messages_name_a_model_as_it_was_typed(empty_cache, monkeypatch, subtests):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("gpt3", NOWHERE, "x" * 500, "~nobody/x", "a" * 500 + "/b"):
        for find in (locate, locate_config):
            with subtests.test(name=name[:20], find=find.__name__):
                with pytest.raises(WorkbenchError) as caught:
                    find(name)
                assert str(caught.value).startswith(f"model: {name!r:.90}")
                assert f"random:{name:.20}" not in str(caught.value)


def test_a_known_name_is_not_taken_for_a_mistyped_one(empty_cache, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnavailableError, match=r"\)\. Check the network, or use gpt2-tiny"):
        locate("gpt2")
    with pytest.raises(UnavailableError, match=r"\(did you mean gpt2\?\) and the network"):
        locate("gpt3")


def test_offline_by_order(empty_cache, monkeypatch, subtests):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("gpt2", "gpt2-xl", NOWHERE):
        with subtests.test(name):
            refused_within_five_seconds(name)
    with pytest.raises(UnavailableError, match="cannot be reached"):
        locate(f"random:{NOWHERE}")


def test_a_hub_that_refuses_the_connection(hub):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hub(port)
    refused_within_five_seconds(NOWHERE)


def test_a_hub_that_never_answers(hub, monkeypatch):
    monkeypatch.setattr("workbench.base.hub.HUB_PATIENCE_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hub(silent.getsockname()[1])
        refused_within_five_seconds(NOWHERE, "does not answer in time")


def test_a_hub_whose_name_cannot_be_found(monkeypatch, empty_cache):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.invalid")
    refused_within_five_seconds(NOWHERE)


def test_a_failing_hub_is_not_taken_for_a_working_one(hub, server):
    hub(server.server_port)
    server.status = 503
    with pytest.raises(UnavailableError, match=r"the Hugging Face hub answers HTTP 503\. .* or random:gpt2"):
        locate(NOWHERE)


# ---- config, length, vocabulary ----


def test_what_is_no_decoder_that_transformers_has_is_refused_with_what_to_do(tmp_path, subtests):
    (tmp_path / "config.json").touch()
    source = locate(f"random:{tmp_path}")
    unknown = "is a 'qwen33', which transformers .* does not know. Did you mean 'qwen3'.*upgrade"
    own_code = {"model_type": "own", "auto_map": {"AutoConfig": "x.Y"}}
    for config, message in (
        ({"model_type": "bert"}, "is a 'bert', which is not a causal language model.*workbench emulate"),
        ({"model_type": "t5"}, "is a 't5', which is not a causal"),
        ({"model_type": "bart"}, "is a 'bart', which is not a causal"),
        ({"model_type": "vit"}, "is a 'vit', which is not a causal"),
        ({"model_type": "qwen33"}, unknown),
        (own_code, "brings code of its own, which .* does not run"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with subtests.test(config["model_type"]), pytest.raises(ConfigurationError, match=message):
            load_config(source)


def test_a_config_that_cannot_be_read_is_named(tmp_path, subtests):
    (tmp_path / "config.json").touch()
    source = locate(f"random:{tmp_path}")
    for text in ("{", "[]", "{}", json.dumps({"model_type": ""})):
        (tmp_path / "config.json").write_text(text)
        with subtests.test(text), pytest.raises(ConfigurationError, match="the config of 'random:"):
            load_config(source)


def test_a_length_beyond_the_positions_is_refused_with_the_longest_that_fits(source):
    config = load_config(source)
    check_positions(source.name, positions(config), 128, {})
    with pytest.raises(
        ConfigurationError, match="sequence_length 129 is beyond the 128 positions of .*Use at most 128"
    ):
        check_positions(source.name, positions(config), 129, {})


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(source):
    config = load_config(source)
    check_vocabulary(source, config, load_tokenizer(source))
    with pytest.raises(ConfigurationError, match="embeddings for 4096 tokens, but its tokenizer's ids go up to 50256"):
        check_vocabulary(source, config, gpt2_tokenizer())


def test_all_sizes_of_gpt2_have_its_vocabulary_and_its_positions(subtests):
    """Their numbers of parameters: test_families.py."""
    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        with subtests.test(name):
            config = load_config(locate(f"random:{name}"))
            assert (config.vocab_size, config.n_positions) == (50257, 1024)


# ---- GPT-2's own tokenizer ----


def test_gpt2s_vocabulary():
    tokenizer = gpt2_tokenizer()
    assert len(tokenizer) == 50257
    assert tokenizer.eos_token_id == 50256
    assert load_tokenizer(locate("random:gpt2-xl")) is tokenizer


def test_the_ids_are_those_of_gpt2(subtests):
    for text, ids in (
        ("Hello world", [15496, 995]),
        ("!", [0]),
        ("\n", [198]),
        ("<|endoftext|>", [50256]),
        ("The quick brown fox jumps over the lazy dog", [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]),
    ):
        with subtests.test(text):
            assert gpt2_tokenizer()(text)["input_ids"] == ids


def test_any_text_comes_back_unchanged(subtests):
    tokenizer = gpt2_tokenizer()
    for text in ("naïve café, 日本語 🙂", "  two  spaces\n\n\ttab ", "don't I'll we've"):
        with subtests.test(text):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


# ---- loading and saving ----


def test_a_random_model_is_the_same_every_time_and_leaves_the_generator_alone(source):
    config = load_config(source)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = load_model(source, config)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    other = load_model(source, config)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert len({p.dtype for p in one.parameters()} | {torch.float32}) == 1


def test_the_type_of_the_weights_can_be_asked_for(source):
    model = load_model(source, load_config(source), dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_checkpoint_in_half_precision_is_loaded_as_fp32(tmp_path, model, tokenizer, source):
    save_model(model.half(), tokenizer, source, "merged", tmp_path / "half")
    half = locate(str(tmp_path / "half"))
    assert {p.dtype for p in load_model(half, load_config(half)).parameters()} == {torch.float32}


def test_saved_and_loaded_a_model_gives_the_same_logits(saved, model):
    source = locate(str(saved))
    again = load_model(source, load_config(source)).eval()
    assert torch.equal(logits(again), logits(model))
    assert again.lm_head.weight is again.transformer.wte.weight
    assert load_tokenizer(source)("some words")["input_ids"]


def test_weights_that_are_cut_off_are_refused(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ConfigurationError, match=r"model: .*model\.safetensors is damaged or cut off .* save it again"):
        locate(str(saved))


def test_weights_with_a_missing_layer_are_refused_and_not_filled_at_random(saved):
    from safetensors.torch import load_file, save_file

    weights = load_file(saved / "model.safetensors")
    del weights["transformer.h.1.attn.c_attn.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    source = locate(str(saved))
    with pytest.raises(
        ConfigurationError, match=r"do not suit its config \('transformer\.h\.1\.attn\.c_attn\.weight' is mis"
    ):
        check_trainable(source, load_config(source))


@pytest.fixture
def adapted(model):
    """With LoRA, and a B that is no longer zero."""
    adapted = Lora(rank=4).apply_to(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    return adapted.eval()


def test_an_adapter_is_saved_alone_and_loaded_on_its_base(tmp_path, adapted, tokenizer, source):
    folder = tmp_path / "adapter"
    expected = logits(adapted)
    save_model(adapted, tokenizer, source, "adapter", folder)
    found = locate(str(folder))
    again = load_model(found, load_config(found)).eval()
    assert found.adapter
    assert (folder / "adapter_model.safetensors").stat().st_size < 20_000
    assert not (folder / "model.safetensors").exists()
    torch.testing.assert_close(logits(again), expected)
    assert not torch.allclose(logits(again), logits(load_model(source, load_config(source)).eval()), atol=1e-3)


def test_an_adapter_is_merged_into_whole_weights(tmp_path, adapted, tokenizer, source):
    expected = logits(adapted)
    save_model(adapted, tokenizer, source, "merged", tmp_path / "merged")
    found = locate(str(tmp_path / "merged"))
    again = load_model(found, load_config(found)).eval()
    assert not found.adapter
    assert not [name for name, _ in again.named_parameters() if "lora" in name]
    torch.testing.assert_close(logits(again), expected)


def test_a_model_without_adapter_cannot_be_saved_as_one(tmp_path, model, tokenizer, source):
    with pytest.raises(ConfigurationError, match="this model has no adapter. Save it as 'merged'"):
        save_model(model, tokenizer, source, "adapter", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


# ---- generating ----


def test_generating_twice_gives_the_same_text_and_touches_no_generator(model, tokenizer):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    one = generate(model, tokenizer, "Once upon a time", 12)
    assert one == generate(model, tokenizer, "Once upon a time", 12)
    assert one.startswith("Once upon a time")
    assert len(one) > len("Once upon a time")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_generating_leaves_the_model_as_it_was(model, tokenizer, subtests):
    for training in (True, False):
        with subtests.test(training=training):
            model.train(training)
            model.config.use_cache = False
            generate(model, tokenizer, "Once", 3)
            assert model.training is training
            assert model.config.use_cache is False
            assert all(p.grad is None for p in model.parameters())


def test_models_have_their_customary_learning_rate():
    names = ("gpt2-tiny", "random:gpt2-tiny", "random:gpt2")
    rates = {name: learning_rate(load_config(locate(name))) for name in names}
    assert rates == {"gpt2-tiny": 1e-3, "random:gpt2-tiny": 1e-3, "random:gpt2": 5e-5}


def test_only_the_config_is_needed_where_nothing_is_loaded(tmp_path):
    load_config(locate("gpt2-tiny")).save_pretrained(tmp_path)
    source = locate_config(str(tmp_path))
    assert source.name == str(tmp_path)
    assert load_config(source).vocab_size == load_config(locate("gpt2-tiny")).vocab_size
