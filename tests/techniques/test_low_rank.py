"""What LoRA, DoRA and QLoRA share. What each of them adds has a test of its own."""

import pytest

from workbench.errors import ConfigurationError
from workbench.techniques import REGISTRY, Dora, Lora, Qlora
from workbench.techniques.low_rank import MATRICES, LowRank

RELATIVES = [Lora, Dora, Qlora]


def test_it_is_a_base_and_no_technique_itself():
    assert {cls for cls in REGISTRY.values() if issubclass(cls, LowRank)} == set(RELATIVES)


@pytest.mark.parametrize("cls", RELATIVES)
def test_an_unknown_matrix_is_refused_in_the_techniques_own_name(cls):
    with pytest.raises(ConfigurationError, match=f"^{cls.name}: GPT-2 has no matrix 'q_proj'. Choose from c_attn"):
        cls(targets="c_attn+q_proj")


@pytest.mark.parametrize("cls", RELATIVES)
def test_two_of_them_are_never_on_together(cls):
    assert cls.brings & cls.forbids


@pytest.mark.parametrize("targets", ["c_attn", "+".join(MATRICES)])
def test_the_model_gets_what_the_script_says(targets, gpt2_folder):
    from peft import LoraConfig
    from transformers import GPT2Config, GPT2LMHeadModel

    technique = Lora(rank=3, alpha=7.0, dropout=0.1, targets=targets)
    model = GPT2LMHeadModel(GPT2Config.from_pretrained(gpt2_folder))
    asked = {"LoraConfig": LoraConfig, "model": None, "get_peft_model": lambda model, adapter: adapter}
    exec("\n".join(technique.lines()), asked)
    used, written = technique.adapted(model).peft_config["default"], asked["adapter"]
    for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "fan_in_fan_out", "task_type"):
        assert getattr(used, name) == getattr(written, name), name
    assert used.target_modules == set(targets.split("+"))
