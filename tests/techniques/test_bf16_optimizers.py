"""AdamW of other libraries, for bf16 weights: `optimizer=kind:…`."""

from dataclasses import replace

import pytest
import torch

from workbench.base.categories import Category
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.techniques import Lora, Optimizer, PureBf16
from workbench.techniques.optimizer import KINDS, piecewise, use_library
from workbench.training.run import run

pytest.importorskip("torchao")
pytest.importorskip("optimi")
STATE_BYTES = {"adamw_stochastic": 4, "adamw_8bit_stochastic": 2 + 8 / 256, "adamw_4bit_stochastic": 1 + 8 / 128,
               "adamw_kahan": 6}  # fmt: skip
# the share that they may lose of what plain bf16 rounds away, and over how many seeds: states of 4 bits, coarse
# themselves, lost 0.13 to 0.25 with one seed, and 0.21 with three; the others 0 to 0.032
LOST = {
    "adamw_stochastic": (0.05, 1),
    "adamw_8bit_stochastic": (0.05, 1),
    "adamw_4bit_stochastic": (0.25, 3),
    "adamw_kahan": (0.05, 1),
}


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Runs at a rate whose updates bf16 mostly rounds away, long enough for that to show."""
    folder = tmp_path_factory.mktemp("bf16-runs")
    recipe = Recipe(model="gpt2-tiny", steps=12, dropout=0.0, learning_rate=3e-4, sequence_length=64)
    return lambda seed, *techniques: (
        run(replace(recipe, seed=seed, techniques=techniques), device="cpu", reuse=True, folder=folder).held_out_loss
    )


@pytest.mark.dear
@pytest.mark.parametrize("kind", STATE_BYTES)
def test_what_plain_bf16_rounds_away_is_kept(long, kind):
    share, seeds = LOST[kind]
    exact = sum(long(seed) for seed in range(seeds))
    rounded = sum(long(seed, PureBf16()) for seed in range(seeds))
    kept = sum(long(seed, PureBf16(), Optimizer(kind=kind)) for seed in range(seeds))
    assert rounded - exact > 0.02 * seeds
    assert abs(kept - exact) < share * (rounded - exact)


@pytest.mark.parametrize(("kind", "bytes_each"), STATE_BYTES.items())
def test_the_states_have_the_bytes_of_the_formula(recipe, fine_tuned, kind, bytes_each):
    record = fine_tuned(replace(recipe, steps=2) | PureBf16() | Optimizer(kind=kind))
    measured = record.maximum_by_category[Category.OPTIMIZER_STATES]
    # tensors of fewer than 4,096 elements, and tables of 16 or 256 values for each state, are a few hundredths here
    assert measured == pytest.approx(bytes_each * record.parameters, rel=0.2)
    assert measured >= bytes_each * 0.99 * record.parameters


def test_a_step_in_pieces_is_the_step():
    def stepped(elements):
        torch.manual_seed(0)
        weights = torch.nn.Parameter(torch.randn(100, 30))
        optimizer = piecewise(torch.optim.AdamW, elements)([{"params": [weights]}], lr=0.1)
        for _ in range(3):
            weights.grad = torch.randn(100, 30)
            optimizer.step()
        return weights.detach(), optimizer

    (whole, _), (pieces, optimizer) = stepped(10**6), stepped(256)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-6)
    assert len(optimizer.state) == 12
    assert all(piece.grad is None for parts in optimizer.pieces.values() for piece in parts)


LIBRARIES = [
    name for name, kind in KINDS.items() if kind.call and kind.call.function is use_library and "cpu" in kind.devices
]


def test_without_the_package_it_is_unavailable_with_the_cure(monkeypatch, subtests):
    monkeypatch.setattr("workbench.techniques.optimizer.find_spec", lambda name: None)
    for kind in LIBRARIES:
        with subtests.test(kind):
            ((module, package),) = KINDS[kind].packages.items()
            assert Optimizer(kind=kind).missing(Device("cpu")) == (
                f"optimizer=kind:{kind} needs {module}. Install it with: pip install {package}"
            )


def test_flashoptim_is_for_cuda_and_for_bf16_weights(recipe):
    chosen = Optimizer(kind="adamw_flash")
    assert chosen.missing(Device("cpu")).endswith("has no kernels for cpu. Use kind:adamw_8bit_stochastic.")
    with pytest.raises(ConfigurationError, match="Add pure_bf16 and no adapter"):
        chosen.check_model(torch.nn.Linear(2, 2))
    chosen.check_model(torch.nn.Linear(2, 2).bfloat16())


@pytest.mark.dear  # a process of its own makes the first prediction
def test_flashoptims_states_are_predicted_without_it(recipe):
    from workbench.prediction.predict import predict

    found = predict(recipe | PureBf16() | Optimizer(kind="adamw_flash"), "h100")
    each = 3 + 2 * 2 / 32  # what bf16 rounds away, two states, and their scales
    assert found.maximum_by_category["optimizer_states"] == pytest.approx(each * found.parameters, rel=0.02)
    with pytest.raises(ConfigurationError, match="adamw_flash keeps what 16-bit weights"):
        predict(recipe | Lora() | Optimizer(kind="adamw_flash"), "h100")
