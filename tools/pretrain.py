"""Pretrain the embedded GPT-2 from scratch on public-domain English, on a CPU.

    python tools/pretrain.py TEXTS OUTPUT [--steps N]

TEXTS is a folder of plain UTF-8 files, one book each (which ones, and where to get them:
data/models/gpt2-tiny/README.md). The script trains a byte-level BPE tokenizer on them, then a 4-layer GPT-2 with Muon
on the weight matrices and AdamW on the rest, first on short blocks and at the end on full-length ones, so that all
1,024 positions are trained. It writes a `transformers` checkpoint in fp16 and `training.json` with what happened.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
CONTEXT = 1024
VOCABULARY = 4096
TOKENS_PER_STEP = 4096
HELD_OUT = 0.02
CYCLE = (256, 256, 256, 512)  # tokens per block while training; the last fifth uses CONTEXT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    args = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in sorted(args.texts.glob("*.txt"))]
    tokenizer = train_tokenizer(texts, args.output)
    tokens, held_out, characters = split_tokens(texts, tokenizer)
    model = new_model()
    start = time.time()
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} training tokens, {len(held_out):,} held out")
    train(model, tokens, args.steps, args.optimizer, held_out)
    report = {
        "parameters": model.num_parameters(),
        "steps": args.steps,
        "tokens_per_step": TOKENS_PER_STEP,
        "train_tokens": len(tokens),
        "held_out_tokens": len(held_out),
        "minutes": round((time.time() - start) / 60, 1),
        "torch": torch.__version__,
    }
    for length in (128, 256, 1024):
        report[f"held_out_loss_{length}"] = round(held_out_loss(model, held_out, length), 4)
    # a loss is in nats a token; bits a character do not depend on the tokenizer
    bits = report["held_out_loss_1024"] * len(held_out) / characters / math.log(2)
    report["held_out_bits_per_character_1024"] = round(bits, 4)
    model.half().save_pretrained(args.output)
    report_text = json.dumps(report, indent=2)
    (args.output / "training.json").write_text(f"{report_text}\n")
    print(report_text)


def train_tokenizer(texts: list[str], output: Path) -> PreTrainedTokenizerFast:
    """Train a GPT-2 tokenizer (byte-level BPE) with 4,096 entries, the last one being the end of text."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY - 1, min_frequency=2, show_progress=False)
    bpe.add_special_tokens([END])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END, unk_token=END, model_max_length=CONTEXT
    )
    assert len(tokenizer) == VOCABULARY, len(tokenizer)
    tokenizer.save_pretrained(output)
    return tokenizer


def split_tokens(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Hold out the last 2 % of every book. Return both parts' tokens, and how many characters are held out."""
    train_tokens: list[int] = []
    held_out_tokens: list[int] = []
    characters = 0
    for text in texts:
        cut = int(len(text) * (1 - HELD_OUT))
        characters += len(text) - cut
        train_tokens += [*tokenizer.encode(text[:cut]), tokenizer.eos_token_id]
        held_out_tokens += [*tokenizer.encode(text[cut:]), tokenizer.eos_token_id]
    return torch.tensor(train_tokens), torch.tensor(held_out_tokens), characters


def new_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=192,
        n_layer=4,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=VOCABULARY - 1,
        eos_token_id=VOCABULARY - 1,
    )
    return GPT2LMHeadModel(config)


def optimizers(model: GPT2LMHeadModel, optimizer_name: str) -> list[Optimizer]:
    """Return AdamW for all parameters; or AdamW for the rest, and Muon for the matrices in the layers."""
    matrices = []
    rest = []
    for name, parameter in model.named_parameters():
        is_for_muon = optimizer_name == "muon" and parameter.ndim == 2 and ".h." in name
        group = matrices if is_for_muon else rest
        group.append(parameter)
    chosen: list[Optimizer] = [AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1, fused=True)]
    if matrices:
        chosen.append(Muon(matrices, lr=2e-2, weight_decay=0.1))
    return chosen


def learning_rate_factor(progress: float) -> float:
    """Return the factor of a linear warm-up over 2 % of the steps, and then of a cosine to zero."""
    warm_up = min(progress / 0.02, 1.0)
    return warm_up * 0.5 * (1 + math.cos(math.pi * progress))


def draw(tokens: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
    """Draw (B, T) blocks at random places, B * T = TOKENS_PER_STEP."""
    starts = torch.randint(len(tokens) - length, (TOKENS_PER_STEP // length,), generator=generator)
    return torch.stack([tokens[start : start + length] for start in starts])


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, tokens: torch.Tensor, length: int) -> float:
    model.eval()
    count = len(tokens) // length
    blocks = tokens[: count * length].view(-1, length)
    loss_sum = 0.0
    for batch in blocks.split(8):
        loss_sum += model(input_ids=batch, labels=batch).loss.item() * len(batch)
    model.train()
    return loss_sum / count


def train(
    model: GPT2LMHeadModel,
    tokens: torch.Tensor,
    steps: int,
    optimizer_name: str,
    held_out: torch.Tensor,
) -> None:
    schedules = []
    for optimizer in optimizers(model, optimizer_name):
        schedules.append(LambdaLR(optimizer, lambda step: learning_rate_factor((step + 1) / steps)))
    generator = torch.Generator().manual_seed(0)
    start = time.time()
    for step in range(steps):
        length = CONTEXT if step >= 0.8 * steps else CYCLE[step % len(CYCLE)]
        batch = draw(tokens, length, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.optimizer.zero_grad()
            schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"{step:5d}  {time.time() - start:6.0f} s  train {loss.item():.3f}", flush=True)
        if step % 500 == 499:
            print(f"       held out {held_out_loss(model, held_out, 256):.4f}", flush=True)


if __name__ == "__main__":
    main()
