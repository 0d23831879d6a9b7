"""Scripts of somebody else's, as texts."""

TRAINER_SCRIPT = '''"""A script of somebody's."""
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
ids = [[(7 * row + 3 * column) % 97 for column in range(16)] for row in range(48)]
rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_layer=2, n_embd=16, n_head=2, n_positions=16, **rates))
arguments = TrainingArguments(
    "somewhere",
    per_device_train_batch_size=8,  # as the paper has it
    max_steps=4, learning_rate=1e-2, max_grad_norm=0.0,
    logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
trainer.train()
'''
LOOP_SCRIPT = """import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
ids = torch.tensor([[(7 * row + 3 * column) % 97 for column in range(16)] for row in range(8)])
rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
net = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_layer=2, n_embd=16, n_head=2, n_positions=16, **rates))


def train():
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


losses = train()
"""
