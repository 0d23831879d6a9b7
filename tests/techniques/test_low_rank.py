"""What LoRA, DoRA and QLoRA share. What each of them adds has a test of its own."""

import pytest
from transformers import GPT2Config, LlamaConfig, OPTConfig, Phi3Config

from workbench.errors import ConfigurationError
from workbench.models.family import family_of
from workbench.techniques import REGISTRY, Dora, Lora, Qlora
from workbench.techniques.low_rank import LowRank

GPT2 = family_of(GPT2Config())

RELATIVES = [Lora, Dora, Qlora]


def test_it_is_a_base_and_no_technique_itself():
    assert {cls for cls in REGISTRY.values() if issubclass(cls, LowRank)} == set(RELATIVES)


@pytest.mark.parametrize("cls", RELATIVES)
def test_an_unknown_matrix_is_refused_in_the_techniques_own_name(cls):
    words = f"^{cls.name}: gpt2 has no matrix 'q_proj'. Choose from c_attn, c_fc, c_proj, joined by .+, or take all-lin"
    with pytest.raises(ConfigurationError, match=words):
        cls(targets="c_attn+q_proj").check_config(GPT2Config())


@pytest.mark.parametrize(
    ("targets", "config", "matrices"),
    [
        ("auto", GPT2Config(), ["c_attn"]),
        ("auto", LlamaConfig(), ["q_proj", "v_proj"]),
        ("auto", Phi3Config(), ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]),  # PEFT says nothing of it
        ("all-linear", GPT2Config(), ["c_attn", "c_fc", "c_proj"]),
        ("all-linear", OPTConfig(), ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"]),
    ],
    ids=str,
)
def test_what_is_adapted_depends_on_the_kind_of_model(targets, config, matrices):
    assert Lora(targets=targets).matrices(family_of(config)) == matrices


@pytest.mark.parametrize("cls", RELATIVES)
def test_two_of_them_are_never_on_together(cls):
    assert cls.brings & cls.forbids


@pytest.mark.parametrize("targets", ["c_attn", "+".join(GPT2.matrices)])
def test_peft_gets_what_the_settings_say(targets, gpt2_folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config.from_pretrained(gpt2_folder))
    used = Lora(rank=3, alpha=7.0, dropout=0.1, targets=targets).applied_to(model).peft_config["default"]
    assert (used.r, used.lora_alpha, used.lora_dropout, used.task_type) == (3, 7.0, 0.1, "CAUSAL_LM")
    assert used.target_modules == set(targets.split("+"))
    assert used.fan_in_fan_out
