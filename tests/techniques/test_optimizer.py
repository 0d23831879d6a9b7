import copy
import gc
import importlib.util
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from workbench.base.categories import Category
from workbench.base.device import Device
from workbench.base.errors import UnavailableError
from workbench.journal.record import Status, read_all
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.techniques import (
    Ia3,
    Lora,
    Numerics,
    Optimizer,
    PureBf16,
)
from workbench.techniques.optimizer import KINDS, use_library
from workbench.training.run import run

NEEDS_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
ADAMW = ("adamw_fused", "adamw_foreach", "adamw_loop")
OTHERS = ("sgd", "sgd_momentum", "adafactor", "adamw_8bit", "muon")


def skip_if_missing(kind):
    if reason := Optimizer(kind=kind).missing(Device("cpu")):
        pytest.skip(reason)


def test_these_are_the_kinds_that_the_trainer_and_pytorch_have_for_a_cpu():
    of_libraries = {name for name, kind in KINDS.items() if kind.call and kind.call.function is use_library}
    assert {*ADAMW, *OTHERS} == {name for name, kind in KINDS.items() if "cpu" in kind.devices} - of_libraries


@pytest.fixture(scope="module")
def parameters(recipe):
    """Names and shapes of the model's parameters."""
    source = locate(recipe.model)
    return {name: p.shape for name, p in load_model(source, load_config(source)).named_parameters()}


def in_a_block(name, shape):
    """Whether it is a matrix of GPT-2's that Muon takes."""
    return len(shape) == 2 and ".h." in name


def state_bytes(kind, name, shape):
    """By hand, from the papers' formulas and bitsandbytes' two exceptions, counters included."""
    n = math.prod(shape)
    if kind == "muon" and in_a_block(name, shape):
        return 4 * n
    if kind == "adamw_8bit" and n >= 4096 and "wte" not in name and "wpe" not in name:
        return 2 * n + 2 * 4 * math.ceil(n / 256)
    if kind == "adamw_8bit":
        return 8 * n
    if kind == "adafactor":
        return 4 * (sum(shape) if len(shape) == 2 else n) + 4  # and the norm of the weights
    return {"sgd": 0, "sgd_momentum": 4 * n}.get(kind, 8 * n + 4)  # and PyTorch's AdamW a step counter


@pytest.mark.parametrize("kind", [*ADAMW, *OTHERS])
def test_the_states_have_the_bytes_of_the_formula_and_nothing_else_changes(recipe, fine_tuned, parameters, kind):
    skip_if_missing(kind)
    by_hand = sum(state_bytes(kind, name, shape) for name, shape in parameters.items())
    by_hand += 2 * 256 * 4 if kind == "adamw_8bit" else 0  # two tables of 256 values, shared by all tensors
    plain, record = fine_tuned(recipe), fine_tuned(recipe | Optimizer(kind=kind))
    measured = record.maximum_by_category[Category.OPTIMIZER_STATES]
    # Adafactor makes its norm anew at each step, and for an instant there are two
    assert measured == by_hand + (4 if kind == "adafactor" else 0)
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.LOGITS_AND_LOSS, Category.ACTIVATIONS):
        assert record.maximum_by_category[category] == plain.maximum_by_category[category]
    if kind not in ADAMW:  # fewer states are a smaller peak
        less = plain.maximum_by_category[Category.OPTIMIZER_STATES] - measured
        assert less > 0
        assert plain.peak_allocated_bytes - record.peak_allocated_bytes == pytest.approx(less, rel=0.01)


def test_muons_scratch_is_that_of_its_largest_matrix(recipe, fine_tuned, parameters):
    """Of (m, n), m <= n: the update in fp32, its bf16 copy before and after a product, and two squares of m in bf16."""
    inside = [sorted(shape) for name, shape in parameters.items() if in_a_block(name, shape)]
    states = sum(state_bytes("muon", name, s) - state_bytes("adamw_fused", name, s) for name, s in parameters.items())
    fused, muon = (
        fine_tuned(recipe | Optimizer(kind=kind)).by_phase["optimizer_step"] for kind in ("adamw_fused", "muon")
    )
    assert muon - fused - states == pytest.approx(max(8 * m * n + 4 * m * m for m, n in inside), rel=0.01)


def test_muon_has_the_matrices_of_the_blocks_and_adamw_all_else(recipe):
    """Of a GPT-2 (tied head), of one with a head of its own, and under LoRA."""
    source = locate(recipe.model)
    model = load_model(source, load_config(source))
    untied = load_model(source, load_config(source))
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    for each in (model, untied, Lora(rank=4).apply_to(copy.deepcopy(model)), Ia3().apply_to(copy.deepcopy(model))):
        trained = {name: p for name, p in each.named_parameters() if p.requires_grad}
        arguments = TrainingArguments(output_dir="unused", report_to="none", use_cpu=True)
        trainer = Trainer(model=each, args=arguments)
        Optimizer(kind="muon").trainer()(trainer)
        muon, adamw = trainer.create_optimizer().both
        found = {id(p) for group in muon.param_groups for p in group["params"]}
        rest = {id(p) for group in adamw.param_groups for p in group["params"]}
        assert found == {id(p) for name, p in trained.items() if in_a_block(name, p.shape) and min(p.shape) > 1}
        assert found | rest == set(map(id, trained.values()))
        assert not found & rest


def test_with_muon_a_run_goes_on_where_it_was_interrupted(recipe, interrupted):
    whole, resumed = interrupted(recipe | Optimizer(kind="muon"))
    assert resumed.losses == whole.losses
    assert resumed.held_out_loss == whole.held_out_loss


