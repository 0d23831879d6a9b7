import pytest
import torch

from workbench.errors import ConfigurationError, UnavailableError
from workbench.run import world as devices


def test_the_cpu_is_always_there_and_named_with_its_threads():
    assert devices.pick_device("cpu") == torch.device("cpu")
    assert devices.describe_device(torch.device("cpu")).endswith(f"(cpu, {torch.get_num_threads()} threads)")


def test_without_a_name_a_gpu_is_preferred(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.pick_device().type == "cuda"


def test_without_a_gpu_it_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert devices.pick_device().type == "cpu"


def test_an_unknown_kind_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="device: 'gpu' is not one of cuda, mps, cpu"):
        devices.pick_device("gpu")


def test_a_device_that_is_not_there_is_no_reason_to_take_another(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match=r"PyTorch sees no cuda device on this machine. Use --device cpu"):
        devices.pick_device("cuda")
