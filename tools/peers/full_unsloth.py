"""GPT-2 124M, every parameter, with Unsloth and its defaults, on texts that fill the context; or uncompiled.

python -m workbench emulate --gpu rtx3090 -- python tools/peers/full_unsloth.py [uncompiled]
"""

import os
import sys
import tempfile

os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
os.environ["UNSLOTH_COMPILE_DISABLE"] = "1" if "uncompiled" in sys.argv else "0"
# Unsloth would put these files beside the caller's.
os.environ["UNSLOTH_COMPILE_LOCATION"] = f"{tempfile.gettempdir()}/unsloth_compiled_cache"

from unsloth import FastModel  # comes first, since it changes what is imported after it  # isort: skip

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
    os.chdir(folder)
    GPT2LMHeadModel(GPT2Config()).save_pretrained("gpt2")
    tokenizer.save_pretrained("gpt2")
    model, tokenizer = FastModel.from_pretrained("gpt2", max_seq_length=TOKENS, full_finetuning=True)
    SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="output",
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=1,
            max_length=TOKENS,
            max_steps=STEPS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tokenizer,
    ).train()
