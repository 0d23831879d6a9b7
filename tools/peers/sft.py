"""GPT-2 124M with TRL's SFTTrainer and its defaults, on texts that fill the context.

python -m workbench emulate --gpu rtx3090 -- python tools/peers/sft.py
"""

import tempfile

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from trl import SFTConfig, SFTTrainer

from workbench.models.load import load_tokenizer
from workbench.models.source import locate

BATCH = 8
TOKENS = 1024
STEPS = 3

ids = torch.randint(50257, (BATCH * STEPS, TOKENS)).tolist()
tokenizer = load_tokenizer(locate("random:gpt2"))
tokenizer.pad_token = tokenizer.eos_token
with tempfile.TemporaryDirectory() as folder:
    SFTTrainer(
        model=GPT2LMHeadModel(GPT2Config()),
        args=SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_length=TOKENS,
            max_steps=STEPS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tokenizer,
    ).train()
