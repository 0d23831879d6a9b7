import copy
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.measure.tracker import StorageTracker
from workbench.techniques import ChunkedCrossEntropy, MixedPrecision
from workbench.techniques.chunked_cross_entropy import linear_cross_entropy, without_logits

B, T, C, V = 3, 17, 16, 211
CHUNKS = (1, 7, 51, 1000)  # 51 is B * T
IGNORED = {  # (row, from, to)
    "none": [],
    "left": [(0, 0, 5)],
    "right": [(1, 9, T), (2, 0, 1)],
    "a whole row": [(0, 0, T)],
    "nearly all": [(0, 3, 4), (1, 0, T), (2, 0, T)],
}


def gpt2(seed=0, **changes):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=V, n_layer=2, n_embd=C, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.3,
    )  # fmt: skip
    model = GPT2LMHeadModel(replace_config(config, changes))
    model.loss_type = "ForCausalLM"
    return model


def replace_config(config, changes):
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def batch(ignored=()):
    torch.manual_seed(1)
    input_ids = torch.randint(V, (B, T))
    labels = input_ids.clone()
    for row, start, stop in ignored:
        labels[row, start:stop] = -100
    return {"input_ids": input_ids, "labels": labels}


def loss_and_gradients(model, inputs, chunk=None, **kwargs):
    model = copy.deepcopy(model)
    if chunk is None:
        loss = model(**inputs, **kwargs).loss
    else:
        with without_logits(model, chunk):
            loss = model(**inputs, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(ones, others, rtol=1e-5, atol=1e-7):
    (loss, gradients), (other_loss, other_gradients) = ones, others
    torch.testing.assert_close(other_loss, loss, rtol=rtol, atol=atol)
    assert gradients.keys() == other_gradients.keys()
    for name in gradients:
        scale = gradients[name].abs().max().item()
        torch.testing.assert_close(other_gradients[name], gradients[name], rtol=rtol, atol=max(rtol * scale, atol))


def test_loss_and_every_gradient_are_the_models_own(subtests):
    model = gpt2()
    for name, ignored in IGNORED.items():
        inputs = batch(ignored)
        plain = loss_and_gradients(model, inputs)
        assert plain[1]["transformer.wte.weight"].abs().max() > 1e-3
        for chunk in CHUNKS:
            with subtests.test(ignored=name, chunk=chunk):
                assert_equal(plain, loss_and_gradients(model, inputs, chunk))


def test_the_sum_is_divided_by_the_items_of_the_whole_step(subtests):
    model, inputs = gpt2(), batch([(0, 0, 5)])
    for items in (7, 1000, torch.tensor(99)):
        with subtests.test(items=items):
            plain = loss_and_gradients(model, inputs, num_items_in_batch=items)
            assert_equal(plain, loss_and_gradients(model, inputs, 8, num_items_in_batch=items))
            assert plain[0] != loss_and_gradients(model, inputs)[0]


def test_nothing_to_predict_is_nan_as_in_the_model():
    model, inputs = gpt2(), batch([(row, 0, T) for row in range(B)])
    assert loss_and_gradients(model, inputs)[0].isnan()
    assert loss_and_gradients(model, inputs, 8)[0].isnan()


def test_an_attention_mask_for_padding_reaches_the_model():
    model, inputs = gpt2(), batch([(1, 9, T)])
    inputs["attention_mask"] = (inputs["labels"] != -100).long()
    masked = loss_and_gradients(model, inputs, 8)
    assert_equal(loss_and_gradients(model, inputs), masked)


def test_a_head_that_is_not_tied_gets_its_own_gradient():
    model, inputs = gpt2(tie_word_embeddings=False), batch()
    plain, chunked = loss_and_gradients(model, inputs), loss_and_gradients(model, inputs, 8)
    assert "lm_head.weight" in plain[1]
    assert_equal(plain, chunked)


def test_a_scaled_loss_scales_every_gradient():
    model, inputs = gpt2(), batch()
    with without_logits(model, 8):
        (model(**inputs).loss * 1024).backward()
    _, gradients = loss_and_gradients(model, inputs, 8)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 1024 * gradients[name])


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    labels = torch.tensor([0, 4, -100, 2, 1, -100])
    apply = linear_cross_entropy().apply
    arguments = (hidden.requires_grad_(), weight.requires_grad_(), labels, 4)
    # the loss is summed in fp32, so the differences are coarse
    assert torch.autograd.gradcheck(apply, arguments, eps=1e-2, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="new in PyTorch 2.13")
