"""What is known to be impossible before anything is predicted."""

import pytest

from workbench.base.errors import ConfigurationError
from workbench.prediction.predict import SHADOW, predict, why_not
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Lora, MixedPrecision

ASKED = Recipe(model="gpt2", effective_batch_size=8, sequence_length=1024)  # what the panel begins with
REASONS = {
    "prefix_tuning": "sequence_length 1024 with the 20 positions that prefix_tuning takes is beyond the 1024",
    "prompt_tuning": "sequence_length 1024 with the 20 positions that prompt_tuning takes is beyond the 1024",
    "pure_bf16": "needs compute capability 8.0 or newer",
    "torch_compile": "torch_compile needs an emulated GPU and Triton",
}


@pytest.fixture
def shadow(monkeypatch):
    """As where the emulator is not set up."""
    monkeypatch.setenv("WORKBENCH_ENGINE", SHADOW)


@pytest.mark.usefixtures("shadow")
def test_four_techniques_cannot_be_had_for_gpt2_on_a_t4(subtests):
    refused = {}
    for name, technique in REGISTRY.items():
        first, *_ = (*technique.variants((7, 5)), technique())
        try:
            reason = why_not(ASKED | first, "T4")
        except ConfigurationError:  # it does not go with the recipe
            continue
        if reason:
            refused[name] = reason
    assert refused.keys() == REASONS.keys()
    for name, reason in refused.items():
        with subtests.test(name=name):
            assert REASONS[name] in reason
    with pytest.raises(ConfigurationError, match="predict: pure_bf16 needs"):  # if it is asked all the same
        predict(ASKED | REGISTRY["pure_bf16"](), "t4")


@pytest.mark.usefixtures("shadow")
def test_what_another_card_or_another_setting_can_do_is_not_refused():
    assert why_not(ASKED | REGISTRY["pure_bf16"](), "h100") == ""
    assert why_not(ASKED | MixedPrecision(dtype="fp16"), "t4") == ""
    assert "compute capability 8.0" in why_not(ASKED | MixedPrecision(dtype="bf16"), "t4")
    assert why_not(ASKED | Lora(), "cpu") == ""
    assert "settings of PyTorch's allocator for CUDA" in why_not(ASKED | REGISTRY["allocator"](), "cpu")


def test_a_package_that_is_not_installed_is_no_fault_of_the_card(monkeypatch):
    monkeypatch.setattr("workbench.techniques.qlora.find_spec", lambda name: None)
    assert why_not(ASKED | REGISTRY["qlora"](compute="float32"), "t4") == ""


def test_a_model_whose_positions_nobody_knows_here_is_not_refused(tmp_path):
    assert why_not(Recipe(model="user/model", sequence_length=4096), "t4") == ""
    assert "beyond the 1024 positions of gpt2-tiny" in why_not(Recipe(model="gpt2-tiny", sequence_length=4096), "t4")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    assert "beyond the 64 positions" in why_not(Recipe(model=f"random:{tmp_path}"), "t4")
