"""What adapters have in common: what is trained is small, by a formula. And LoRA, DoRA and (IA)³, which multiply."""

import re
from dataclasses import replace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, OPTConfig, Phi3Config

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.models.family import family_of
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.techniques import REGISTRY, Dora, Ia3, Lora, PrefixTuning, PromptTuning, Qlora
from workbench.techniques.base import Adapter
from workbench.techniques.low_rank import LowRank
from workbench.training.job import prepare
from workbench.training.run import run
from workbench.training.world import World

C, LAYERS, B, T = 64, 2, 8, 32
N = 20  # virtual tokens
EVERY = "c_attn+c_fc+c_proj"
SHAPES = {"c_attn": [(C, 3 * C)], "c_fc": [(C, 4 * C)], "c_proj": [(C, C), (4 * C, C)]}  # (in, out) in each block
RELATIVES = (Lora, Dora, Qlora)


def shapes(targets):
    return [shape for target in targets.split("+") for shape in SHAPES[target]]


def low_rank(rank, targets):
    """A is (in, rank), B is (rank, out)."""
    return LAYERS * rank * sum(rows + columns for rows, columns in shapes(targets))


def lengths(targets):
    """One for each output."""
    return LAYERS * sum(columns for _, columns in shapes(targets))


# the adapter, the numbers that it trains, and in how many tensors
ADAPTERS = [
    (Lora(), low_rank(8, "c_attn"), 2 * LAYERS),
    (Lora(rank=4, targets=EVERY), low_rank(4, EVERY), 2 * 4 * LAYERS),
    (Dora(), low_rank(8, "c_attn") + lengths("c_attn"), 3 * LAYERS),
    (Dora(rank=4, targets=EVERY), low_rank(4, EVERY) + lengths(EVERY), 3 * 4 * LAYERS),
    (Ia3(), LAYERS * (3 * C + 4 * C), 2 * LAYERS),  # on the outputs of c_attn, and the inputs of the MLP's c_proj
    (PrefixTuning(), N * LAYERS * 2 * C, 1),
    (PromptTuning(), N * C, 1),
]


@pytest.mark.parametrize(("adapter", "numbers", "tensors"), ADAPTERS, ids=lambda value: getattr(value, "name", None))
def test_weights_gradients_and_states_of_what_is_trained_have_the_bytes_of_the_formula(
    recipe, fine_tuned, adapter, numbers, tensors
):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | adapter)
    assert plain.trainable_parameters == plain.parameters
    assert adapted.trainable_parameters == numbers
    assert adapted.parameters == plain.parameters + numbers
    grown = adapted.maximum_by_category[Category.WEIGHTS] - plain.maximum_by_category[Category.WEIGHTS]
    assert grown == 4 * numbers + 8 * adapter.positions  # of virtual tokens, their own numbers too
    assert adapted.maximum_by_category[Category.GRADIENTS] == 4 * numbers
    assert adapted.maximum_by_category[Category.OPTIMIZER_STATES] == 8 * numbers + 4 * tensors


def test_so_have_those_of_other_settings(recipe, subtests):
    model = load_model(locate(recipe.model), load_config(locate(recipe.model)))
    whole = sum(p.numel() for p in model.parameters())
    for adapter, numbers in (
        (Lora(rank=2, targets="c_attn"), low_rank(2, "c_attn")),
        (PrefixTuning(virtual_tokens=3), 3 * LAYERS * 2 * C),
        (PromptTuning(virtual_tokens=3), 3 * C),
    ):
        with subtests.test(adapter=adapter.name):
            adapted = adapter.apply_to(load_model(locate(recipe.model), load_config(locate(recipe.model))))
            assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == numbers
            assert sum(p.numel() for p in adapted.parameters()) == whole + numbers


def test_what_multiplies_begins_as_the_model_is(recipe, fine_tuned, subtests):
    """B is zero; all factors are one; a division by the same length rounds."""
    for adapter, _, _ in ADAPTERS:
        if not isinstance(adapter, PrefixTuning | PromptTuning):
            with subtests.test(adapter=adapter):
                assert fine_tuned(recipe | adapter).losses[0] == pytest.approx(fine_tuned(recipe).losses[0], rel=1e-6)


def test_activations_are_those_that_the_gradients_need(recipe, fine_tuned, subtests):
    """In tensors of (B, T, C), within 3%: the rest are LayerNorm's statistics. Full fine-tuning keeps 28 in a block;
    six of them go where the matrices are frozen."""
    unit = B * T * C * 4
    for adapter, by_hand, rounding in (
        (Dora(), LAYERS * 29 * unit, 0.04),  # x W and x A B, 3 C wide each, for the gradient of the lengths
        (Ia3(), LAYERS * (22 + 3 + 4) * unit, 0.03),  # what is multiplied
        # LoRA's without the input of A, and with copies of keys and values; the last term: the attention mask, in fp32
        (PrefixTuning(), LAYERS * (22 + 2 * (1 + N / T) + (T + N) / C) * unit, 0.03),
        (PromptTuning(), (22 * LAYERS + 1) * (T + N) / T * unit, 0.03),  # longer sequences through a frozen model
    ):
        with subtests.test(adapter=adapter):
            measured = fine_tuned(recipe | adapter).maximum_by_category[Category.ACTIVATIONS]
            assert measured == pytest.approx(by_hand, rel=rounding)


