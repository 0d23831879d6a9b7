"""Which engine makes a prediction: the emulator where it is set up, unless one is named; and what it leaves out."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from workbench import Recipe
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.gpus.emulator import place
from workbench.prediction import emulated
from workbench.prediction.predict import EMULATOR, SHADOW, engine_for, predict

SMALL = Recipe(model="gpt2-tiny", effective_batch_size=4, sequence_length=64, steps=4)


def test_the_emulator_is_taken_where_it_is_set_up(monkeypatch):
    monkeypatch.delenv("WORKBENCH_ENGINE", raising=False)
    monkeypatch.setattr(place, "is_set_up", lambda: True)
    assert engine_for("t4") == EMULATOR
    assert engine_for("cpu") == SHADOW
    monkeypatch.setattr(place, "is_set_up", lambda: False)
    assert engine_for("t4") == SHADOW


def test_the_engine_can_be_named(monkeypatch):
    monkeypatch.setattr(place, "stub_folder", Path)
    monkeypatch.setenv("WORKBENCH_ENGINE", SHADOW)
    assert engine_for("t4") == SHADOW
    assert engine_for("t4", EMULATOR) == EMULATOR
    monkeypatch.setenv("WORKBENCH_ENGINE", EMULATOR)
    assert engine_for("cpu") == SHADOW
    with pytest.raises(ConfigurationError, match="predict: engine 'oracle' is not one of emulator, shadow"):
        engine_for("t4", "oracle")
    with pytest.raises(ConfigurationError, match="predict: the emulator plays GPUs"):
        engine_for("cpu", EMULATOR)


def test_asked_for_and_not_set_up_it_says_how(monkeypatch):
    def missing():
        raise UnavailableError("emulator: not here. make emulator")

    monkeypatch.setattr(place, "stub_folder", missing)
    with pytest.raises(UnavailableError, match="make emulator"):
        predict(SMALL, "t4", engine=EMULATOR)


def test_of_the_micro_batches_of_every_step_the_first_two_and_the_last_are_trained(monkeypatch):
    monkeypatch.setattr(emulated, "DEVICE", torch.device("cpu"))
    trained = []
    accelerator = SimpleNamespace(sync_gradients=False)
    trainer = SimpleNamespace(accelerator=accelerator, training_step=trained.append)
    training_step = emulated.few_micro_batches(trainer)
    for step in range(2):
        for micro_batch in range(6):
            accelerator.sync_gradients = micro_batch == 5
            training_step((step, micro_batch))
    assert trained == [(0, 0), (0, 1), (0, 5), (1, 0), (1, 1), (1, 5)]
