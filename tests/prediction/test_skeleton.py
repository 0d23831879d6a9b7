"""A model without memory."""

import pytest

from workbench.base.errors import ConfigurationError
from workbench.models.load import load_config
from workbench.models.source import locate_config
from workbench.prediction.rows import can_be_skeleton, skeleton


def test_a_skeleton_has_shapes_and_no_memory():
    config = load_config(locate_config("gpt2"))
    model = skeleton(config, dtype="bfloat16", attn_implementation="eager", activation_function="relu")
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert {(p.device.type, str(p.dtype)) for p in model.parameters()} == {("meta", "torch.bfloat16")}
    assert model.config._attn_implementation == "eager"
    assert type(model.transformer.h[0].mlp.act).__name__ == "ReLU"
    assert config.activation_function == "gelu_new"


def test_a_skeleton_refuses_what_acts_on_loading():
    config = load_config(locate_config("gpt2-tiny"))
    with pytest.raises(ConfigurationError, match="quantization_config acts while weights are loaded"):
        skeleton(config, quantization_config=object())
    assert not can_be_skeleton(config, {"quantization_config": object()})
    assert can_be_skeleton(config, {"dtype": "bfloat16", "activation_function": "relu"})
