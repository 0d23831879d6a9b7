"""A technique by its name and settings, as text. What every registered one declares: test_contract.py."""

import pytest

from workbench.base.errors import ConfigurationError
from workbench.techniques import REGISTRY, Lora, parse_technique, technique
from workbench.techniques.optimizer import KINDS
from workbench.techniques.registry import _class_of, in_words


def test_the_form_of_the_command_line(subtests):
    for text, expected in (
        ("lora", Lora()),
        ("lora=", Lora()),
        ("lora=rank:4", Lora(rank=4)),
        ("lora=rank:4,alpha:8", Lora(rank=4, alpha=8.0)),
        ("lora= rank : 4 , targets : c_attn+c_fc", Lora(rank=4, targets="c_attn+c_fc")),
    ):
        with subtests.test(text):
            assert parse_technique(text) == expected


def test_what_cannot_be_read_is_named_with_the_cure(subtests):
    for text, message in (
        ("lorra", f"There is no technique 'lorra'. Known: {', '.join(sorted(REGISTRY))}."),
        ("", "There is no technique ''. Known: "),
        ("lora=ranc:4", "lora has no setting 'ranc'. Known: rank, alpha, dropout, targets."),
        ("lora=rank:four", "lora: rank must be an integer of at least 1, got 'four'."),
        ("lora=rank:0", "lora: rank must be an integer of at least 1, got 0."),
        ("lora=rank=4", "lora: 'rank=4' is not a setting. Write name:value, as in lora=rank:8,alpha:16."),
        ("lora=8", "lora: '8' is not a setting. Write name:value"),
        ("lora=rank:4,rank:8", "lora: rank is given twice"),
        ("lora=alpha:inf", "lora: alpha must be"),
        ("mixed_precision=dtype:fp8", "mixed_precision: dtype must be one of bf16, fp16, got 'fp8'."),
    ):
        with subtests.test(text):
            with pytest.raises(ConfigurationError) as caught:
                parse_technique(text)
            assert message in str(caught.value)


def test_by_name_and_settings():
    assert technique("lora", rank=4) == Lora(rank=4)
    with pytest.raises(ConfigurationError, match="lora has no setting 'r'. Known: rank"):
        technique("lora", r=4)
    with pytest.raises(ConfigurationError, match="There is no technique 'prefix'. Known: "):
        technique("prefix")


def test_a_label_in_words_says_what_people_say():
    assert in_words("baseline") == "baseline"
    assert in_words("attention(implementation=eager)") == "eager attention"
    assert in_words("lora(rank=4) + optimizer(kind=adamw_8bit)") == "LoRA (rank=4) + 8-bit AdamW"
    assert in_words("gradient_checkpointing + ia3 + torch_compile") == "gradient checkpointing + (IA)³ + torch.compile"
    assert in_words("a_technique_of_a_notebook(x=1)") == "a_technique_of_a_notebook(x=1)"


def test_every_optimizer_has_a_name_of_its_own():
    names = [in_words(f"optimizer(kind={kind})") for kind in KINDS]
    assert len(set(names)) == len(KINDS)
    assert not [name for name in names if "kind=" in name]


def test_a_mistyped_key_of_a_card_is_refused():
    with pytest.raises(TypeError, match=r"cards.toml: lora has titel, which no technique has."):
        _class_of("lora", {"numerics": "exact", "titel": "LoRA"})
