"""GPT-2 124M with the Hugging Face Trainer: its defaults, or (`switched`) what it has against memory.

python -m workbench emulate --gpu rtx3090 -- python tools/peers/trainer.py [switched]
"""

import sys
import tempfile

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator

BATCH = 8
TOKENS = 1024
STEPS = 3
switches = {}
if "switched" in sys.argv:
    switches = {"bf16": True, "gradient_checkpointing": True, "optim": "adafactor"}

ids = torch.randint(50257, (BATCH * STEPS, TOKENS)).tolist()
with tempfile.TemporaryDirectory() as folder:
    Trainer(
        model=GPT2LMHeadModel(GPT2Config()),
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **switches,
        ),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        data_collator=default_data_collator,
    ).train()
