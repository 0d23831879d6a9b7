"""What lies in a model's folder and does not belong together is refused, or said."""

import json
import shutil
import time
from threading import Event

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from workbench.base.errors import ConfigurationError
from workbench.base.paths import MODELS
from workbench.models import belongs
from workbench.models.gpt2 import gpt2_tokenizer
from workbench.models.load import check_trainable, load_config, load_tokenizer
from workbench.models.source import locate
from workbench.texts import corpus

TEXT = "It was a fine morning, and she went out to walk. " * 50
SMALL = {
    "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(MODELS / "gpt2-tiny", tmp_path / "model")


def check(folder):
    source = locate(str(folder))
    config = load_config(source)
    check_trainable(source, config)
    return belongs.check_tokenizer(source, config, load_tokenizer(source), TEXT)


def with_weights(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def with_tokenizer(folder, tokenizer, **special):
    for path in folder.glob("*token*"):
        path.unlink()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def new(folder, kind, **settings):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **settings)).save_pretrained(folder)


def test_what_belongs_together_has_no_remark(folder):
    assert check(folder) == ()


@pytest.mark.parametrize("number_type", [torch.int8, torch.float8_e4m3fn])
def test_weights_in_integers_or_8_bits_are_refused(folder, number_type):
    with_weights(folder, lambda weights: {name: weight.to(number_type) for name, weight in weights.items()})
    with pytest.raises(ConfigurationError, match="these weights are quantized, and cannot be fine-tuned as they are"):
        check(folder)


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes"])
def test_a_config_that_says_quantized_is_refused(folder, method):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(ConfigurationError, match=rf"says that it is quantized \({method}\)"):
        check(folder)


def test_a_head_that_contradicts_its_tie_is_refused_and_an_equal_one_is_not(folder):
    with_weights(folder, lambda weights: {**weights, "lm_head.weight": weights["transformer.wte.weight"].clone()})
    assert check(folder) == ()
    with_weights(folder, lambda weights: {**weights, "lm_head.weight": weights["lm_head.weight"] + 1})
    with pytest.raises(ConfigurationError, match="the config ties the output layer to the embedding, and the file has"):
        check(folder)


def test_a_text_model_with_other_parts_is_refused_by_name(tmp_path, folder):
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    for kind in ("gemma3", "llama4", "qwen3_5"):
        config = AutoConfig.for_model(kind, text_config={**SMALL, "num_key_value_heads": 2}, vision_config=vision)
        config.save_pretrained(folder)
        with pytest.raises(
            ConfigurationError, match=rf"is a '{kind}': a text model with other parts \(.*vision_config"
        ):
            check(folder)


def test_parts_are_found_beside_the_settings_of_the_text_model_too(folder):
    AutoConfig.for_model("phi4_multimodal").save_pretrained(folder)
    with pytest.raises(ConfigurationError, match=r"with other parts \(audio_config, vision_config\)"):
        check(folder)


def test_a_tokenizer_that_knows_nothing_of_the_text_is_refused(folder):
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "zebra": 1, "[EOS]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with_tokenizer(folder, words, unk_token="[UNK]", eos_token="[EOS]")
    with pytest.raises(ConfigurationError, match=r"does not know the text: .* tokens are '\[UNK\]'"):
        check(folder)


def test_of_a_few_unknown_words_it_is_said_how_many(folder):
    known = {
        word: n for n, word in enumerate(["[UNK]", "[EOS]", *sorted({*TEXT.replace(".", " .").split()} - {"walk"})])
    }
    words = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with_tokenizer(folder, words, unk_token="[UNK]", eos_token="[EOS]")
    assert any("tokens of the text are unknown to it" in remark for remark in check(folder))


def test_a_tokenizer_of_another_family_is_said(tmp_path):
    new(tmp_path / "neox", "gpt_neox", eos_token_id=0, bos_token_id=0)
    config = json.loads((tmp_path / "neox" / "config.json").read_text())
    assert config["eos_token_id"] == 0
    shutil.copy(MODELS / "gpt2-tiny" / "tokenizer.json", tmp_path / "neox")
    (remark,) = check(tmp_path / "neox")
    assert "the config ends a text with token 0" in remark
    assert "it may be another model's" in remark


def test_a_model_of_another_kind_without_a_tokenizer_does_not_get_gpt2s(tmp_path):
    new(tmp_path / "neox", "gpt_neox")
    with pytest.raises(ConfigurationError, match="has no tokenizer. Save the one that belongs to it"):
        load_tokenizer(locate(str(tmp_path / "neox")))


def test_an_expression_of_a_tokenizer_that_explodes_is_named(folder):
    slow = Tokenizer(models.WordLevel({"[EOS]": 0}, unk_token="[EOS]"))
    slow.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    with_tokenizer(folder, slow, eos_token="[EOS]")
    source = locate(str(folder))
    tokenizer = load_tokenizer(source)
    text = "x" * 24
    with pytest.raises(ConfigurationError, match=r"cannot read the text \(PanicException.*retry-limit"):
        belongs.check_tokenizer(source, load_config(source), tokenizer, text)
    with pytest.raises(ConfigurationError, match=r"does not get through the text \(PanicException"):
        list(corpus.in_time(corpus.encode_text([text], tokenizer)))


def test_a_tokenizer_that_does_not_end_has_a_limit(folder, monkeypatch):
    monkeypatch.setattr(belongs, "SAMPLE_S", 0.2)
    monkeypatch.setattr(corpus, "PIECE_S", 0.2)
    ended = Event()

    def endless(text, verbose):
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    endless.eos_token = None
    with pytest.raises(ConfigurationError, match=r"cannot read the text \(it takes longer than 0.2 s\)"):
        belongs.check_tokenizer(locate(str(folder)), None, endless, TEXT)
    assert ended.wait(2)
    with pytest.raises(ConfigurationError, match=r"does not get through the text \(it takes longer than 0.2 s\)"):
        list(corpus.in_time(corpus.encode_text([TEXT], endless)))


def test_a_chat_template_that_does_not_end_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CONVERSATION_S", 0.3)
    tokenizer = gpt2_tokenizer()
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    )
    row = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(row) + "\n") * 40)
    text = corpus.load_corpus(str(tmp_path / "chats.jsonl"))
    with pytest.raises(ConfigurationError, match=r"the chat template cannot be used \(it takes longer than 0.3 s\)"):
        corpus.make_blocks(text, tokenizer, 16, 1)
