"""No text, however odd, takes more memory than a bound: each is read and tokenised in a process of its own."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import json, re, sys
from pathlib import Path
import datasets, pyarrow, torch
from workbench.base.errors import ConfigurationError
from workbench.models.gpt2 import gpt2_tokenizer
from workbench.texts import corpus

def peak_mib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024  # without the parent's

tokenizer, idle, found = gpt2_tokenizer(), peak_mib(), {}
corpus.IN_MEMORY_CHARACTERS = int(sys.argv[1])
for name in sys.argv[2:]:
    try:
        blocks = len(corpus.make_blocks(corpus.load_corpus(name), tokenizer, 1024, 8).train)
    except ConfigurationError as error:
        blocks = str(error)
    found[name.rpartition("/")[2]] = [blocks, peak_mib() - idle]
print(json.dumps({"idle": idle, **found}))
"""
CHINESE = "的一是了我不人在他有这个上们来到时大地为子中你说生国年着就那和要她出也得里后自以会家可下而过天去能对小多"


def chinese_rows(path: Path, size: int) -> None:
    """JSON lines of 300 letters and a full stop; no space, and no line end inside a text."""
    choose = random.Random(0)
    rows = [
        json.dumps({"text": "".join(choose.choices(CHINESE, k=300)) + "。"}, ensure_ascii=False) for _ in range(200)
    ]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            file.write("\n".join(choose.choices(rows, k=50)) + "\n")


def rows_of_words(path: Path, size: int) -> None:
    """Lines of words drawn from 5,000; as plain text or as rows of about 5 KB."""
    choose = random.Random(0)
    vocabulary = ["".join(choose.choices("etaoinshrdlu", k=choose.randint(2, 9))) for _ in range(5_000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            text = "".join(" ".join(choose.choices(vocabulary, k=12)) + ".\n" for _ in range(70))
            file.write(json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text)


def one_row(path: Path, size: int) -> None:
    path.write_text(json.dumps({"text": "word and " * (size // 9)}) + "\n")


def repeated(letters: str):
    return lambda path, size: path.write_bytes(letters.encode() * (size // len(letters.encode())))


TEXTS = {
    "words.txt": rows_of_words, "words.jsonl": rows_of_words,
    "chinese.jsonl": chinese_rows, "row.jsonl": one_row, "line.txt": repeated("some word "),
    "letter.txt": repeated("a"), "emoji.txt": repeated("🙂👍\U0001f3fd"), "blank.txt": repeated(" "),
    "lines.txt": repeated("\n"), "returns.txt": repeated("\r"),
}  # fmt: skip
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")


def measured(sizes: dict[str, int], folder: Path, in_memory: int) -> dict[str, tuple[int | str, int]]:
    """Blocks, or what was said instead, and MiB beyond the libraries, of one text after the other."""
    for name, size in sizes.items():
        TEXTS[name](folder / name, size)
    command = [sys.executable, "-c", MEASURE, str(in_memory), *(str(folder / name) for name in sizes)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    results = json.loads(process.stdout.splitlines()[-1])
    print(f"\npeak resident MiB: {results.pop('idle')} and {results}")
    return results


@pytest.mark.dear
def test_texts_without_spaces_take_little(tmp_path):
    """Tokenised as a whole, three million letters, or bytes of Chinese, take 200 and 360 MiB beyond the libraries."""
    sizes = {"blank.txt": 60_000_000, "returns.txt": 60_000_000, "letter.txt": 3_000_000, "chinese.jsonl": 3_000_000}
    results = measured(sizes, tmp_path, 500_000)
    for name in ("blank.txt", "returns.txt"):
        assert "is empty: 1 blank documents left out" in results[name][0]
        assert results[name][1] < 50
    for name, most in (("letter.txt", 100), ("chinese.jsonl", 220)):
        assert results[name][0] > 500
        assert results[name][1] < most


LONG = int(os.environ.get("WORKBENCH_LONG_TEXT_BYTES", 1_000_000_000))
OF_WORDS_MIB, AT_MOST_MIB = 400, 1536 - 400  # beyond the libraries


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "most_mib"),
    [
        ("words.txt", LONG, OF_WORDS_MIB),
        ("words.jsonl", LONG, OF_WORDS_MIB),
        ("chinese.jsonl", LONG, AT_MOST_MIB),
        ("row.jsonl", 200_000_000, AT_MOST_MIB),
        ("line.txt", 200_000_000, AT_MOST_MIB),
        *((name, 60_000_000, AT_MOST_MIB) for name in ("letter.txt", "emoji.txt", "blank.txt", "lines.txt")),
        ("returns.txt", 60_000_000, AT_MOST_MIB),
        ("letter.txt", 16_000_000, AT_MOST_MIB),
        ("emoji.txt", 50_000_000, AT_MOST_MIB),
    ],
)
def test_any_text_takes_a_gibibyte_and_a_half_at_most(name, size, most_mib, tmp_path):
    """A usual one, of words, takes less. Another size than 1 GB: WORKBENCH_LONG_TEXT_BYTES."""
    blocks, mib = measured({name: size}, tmp_path, 1 << 24)[name]
    assert mib < most_mib
    if name.startswith("words"):
        assert blocks * 1024 > 0.15 * size
