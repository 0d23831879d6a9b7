"""The whole life of a run: the same walk predicted on an emulated card and measured here."""

import json
import mmap
from dataclasses import replace
from pathlib import Path

import pytest
from measured_life import measure_life, resident_peak

from workbench import Recipe
from workbench.__main__ import main
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import place
from workbench.models.load import load_config
from workbench.models.source import locate
from workbench.prediction.life import predict_life, predict_with_life
from workbench.prediction.phases import Habits
from workbench.prediction.predict import EMULATOR, predict
from workbench.techniques import GradientCheckpointing, Lora, MixedPrecision, Optimizer, OptimizerOffloading, Padding

pytestmark = [pytest.mark.xdist_group("emulated")]


def on_a_card(test):
    return pytest.mark.dear(pytest.mark.usefixtures("emulator")(test))


PHASES = ["load", "first step", "steady step", "evaluate", "generate", "checkpoint", "resume", "save"]
TINY = Recipe(model="gpt2-tiny", effective_batch_size=8, sequence_length=128)
LARGE = Recipe(model="random:gpt2", effective_batch_size=8, sequence_length=1024)
KEEPING = Habits(prediction_loss_only=False)
ROW = 128 * load_config(locate("gpt2-tiny")).vocab_size * 4  # bytes of the logits of one held-out row


@pytest.fixture(scope="module")
def measured():
    return measure_life(TINY, "cpu", Habits())


def peaks(life):
    return {peak.phase: peak for peak in getattr(life, "peaks", life)}


def bytes_of(life, name="allocated_bytes"):
    return {phase: getattr(peak, name) for phase, peak in peaks(life).items()}


# ---- on an emulated card ----


@on_a_card
def test_what_is_predicted_is_what_this_machine_measures_but_for_the_workspaces_of_the_gpu(measured):
    """cuBLAS has one for each of two threads, the second from the first backward pass on."""
    predicted, workspace = predict_life(TINY, "t4", Habits()), gpu("t4").cublas_workspace_bytes
    assert list(peaks(predicted)) == list(peaks(measured)) == PHASES
    expected = {"load": 0, "first step": 1, "resume": 1, "save": 2}
    for phase, size in bytes_of(measured).items():
        assert bytes_of(predicted)[phase] - workspace * expected.get(phase, 2) == pytest.approx(size, rel=0.025), phase
    assert not predicted.refused


@on_a_card
def test_a_step_of_a_life_is_the_step_of_a_prediction():
    recipe = LARGE | GradientCheckpointing() | MixedPrecision(dtype="fp16")
    life, step = predict_life(recipe, "t4", Habits()), predict(recipe, "t4", engine=EMULATOR)
    assert peaks(life)["steady step"].allocated_bytes == pytest.approx(step.peak_allocated_bytes, rel=1e-3)
    weights = 4 * step.parameters
    host, device = bytes_of(life, "host_bytes"), bytes_of(life)
    assert host["checkpoint"] == host["save"] == pytest.approx(weights, rel=1e-3)
    assert host["resume"] == pytest.approx(2 * weights, rel=1e-3)  # both states of Adam, on their way to the device
    assert device["checkpoint"] == pytest.approx(3 * weights, rel=0.02)
    assert device["generate"] < device["evaluate"] < device["steady step"] == pytest.approx(device["resume"], rel=0.01)


@on_a_card
def test_kept_logits_grow_with_the_held_out_rows_on_the_device_or_on_the_host():
    few, many, plain = (replace(KEEPING, held_out_rows=64), replace(KEEPING, held_out_rows=128), Habits())
    moved = replace(many, eval_accumulation_steps=1)
    few, many, plain, moved = (peaks(predict_life(TINY, "t4", h))["evaluate"] for h in (few, many, plain, moved))
    assert many.allocated_bytes - few.allocated_bytes == pytest.approx(2 * 64 * ROW, rel=0.01)  # before and after a cat
    assert many.host_bytes == pytest.approx(128 * ROW, rel=0.01)
    assert moved.allocated_bytes < plain.allocated_bytes + 8 * ROW
    assert moved.host_bytes == pytest.approx(2 * 128 * ROW, rel=0.01)
    assert plain.host_bytes < 2**20


@on_a_card
def test_an_evaluation_that_does_not_fit_is_cured_by_what_it_says():
    recipe, habits = replace(TINY, evaluation_batch_size=1024), replace(KEEPING, held_out_rows=4096)
    life = predict_life(recipe, "t4", habits)
    assert life.refused == ("evaluate",)
    assert predict(recipe, "t4", engine=EMULATOR).fits  # who asks for the step alone
    assert not predict_with_life(recipe, "t4", habits).fits
    assert "fits   NO (evaluate)" in str(life)
    assert "prediction_loss_only:true, or eval_accumulation_steps:1" in str(life)
    for cure in (Habits(held_out_rows=4096), replace(habits, eval_accumulation_steps=1)):
        assert not predict_life(recipe, "t4", cure).refused
    together = predict_life(replace(TINY, evaluation_batch_size=8192), "t4", Habits(held_out_rows=8192))
    assert "For the evaluation try a recipe with evaluation_batch_size=1" in str(together)
    one_by_one = predict_life(replace(TINY, evaluation_batch_size=1), "t4", Habits(held_out_rows=8192))
    assert not one_by_one.refused
    assert "For the evaluation" not in str(one_by_one)


