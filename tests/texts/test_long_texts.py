"""A text of 1 GB is read, hashed and cut into token blocks in bounded memory. `make test-long`; prints its figures."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

MEASURE = """
import json, resource, sys
from workbench.texts import corpus
from workbench.models.gpt2 import gpt2_tokenizer

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

tokenizer = gpt2_tokenizer()
import datasets, pyarrow, torch
idle = peak_mib()
text = corpus.load_corpus(sys.argv[1])
loaded = peak_mib()
blocks = corpus.make_blocks(text, tokenizer, 1024, 8)
rows = sum(len(blocks.train[i]["input_ids"]) for i in range(0, len(blocks.train), 997))
print(json.dumps({"characters": len(text.train), "documents": text.documents, "blocks": len(blocks.train),
                  "idle": idle, "loaded": loaded, "tokenised": peak_mib(), "rows": rows}))
"""
EXTRA_MIB = 400


def write(path: Path, size_bytes: int) -> None:
    """Lines of words drawn from 5,000; as plain text or as rows of about 5 KB."""
    choose = random.Random(0)
    vocabulary = ["".join(choose.choices("etaoinshrdlu", k=choose.randint(2, 9))) for _ in range(5_000)]
    rows = path.suffix == ".jsonl"
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size_bytes:
            text = "".join(" ".join(choose.choices(vocabulary, k=12)) + ".\n" for _ in range(70))
            file.write(json.dumps({"text": text}) + "\n" if rows else text)


@pytest.mark.long
@pytest.mark.parametrize("name", ["long.txt", "long.jsonl"])
def test_memory_does_not_grow_with_the_text(name, tmp_path, runs_folder):
    """Beyond the libraries: EXTRA_MIB at most, for 1 GB of UTF-8 (another size: WORKBENCH_LONG_TEXT_BYTES)."""
    size = int(os.environ.get("WORKBENCH_LONG_TEXT_BYTES", 1_000_000_000))
    write(tmp_path / name, size)
    start = time.monotonic()
    command = [sys.executable, "-c", MEASURE, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    arrow = sum(path.stat().st_size for path in (runs_folder / "tokens").iterdir())
    print(
        f"\n{name}: {size / 1e6:,.0f} MB, {time.monotonic() - start:.0f} s; peak resident MiB: {found}; "
        f"Arrow {arrow:,} bytes"
    )
    assert found["characters"] > 0.88 * size * 0.97
    assert found["loaded"] - found["idle"] < EXTRA_MIB
    assert found["tokenised"] - found["idle"] < EXTRA_MIB