def test_muon_learns_beside_other_techniques(recipe, fine_tuned, subtests):
    for partner in (Lora(rank=4), PureBf16()):
        with subtests.test(partner.name):
            record = fine_tuned(replace(recipe, learning_rate=None) | partner | Optimizer(kind="muon"))
            assert record.held_out_loss < record.held_out_loss_before


def test_the_three_adamw_are_exact(recipe, fine_tuned, subtests):
    plain = fine_tuned(recipe)
    expected = load_file(Path(plain.model_path) / "model.safetensors")
    for kind in ADAMW:
        with subtests.test(kind):
            other = fine_tuned(recipe | Optimizer(kind=kind))
            assert other.losses == pytest.approx(plain.losses, rel=1e-5)
            assert other.held_out_loss == pytest.approx(plain.held_out_loss, rel=1e-5)
            actual = load_file(Path(other.model_path) / "model.safetensors")
            for name in expected:
                torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["sgd", "sgd_momentum", "muon"])
def test_those_that_take_other_steps_learn_at_a_rate_of_their_own(recipe, fine_tuned, kind):
    plain, other = fine_tuned(recipe), fine_tuned(replace(recipe, learning_rate=None) | Optimizer(kind=kind))
    assert other.losses[0] == plain.losses[0]
    assert other.losses[2:] != plain.losses[2:]
    assert other.held_out_loss < other.held_out_loss_before - 0.1
    assert other.learning_rate == pytest.approx(1e-3 * Optimizer(kind=kind).learning_rate_factor)


def test_what_happens_to_the_loss_depends_on_the_kind():
    said = {kind: Optimizer(kind=kind).numerics for kind in KINDS}
    assert {kind for kind, what in said.items() if what is Numerics.EXACT} == {
        "adamw_fused", "adamw_foreach", "adamw_loop", "adamw_paged",
    }  # fmt: skip
    assert {kind for kind, what in said.items() if what is Numerics.APPROXIMATE} == {
        "adamw_8bit", "adamw_8bit_paged", "adamw_stochastic", "adamw_8bit_stochastic", "adamw_4bit_stochastic",
        "adamw_kahan", "adamw_flash",
    }  # fmt: skip
    assert Optimizer.numerics is Optimizer().numerics is Numerics.APPROXIMATE
    for kind, what in said.items():  # predictions are made in other processes
        assert pickle.loads(pickle.dumps(Optimizer(kind=kind))).numerics is what


def test_the_scratch_memory_of_the_step_is_a_model_a_tensor_or_nothing(recipe, fine_tuned, parameters):
    total = 4 * sum(math.prod(shape) for shape in parameters.values())
    largest = 4 * max(math.prod(shape) for shape in parameters.values())
    step = {
        kind: fine_tuned(recipe | Optimizer(kind=kind)).by_phase["optimizer_step"]
        for kind in ("adamw_fused", "adamw_loop", "adamw_foreach")
    }
    assert step["adamw_foreach"] - step["adamw_fused"] == pytest.approx(total, rel=0.01)
    assert 0.99 * largest < step["adamw_loop"] - step["adamw_fused"] < 2.01 * largest


def test_the_learning_rate_is_customary_for_each():
    factors = {kind: Optimizer(kind=kind).learning_rate_factor for kind in ("adamw_8bit", "adafactor", "adamw_loop")}
    assert factors == {"adamw_8bit": 1.0, "adafactor": 1.0, "adamw_loop": 1.0}
    momentum = Optimizer(kind="sgd_momentum").learning_rate_factor
    assert Optimizer(kind="sgd").learning_rate_factor > 10 * momentum / 2 > 10


@NEEDS_BITSANDBYTES
def test_under_lora_eight_bits_save_next_to_nothing(recipe, fine_tuned):
    adapted = replace(recipe, steps=2) | Lora(rank=4)
    thirty_two, eight = fine_tuned(adapted), fine_tuned(adapted | Optimizer(kind="adamw_8bit"))
    assert eight.losses == pytest.approx(thirty_two.losses, rel=0.01)
    saved = thirty_two.peak_allocated_bytes - eight.peak_allocated_bytes
    # here it even costs the two tables: all tensors have fewer than 4,096 elements and stay in 32 bits
    assert abs(saved) < 0.001 * thirty_two.peak_allocated_bytes


@NEEDS_BITSANDBYTES
def test_a_run_leaves_nothing_in_bitsandbytes_for_the_next(recipe):
    """Its registry is one for the whole process, by position: the first two tensors of the next model would stay
    32-bit, and the embeddings of the last would stay alive."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    short = replace(recipe, steps=1)
    first = run(short | Optimizer(), device="cpu")
    gc.collect()
    assert manager.module_weight_config_triple == []
    manager.index2config[(0, 0)] = manager.index2config[(0, 2)] = {"optim_bits": 32}  # as another library may have
    again = run(short | Optimizer(), device="cpu")
    assert again.maximum_by_category == first.maximum_by_category
    assert again.losses == first.losses


def test_without_bitsandbytes_it_is_unavailable_with_the_cure(recipe, runs_folder, monkeypatch):
    monkeypatch.setattr("workbench.techniques.optimizer.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match="adamw_8bit needs bitsandbytes. Install it with: pip install"):
        run(recipe | Optimizer(kind="adamw_8bit"), device="cpu")
    (record,) = read_all(runs_folder)
    assert record.status is Status.UNAVAILABLE
    assert record.losses == []
    assert Optimizer(kind="adafactor").missing(Device("cpu")) is None


def test_eight_bits_have_no_kernels_on_mps():
    assert Optimizer(kind="adafactor").missing(Device("mps")) is None
    assert Optimizer(kind="adamw_8bit").missing(Device("mps"))


# ---- the step on the host ----
