"""Forward and backward passes in float16 with two kinds of attention: the tables of transformers' documentation.

Sources, all measured with variants of one script, https://gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331:
- bert: https://github.com/huggingface/transformers/pull/28802 and `docs/source/ko/model_doc/bert.md` (the English page
  has lost its table): bert-base-uncased with a language model head, A100 80 GB, torch 2.2.0;
- opt: https://github.com/huggingface/transformers/pull/33298 and `docs/source/en/model_doc/opt.md`: facebook/opt-350m,
  L40S, torch 2.4.0.

All sizes are run in one process, those with "sdpa" before those with "eager", and what the allocator kept from one run
decides how large its next blocks are: the runs before the one asked for are done too (`--alone`: not).
No optimizer: each step sets the gradients to None, adds up the logits and goes backward. What the model returned (the
logits, and OPT's keys and values) lives on until the next step's forward pass has returned. After some steps the peak
is reset and the cache emptied, and then more steps are measured. The tables give megabytes of 10**6 bytes.

transformers has since rewritten OPT's attention: of "eager", the version of that time (4.46) also took the maximum of
the masked scores and the lowest number, which autograd keeps a copy for, and both kinds made queries, keys and values
contiguous. `then_eager` and `then_fused` do so too; `--now` leaves the library as it is. BERT's is left as it is.

In a transformers of before 4.48, which has no such registry, both attentions are its own: so the rows are run with the
source's own versions (`tools/against_real.py --python`).

    python sdpa_training.py opt eager 1 512
"""

import argparse
import contextlib
import gc
import json
from itertools import product

import torch
from card import peaks
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertLMHeadModel, OPTConfig, OPTForCausalLM

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask
except ImportError:
    AttentionInterface = None

OPT_350M = {
    "vocab_size": 50272,
    "hidden_size": 1024,
    "word_embed_proj_dim": 512,
    "ffn_dim": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_function": "relu",
}
WARM_UP = 10
STEPS = 10
SWEEPS = {  # batches, lengths
    "bert": list(product((4, 8, 16), (256, 512))),
    "opt": list(product((1, 2, 4, 8), (128, 256, 512, 1024, 2048))),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", choices=SWEEPS)
    parser.add_argument("attention", choices=["eager", "sdpa"])
    parser.add_argument("batch", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--alone", action="store_true", help="without the runs before it")
    parser.add_argument("--all", action="store_true", help="print the peaks of the runs before it too")
    parser.add_argument("--now", action="store_true", help="OPT's attention as the installed transformers has it")
    arguments = parser.parse_args()
    wanted = (arguments.attention, arguments.batch, arguments.length)
    for attention in ("sdpa", "eager"):
        if arguments.alone and attention != arguments.attention:
            continue
        model = model_of(arguments.model, attention, arguments.now)
        for size in SWEEPS[arguments.model]:
            if (attention, *size) == wanted:
                measured = run(model, *size)
                print(json.dumps(measured | {"run": [attention, *size]}))
                return
            if not arguments.alone:
                with contextlib.suppress(torch.cuda.OutOfMemoryError):  # the largest did not fit there either
                    measured = run(model, *size)
                    if arguments.all:
                        print(json.dumps(measured | {"run": [attention, *size]}))
        del model
        gc.collect()


def model_of(name: str, attention: str, now: bool) -> nn.Module:
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("cuda"):
            if name == "bert":
                return BertLMHeadModel(BertConfig(attn_implementation=attention))
            if not now and AttentionInterface is not None:
                attention = {"eager": "then_eager", "sdpa": "then_fused"}[attention]
            return OPTForCausalLM(OPTConfig(**OPT_350M, attn_implementation=attention))
    finally:
        torch.set_default_dtype(torch.float32)


def run(model: nn.Module, batch: int, length: int) -> dict[str, int]:
    input_ids = torch.randint(model.config.vocab_size - 1, (batch, length)).cuda()
    model.train()
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.empty_cache()
        model.zero_grad()
        outputs = model(input_ids=input_ids)
        loss = outputs.logits.sum()
        loss.backward()
    torch.cuda.synchronize()
    return peaks()


def then_eager(module, query, key, value, attention_mask, dropout=0.0, **_):
    """Compute OPT's attention as transformers 4.46 did, written out; the queries come scaled."""
    batch, heads, length, width = query.shape
    query = query.contiguous().view(batch * heads, length, width)
    key = key.contiguous().view(batch * heads, length, width)
    value = value.contiguous().view(batch * heads, length, width)
    scores = torch.bmm(query, key.transpose(1, 2))
    scores = scores.view(batch, heads, length, length) + attention_mask
    lowest = torch.finfo(scores.dtype).min
    scores = torch.max(scores, torch.tensor(lowest, device=scores.device))
    scores = scores.view(batch * heads, length, length)
    weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(torch.float16)
    weights = functional.dropout(weights, p=dropout, training=module.training)
    attended = torch.bmm(weights, value).view(batch, heads, length, width)
    return attended.transpose(1, 2), None


def then_fused(module, query, key, value, attention_mask, dropout=0.0, **_):
    query = query.contiguous()
    key = key.contiguous()
    value = value.contiguous()
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None,
        scale=1.0,
    )
    return attended.transpose(1, 2), None


if AttentionInterface is not None:
    AttentionInterface.register("then_eager", then_eager)
    AttentionInterface.register("then_fused", then_fused)
    AttentionMaskInterface.register("then_eager", eager_mask)
    AttentionMaskInterface.register("then_fused", sdpa_mask)


if __name__ == "__main__":
    main()