def test_what_is_kept_beside_lora_and_beside_the_whole_model(recipe, fine_tuned):
    plain, lora, dora, ia3 = (
        fine_tuned(chosen).maximum_by_category[Category.ACTIVATIONS]
        for chosen in (recipe, recipe | Lora(), recipe | Dora(), recipe | Ia3())
    )
    assert dora > 1.2 * lora
    assert ia3 > 0.97 * plain


def test_dora_learns_something_else_than_lora(recipe, fine_tuned, subtests):
    for settings in ({}, {"rank": 4, "targets": EVERY}):
        with subtests.test(**settings):
            assert fine_tuned(recipe | Dora(**settings)).losses[-1] != fine_tuned(recipe | Lora(**settings)).losses[-1]


@pytest.mark.parametrize("adapter", [Dora(), Ia3()], ids=lambda adapter: adapter.name)
def test_the_merged_model_is_the_trained_one(recipe, fine_tuned, adapter):
    record = fine_tuned(recipe | adapter)
    further = run(replace(recipe, model=record.model_path, steps=1), device="cpu")
    assert further.held_out_loss_before == pytest.approx(record.held_out_loss, rel=1e-5)


def test_what_is_so_small_customarily_learns_faster(recipe, fine_tuned, subtests):
    customary = replace(recipe, learning_rate=None)
    assert prepare(customary, World.find("cpu")).record.learning_rate == 1e-3
    for name, cls in REGISTRY.items():
        if issubclass(cls, Adapter):
            with subtests.test(adapter=name):
                rate = prepare(customary | cls(), World.find("cpu")).record.learning_rate
                assert rate == pytest.approx(1e-2 if issubclass(cls, LowRank) else 1e-1)
    assert fine_tuned(recipe | Lora()).learning_rate == recipe.learning_rate


def test_the_models_dropout_leaves_the_adapters_own_alone(recipe):
    source = locate(recipe.model)
    model = (recipe | Lora(dropout=0.3)).prepare_model(load_model(source, load_config(source)))
    rates = {
        "lora" if "lora" in name else name.split(".")[-1]: module.p
        for name, module in model.named_modules()
        if hasattr(module, "p")
    }
    assert rates.pop("lora") == 0.3
    assert set(rates.values()) == {0.0}


# ---- what the low-rank ones share ----


def test_the_low_rank_ones_are_these():
    assert {cls for cls in REGISTRY.values() if issubclass(cls, LowRank)} == set(RELATIVES)


def test_an_unknown_matrix_is_refused_in_the_techniques_own_name_with_the_known_ones(subtests):
    for cls in RELATIVES:
        for targets, unknown in (
            ("q_proj", "q_proj"),
            ("c_attn+q_proj", "q_proj"),
            ("+", ""),
            ("c_attn,c_fc", "c_attn,c_fc"),
            ("wte", "wte"),
        ):
            with subtests.test(technique=cls.name, targets=targets):
                words = (
                    f"{cls.name}: gpt2 has no matrix {unknown!r}. "
                    "Choose from c_attn, c_fc, c_proj, joined by +, or take all-linear."
                )
                with pytest.raises(ConfigurationError, match=f"^{re.escape(words)}$"):
                    cls(targets=targets).check_config(GPT2Config())


def test_what_is_adapted_depends_on_the_kind_of_model(subtests):
    for targets, config, matrices in (
        ("auto", GPT2Config(), ["c_attn"]),
        ("auto", LlamaConfig(), ["q_proj", "v_proj"]),
        ("auto", Phi3Config(), ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]),  # PEFT says nothing of it
        ("all-linear", GPT2Config(), ["c_attn", "c_fc", "c_proj"]),
        ("all-linear", OPTConfig(), ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"]),
    ):
        with subtests.test(targets=targets, kind=config.model_type):
            assert Lora(targets=targets).matrices(family_of(config)) == matrices


def test_peft_gets_what_the_settings_say(gpt2_folder, subtests):
    for targets in ("c_attn", "+".join(family_of(GPT2Config()).matrices)):
        with subtests.test(targets=targets):
            model = GPT2LMHeadModel(GPT2Config.from_pretrained(gpt2_folder))
            used = Lora(rank=3, alpha=7.0, dropout=0.1, targets=targets).apply_to(model).peft_config["default"]
            assert (used.r, used.lora_alpha, used.lora_dropout, used.task_type) == (3, 7.0, 0.1, "CAUSAL_LM")
            assert used.target_modules == set(targets.split("+"))
            assert used.fan_in_fan_out
