"""GPT-2 124M with the training step of nanoGPT: bf16 autocast, fused AdamW, gradients clipped, flash attention.

    python -m workbench emulate --gpu rtx3090 -- python tools/peers/nanogpt.py

The step is nanoGPT's (github.com/karpathy/nanoGPT, `train.py`: its defaults, without torch.compile), with transformers'
model in place of its own, whose memory differs by the GELU alone: nanoGPT's is one kernel.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BATCH = 8
TOKENS = 1024
STEPS = 3

config = GPT2Config(activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
for _ in range(STEPS):
    ids = torch.randint(50257, (BATCH, TOKENS)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
