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
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
CONTEXT = 1024
VOCABULARY = 4096
TOKENS_PER_STEP = 4096
HELD_OUT = 0.02
CYCLE = (256, 256, 256, 512)  # tokens per block while training; the last fifth uses CONTEXT


def train_tokenizer(texts: list[str], output: Path) -> PreTrainedTokenizerFast:
    """A GPT-2 tokenizer (byte-level BPE) with 4,096 entries, the last one being the end of text."""
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
    """The last 2 % of every book is held out. Returns train tokens, held-out tokens and held-out characters."""
    parts: dict[str, list[int]] = {"train": [], "held_out": []}
    characters = 0
    for text in texts:
        cut = int(len(text) * (1 - HELD_OUT))
        characters += len(text) - cut
        for part, piece in (("train", text[:cut]), ("held_out", text[cut:])):
            parts[part] += [*tokenizer.encode(piece), tokenizer.eos_token_id]
    return torch.tensor(parts["train"]), torch.tensor(parts["held_out"]), characters


def new_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=192, n_layer=4, n_head=6,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=VOCABULARY - 1, eos_token_id=VOCABULARY - 1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def optimizers(model: GPT2LMHeadModel, kind: str) -> list[Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".h." in n] if kind == "muon" else []
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adamw = AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    return [adamw] + ([Muon(matrices, lr=2e-2, weight_decay=0.1)] if matrices else [])


def learning_rate_factor(progress: float) -> float:
    """Linear warm-up over 2 % of the steps, then cosine to zero."""
    return min(progress / 0.02, 1.0) * 0.5 * (1 + math.cos(math.pi * progress))


def draw(tokens: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
    """(B, T) blocks at random places, B * T = TOKENS_PER_STEP."""
    starts = torch.randint(len(tokens) - length, (TOKENS_PER_STEP // length,), generator=generator)
    return torch.stack([tokens[s : s + length] for s in starts])


@torch.no_grad()
def held_out_loss(model: GPT2LMHeadModel, tokens: torch.Tensor, length: int) -> float:
    model.eval()
    blocks = tokens[: len(tokens) // length * length].view(-1, length)
    losses = [model(input_ids=b, labels=b).loss.item() * len(b) for b in blocks.split(8)]
    model.train()
    return sum(losses) / len(blocks)


def train(model: GPT2LMHeadModel, tokens: torch.Tensor, steps: int, kind: str, watch: torch.Tensor) -> None:
    opts = optimizers(model, kind)
    base = [[g["lr"] for g in o.param_groups] for o in opts]
    generator, start = torch.Generator().manual_seed(0), time.time()
    for step in range(steps):
        length = CONTEXT if step >= 0.8 * steps else CYCLE[step % len(CYCLE)]
        batch = draw(tokens, length, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = learning_rate_factor((step + 1) / steps)
        for optimizer, rates in zip(opts, base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"{step:5d}  {time.time() - start:6.0f} s  train {loss.item():.3f}", flush=True)
        if step % 500 == 499:
            print(f"       held out {held_out_loss(model, watch, 256):.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    args = parser.parse_args()
    texts = [p.read_text(encoding="utf-8") for p in sorted(args.texts.glob("*.txt"))]
    tokenizer = train_tokenizer(texts, args.output)
    tokens, held_out, characters = split_tokens(texts, tokenizer)
    model, start = new_model(), time.time()
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} training tokens, {len(held_out):,} held out")
    train(model, tokens, args.steps, args.optimizer, held_out)
    report = {"parameters": model.num_parameters(), "steps": args.steps, "tokens_per_step": TOKENS_PER_STEP,
              "train_tokens": len(tokens), "held_out_tokens": len(held_out),
              "minutes": round((time.time() - start) / 60, 1), "torch": torch.__version__}  # fmt: skip
    for length in (128, 256, 1024):
        report[f"held_out_loss_{length}"] = round(held_out_loss(model, held_out, length), 4)
    bits = report["held_out_loss_1024"] * len(held_out) / characters / math.log(2)
    report["held_out_bits_per_character_1024"] = round(bits, 4)
    model.half().save_pretrained(args.output)
    (args.output / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
