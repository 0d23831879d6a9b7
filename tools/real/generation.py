"""GPT-Neo 1.3B that writes 100 tokens, and what `torch.cuda.memory_summary()` counts before and after.

Source: https://github.com/leandromet/nlp_project_cuda, `nlm_earth_model_eleutherAI_advance.py` and the two runs of it
that its README shows, on a GTX 1660 Ti: the pipeline for text generation in fp32, two answers to a prompt of 11 or 15
tokens, sampled. Here the weights are random and the pipeline's call of `generate` stands by itself.

    python generation.py 11
"""

import json
import sys

import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

TOKENS = 100
ANSWERS = 2


def main() -> None:
    model = GPTNeoForCausalLM(GPTNeoConfig()).eval().to("cuda")
    print(json.dumps(counts("loaded")))
    prompt = torch.zeros(1, int(sys.argv[1]), dtype=torch.int64).to("cuda")
    model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_length=TOKENS,
        num_return_sequences=ANSWERS,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        eos_token_id=50256,
    )
    print(json.dumps(counts("written")))


def counts(run: str) -> dict[str, object]:
    """Return what the summary has in its columns `Peak Usage` and `Tot Alloc`, in bytes and numbers."""
    stats = torch.cuda.memory_stats()
    return {
        "run": run,
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "segments": stats["segment.all.peak"],
        "requests": stats["allocation.all.allocated"],
    }


if __name__ == "__main__":
    main()
