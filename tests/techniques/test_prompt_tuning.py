from dataclasses import replace

import pytest
import torch

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.models.generate import generate
from workbench.models.load import load_config, load_model, load_tokenizer
from workbench.models.source import locate
from workbench.run.job import prepare
from workbench.run.run import run
from workbench.run.trainer import collate, prepare_data, prepare_model
from workbench.techniques import GradientCheckpointing, PromptTuning
from workbench.texts import corpus

C, LAYERS, V, B, T = 64, 2, 4096, 8, 32
KINDS = pytest.mark.parametrize("prompt", [PromptTuning(), PromptTuning(virtual_tokens=3)], ids=str)


@KINDS
def test_the_trainable_parameters_are_those_of_the_formula(recipe, fine_tuned, prompt):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | prompt)
    assert adapted.trainable_parameters == prompt.virtual_tokens * C
    assert adapted.parameters == plain.parameters + prompt.virtual_tokens * C


@KINDS
def test_gradients_and_states_exist_for_the_prompt_alone(recipe, fine_tuned, prompt):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | prompt)
    assert adapted.maximum_by_category[Category.GRADIENTS] == 4 * prompt.virtual_tokens * C
    assert adapted.maximum_by_category[Category.OPTIMIZER_STATES] == 8 * prompt.virtual_tokens * C + 4
    for category in PromptTuning.attacks:
        assert adapted.maximum_by_category[category] < 0.1 * plain.maximum_by_category[category]


def test_logits_grow_by_the_virtual_tokens(recipe, fine_tuned):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | PromptTuning())
    grown = adapted.maximum_by_category[Category.LOGITS_AND_LOSS] / plain.maximum_by_category[Category.LOGITS_AND_LOSS]
    assert grown == pytest.approx((T + 20) / T, rel=0.01)


def test_activations_are_those_of_longer_sequences_through_a_frozen_model(recipe, fine_tuned):
    """Within 3%: the rest are LayerNorm's statistics and what is as large as the prompt."""
    by_hand = (22 * LAYERS + 1) * B * (T + 20) * C * 4
    measured = fine_tuned(recipe | PromptTuning()).maximum_by_category[Category.ACTIVATIONS]
    assert measured == pytest.approx(by_hand, rel=0.03)


@KINDS
def test_it_learns(recipe, fine_tuned, prompt):
    adapted = fine_tuned(replace(recipe, learning_rate=None, steps=12) | prompt)
    assert adapted.held_out_loss < adapted.held_out_loss_before


def test_the_loss_is_that_of_the_same_tokens_as_everywhere(recipe, fine_tuned):
    """The mean over the T - 1 tokens after the first: by hand, from the logits."""
    record = fine_tuned(recipe | PromptTuning(virtual_tokens=3))
    plan = prepare(recipe | PromptTuning(virtual_tokens=3), torch.device("cpu"))
    torch.manual_seed(recipe.seed)
    model = prepare_model(plan.recipe, load_model(plan.source, plan.config)).eval()
    rows = prepare_data(plan.recipe, plan.blocks)["eval_dataset"]
    batch = collate([rows[i] for i in range(len(rows))])
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits[:, 3:-1]
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert record.held_out_loss_before == pytest.approx(by_hand.item(), rel=1e-5)


def test_it_goes_with_checkpointing(recipe, fine_tuned):
    """Of two blocks, one at a time is kept whole: (22 + 3) of 45 tensors."""
    plain, checkpointed = (
        fine_tuned(recipe | PromptTuning()),
        fine_tuned(recipe | PromptTuning() | GradientCheckpointing()),
    )
    assert checkpointed.losses == pytest.approx(plain.losses, rel=1e-5)
    activations = [r.maximum_by_category[Category.ACTIVATIONS] for r in (plain, checkpointed)]
    assert activations[1] < 0.6 * activations[0]


def test_it_cannot_be_merged_nor_be_longer_than_the_model(recipe):
    with pytest.raises(ConfigurationError, match="prompt_tuning brings virtual tokens .* Save it as 'adapter'"):
        run(recipe | PromptTuning(), device="cpu", save="merged")
    with pytest.raises(ConfigurationError, match="the 100 positions that prompt_tuning takes .* Use at most 28"):
        run(recipe | PromptTuning(virtual_tokens=100), device="cpu")


def test_a_saved_prompt_loads_beside_its_base_and_writes_what_it_wrote(recipe):
    record = run(replace(recipe, steps=3) | PromptTuning(), device="cpu", save="adapter", sample_tokens=12)
    source = locate(record.model_path)
    model, tokenizer = load_model(source, load_config(source)), load_tokenizer(source)
    assert generate(model, tokenizer, corpus.prompt(corpus.load_corpus(recipe.corpus)), 12) == record.text_after


def test_text_is_continued_by_what_the_model_finds_likeliest(recipe):
    """The key-value cache of generation, with the prompt in front, against whole forward passes."""
    source = locate(recipe.model)
    model = PromptTuning().applied_to(load_model(source, load_config(source))).eval()
    whole = cached = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for _ in range(5):
            whole = torch.cat([whole, model(input_ids=whole).logits[:, -1:].argmax(-1)], dim=1)
        cached = model.generate(input_ids=cached, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(whole, cached)