def test_it_agrees_with_pytorchs_own():
    torch.manual_seed(0)
    ours = [torch.randn(50, C, requires_grad=True), torch.randn(V, C, requires_grad=True)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    labels = torch.randint(V, (50,)).index_fill_(0, torch.tensor([3, 49]), -100)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=8)
    loss = linear_cross_entropy().apply(*ours, labels, 8)
    expected = torch.nn.functional.linear_cross_entropy(*theirs, labels, reduction="sum", options=options)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_under_autocast_it_rounds_as_the_model_does():
    model, inputs = gpt2(), batch([(0, 0, 5)])
    exact = loss_and_gradients(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, chunked = loss_and_gradients(model, inputs), loss_and_gradients(model, inputs, 8)
    assert_equal(plain, chunked, rtol=0.02)
    assert chunked[0] != exact[0]  # it did compute in bf16
    assert all(gradient.dtype == torch.float32 for gradient in chunked[1].values())


def test_bf16_weights_get_bf16_gradients_within_their_rounding():
    model, inputs = gpt2().to(torch.bfloat16), batch()
    plain, chunked = loss_and_gradients(model, inputs), loss_and_gradients(model, inputs, 8)
    assert_equal(plain, chunked, rtol=0.03)
    assert all(gradient.dtype == torch.bfloat16 for gradient in chunked[1].values())


def test_one_gradient_of_the_weight_however_many_chunks_and_none_if_it_is_frozen(subtests):
    for frozen in (True, False):
        with subtests.test(frozen=frozen):
            hidden, weight = torch.randn(64, C, requires_grad=True), torch.randn(V, C, requires_grad=not frozen)
            with StorageTracker("cpu") as tracker:
                linear_cross_entropy().apply(hidden, weight, torch.randint(V, (64,)), 4).backward()
            assert (weight.grad is None) is frozen
            as_large_as_the_weight = [storage for storage in tracker.storages if storage.nbytes == V * C * 4]
            assert len(as_large_as_the_weight) == (1 if frozen else 2)  # the weight itself is one


def test_adapters_keep_their_own_positions_and_labels(subtests):
    import peft

    virtual_tokens = {"num_virtual_tokens": 5}
    for config, settings in (
        (peft.PromptTuningConfig, virtual_tokens),
        (peft.PrefixTuningConfig, virtual_tokens),
        (peft.LoraConfig, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    ):
        with subtests.test(config.__name__):
            model = peft.get_peft_model(gpt2(), config(task_type="CAUSAL_LM", **settings))
            inputs = batch([(0, 0, 5)])
            plain = loss_and_gradients(model, inputs)
            assert_equal(plain, loss_and_gradients(model, inputs, 8))
            assert plain[1]
            assert not any("wte" in name or "lm_head" in name for name in plain[1])


def test_afterwards_the_model_has_its_logits_and_its_loss_again():
    model, inputs = gpt2(), batch()
    before = model(**inputs)
    with pytest.raises(RuntimeError, match="on purpose"), without_logits(model, 8):
        raise RuntimeError("on purpose")
    after = model(**inputs)
    assert torch.equal(after.logits, before.logits)
    assert after.loss == before.loss


def test_a_head_of_another_kind_is_refused():
    model = gpt2()
    model.lm_head = torch.nn.Linear(C, V)
    with pytest.raises(ConfigurationError, match="chunked_cross_entropy: the head must be a plain linear layer"):
        ChunkedCrossEntropy().check_model(model)


def test_logits_shrink_to_two_chunks(recipe, fine_tuned):
    assert fine_tuned(recipe).maximum_by_category[Category.LOGITS_AND_LOSS] == 3 * 8 * 32 * 4096 * 4
    for chunk in (100, 256):
        record = fine_tuned(recipe | ChunkedCrossEntropy(chunk=chunk))
        assert record.maximum_by_category[Category.LOGITS_AND_LOSS] == 2 * chunk * 4096 * 4


def test_beside_mixed_precision_the_forward_pass_runs_under_autocast(recipe, fine_tuned):
    both = fine_tuned(replace(recipe, steps=1) | MixedPrecision() | ChunkedCrossEntropy(chunk=32))
    assert both.losses[0] != fine_tuned(recipe).losses[0]


def test_evaluation_has_no_logits_either(recipe, fine_tuned):
    plain, chunked = (
        fine_tuned(chosen).by_phase["evaluation"] for chosen in (recipe, recipe | ChunkedCrossEntropy(100))
    )
    assert chunked < 0.7 * plain