@on_a_card
def test_smaller_batches_and_a_cache_left_out_need_less():
    lean = predict_life(replace(TINY, evaluation_batch_size=1), "t4", Habits(max_new_tokens=64, use_cache=False))
    usual = predict_life(TINY, "t4", Habits(max_new_tokens=64))
    assert bytes_of(lean)["evaluate"] < bytes_of(usual)["evaluate"]
    assert bytes_of(lean)["generate"] != bytes_of(usual)["generate"]
    assert bytes_of(lean)["steady step"] == bytes_of(usual)["steady step"]


@on_a_card
def test_an_adapter_is_merged_and_what_cannot_be_resumed_is_not():
    adapted = predict_life(TINY | Lora(), "t4", Habits())
    assert list(peaks(adapted)) == PHASES
    assert bytes_of(adapted, "host_bytes")["checkpoint"] < bytes_of(adapted, "host_bytes")["save"]
    offloaded = predict_life(TINY | OptimizerOffloading(), "t4", Habits())
    assert list(peaks(offloaded)) == [phase for phase in PHASES if phase not in ("checkpoint", "resume")]


@on_a_card
def test_states_on_the_host_are_counted_on_and_the_longest_example_comes_again(subtests):
    """The loop over tensors reads on the host how many steps were taken."""
    for technique in (Optimizer(kind="adamw_foreach"), Padding()):
        with subtests.test(technique=technique.name):
            needed = bytes_of(predict_life(TINY | technique, "t4", Habits()))
            assert needed["resume"] == pytest.approx(needed["steady step"], rel=0.06)


@on_a_card
def test_the_command_line_shows_the_phases(capsys):
    words = ["predict", "gpt2-tiny", "--gpu", "t4", "--life"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [peak["phase"] for peak in found["peaks"]] == PHASES
    assert found["fits"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{phase} " in shown for phase in PHASES)
    assert "\n  fits   yes: " in shown


# ---- everywhere ----


def test_the_peak_of_the_host_is_what_was_touched_since_the_last_call(measured):
    """Which phase of a life has the highest, nothing promises: pages that lay free before are used again unseen."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("only Linux tells the peak of a process, and lets it be forgotten")
    before = resident_peak()
    with mmap.mmap(-1, 2**26) as pages:
        for _ in range(2**6):
            pages.write(bytes(2**20))
    assert resident_peak() - before == pytest.approx(2**26, abs=2**24)
    assert resident_peak() - before < 2**24
    assert max(bytes_of(measured, "host_bytes").values()) > 0


def test_a_measured_checkpoint_holds_what_adam_holds_and_is_resumed(measured):
    found = bytes_of(measured)
    assert found["checkpoint"] == pytest.approx(3 * found["load"], rel=0.02)
    assert found["resume"] == pytest.approx(found["steady step"], rel=0.02)


def test_settings_are_refused_by_name(subtests):
    refused = {
        "eval_accumulation_steps:0": "life: eval_accumulation_steps must be an integer of at least 1",
        "prediction_loss_only:maybe": "life: prediction_loss_only must be true or false",
        "logits:kept": "life has no setting 'logits'. Known: prediction_loss_only",
    }
    for text, message in refused.items():
        with subtests.test(text=text), pytest.raises(ConfigurationError, match=message):
            Habits.parse(text)


def test_more_new_tokens_than_a_sequence_has_are_refused_before_anything_is_started():
    with pytest.raises(ConfigurationError, match="max_new_tokens must be below the sequence_length, 128, got 128"):
        predict_life(TINY, "t4", Habits(max_new_tokens=128))


def test_without_the_emulator_nothing_is_invented(monkeypatch, capsys):
    def missing():
        raise UnavailableError("emulator: not here. make emulator")

    monkeypatch.setattr(place, "stub_folder", missing)
    assert main(["predict", "gpt2-tiny", "--gpu", "l4", "--life"]) == 3
    assert "make emulator" in capsys.readouterr().err


def test_options_that_do_not_go_together_are_refused(subtests, capsys):
    for options in (["--settings", "use_cache:no"], ["--life", "--padding"]):
        with subtests.test(options=options):
            assert main(["predict", "gpt2-tiny", *options]) == 2
            assert "--life" in capsys.readouterr().err


def test_the_cpu_has_no_life():
    with pytest.raises(ConfigurationError, match="life: the phases are predicted for GPUs. Name one"):
        predict_life(TINY, "cpu", Habits())
