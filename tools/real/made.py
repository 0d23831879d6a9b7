"""Data and models of random weights for the programs of `programs.toml`, which fetch theirs: made.py KIND[:ARGUMENT] …

Each kind is a function of that name; it writes where the program looks, seen from the folder it is run in. Of a text,
the project's own Shakespeare is taken; nothing is fetched.
"""

import json
import random
import struct
import sys
from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "data"
TEXT = DATA / "corpora" / "shakespeare" / "train.txt"
TOKENIZER = DATA / "models" / "gpt2-tiny"


def mnist(folder: str, pictures_of_train: str = "4000") -> None:
    """Pictures of noise in the files of MNIST, as torchvision keeps them in this folder."""
    raw = Path(folder, "MNIST/raw")
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", int(pictures_of_train)), ("t10k", 1000)):
        pixels = struct.pack(">IIII", 0x803, count, 28, 28) + random.randbytes(count * 28 * 28)
        labels = struct.pack(">II", 0x801, count) + bytes(index % 10 for index in range(count))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(pixels)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def pictures() -> None:
    """Two classes of 64 JPEG pictures of 256 x 256 in made/train and made/val."""
    from PIL import Image

    for part in ("train", "val"):
        for kind in ("a", "b"):
            folder = Path("made", part, kind)
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(64):
                Image.frombytes("RGB", (256, 256), random.randbytes(3 * 256 * 256)).save(folder / f"{index}.jpg")


def bsds() -> None:
    """Twenty pictures where the super-resolution example expects the BSDS300."""
    from PIL import Image

    for part in ("train", "test"):
        folder = Path("dataset/BSDS300/images", part)
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(20):
            Image.frombytes("RGB", (481, 321), random.randbytes(3 * 481 * 321)).save(folder / f"{index}.jpg")


def characters() -> None:
    """Our text as nanoGPT's shakespeare_char: one number a character."""
    import pickle

    text = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(text))
    numbers = {letter: index for index, letter in enumerate(letters)}
    folder = Path("data/shakespeare_char")
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        (folder / f"{part}.bin").write_bytes(b"".join(struct.pack("<H", numbers[letter]) for letter in text))
    facts = {"vocab_size": len(letters), "stoi": numbers, "itos": dict(enumerate(letters))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(facts))


def tokens() -> None:
    """Random tokens as nanoGPT's openwebtext, without a vocabulary, so that it takes GPT-2's."""
    folder = Path("data/openwebtext")
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        numbers = random.choices(range(50257), k=100_000)
        (folder / f"{part}.bin").write_bytes(struct.pack(f"<{len(numbers)}H", *numbers))


def text() -> None:
    """Our text as input.txt."""
    Path("input.txt").write_text(TEXT.read_text(encoding="utf-8"), encoding="utf-8")


def words() -> None:
    """Our text as WikiText-2's training part."""
    Path("data/wikitext-2").mkdir(parents=True, exist_ok=True)
    Path("data/wikitext-2/train.txt").write_text(TEXT.read_text(encoding="utf-8"), encoding="utf-8")


def enwik8() -> None:
    """90 MB of our text over and over, as data/enwik8.gz."""
    import gzip

    Path("data").mkdir(exist_ok=True)
    content = TEXT.read_bytes()
    with gzip.open("data/enwik8.gz", "wb", compresslevel=1) as file:
        for _ in range(int(95e6) // len(content) + 1):
            file.write(content)


def llama() -> None:
    """A Llama of 135 million parameters (SmolLM2's shape) with our tokenizer and a chat template, in made/llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    _with_tokenizer(LlamaForCausalLM(config), "made/llama")


def distilbert() -> None:
    """DistilBERT's shape under the name that programs ask the hub for."""
    from transformers import DistilBertConfig, DistilBertModel

    _with_tokenizer(DistilBertModel(DistilBertConfig()), "distilbert-base-uncased")


def _with_tokenizer(model, folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.model_max_length = 512
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def conversations() -> None:
    """64 rows of each kind that TRL's trainers and PEFT's examples read, in made/KIND."""
    prompt = [{"role": "user", "content": "Say a line of Shakespeare, " * 20}]
    answer = [{"role": "assistant", "content": "To be, or not to be, that is the question. " * 20}]
    kinds = {
        "sft": {"messages": prompt + answer},
        "preference": {"prompt": prompt, "chosen": answer, "rejected": answer},
        "unpaired": {"prompt": prompt, "completion": answer, "label": True},
        "prompts": {"prompt": prompt},
        "text": {"text": answer[0]["content"]},
    }
    for name, row in kinds.items():
        rows = [dict(row) for _ in range(64)]
        if name == "unpaired":
            rows = [{**row, "label": index % 2 == 0} for index, row in enumerate(rows)]
        Path("made", name).mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        for part in ("train", "test"):
            Path("made", name, f"{part}.jsonl").write_text(lines, encoding="utf-8")


def instructions() -> None:
    """256 rows of an instruction, an input and an output in made/alpaca.json."""
    row = {"instruction": "Write a line as Shakespeare would. " * 8, "input": "", "output": "To be, or not. " * 30}
    Path("made").mkdir(exist_ok=True)
    Path("made/alpaca.json").write_text(json.dumps([row] * 256), encoding="utf-8")


def stsb() -> None:
    """512 pairs of sentences with a score, under the name that programs ask the hub for."""
    folder = Path("sentence-transformers/stsb")
    folder.mkdir(parents=True, exist_ok=True)
    row = {"sentence1": "A man plays. " * 10, "sentence2": "Somebody makes music. " * 8, "score": 0.5}
    for part in ("train", "validation", "test"):
        (folder / f"{part}.jsonl").write_text((json.dumps(row) + "\n") * 512, encoding="utf-8")


def checkpoint() -> None:
    """litgpt's pythia-160m with random weights and our tokenizer, in made/pythia."""
    import shutil

    import torch
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    folder = Path("made/pythia")
    folder.mkdir(parents=True, exist_ok=True)
    config = Config.from_name("pythia-160m")
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    save_config(config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))


if __name__ == "__main__":
    random.seed(0)
    for word in sys.argv[1:]:
        kind, *arguments = word.split(":")
        globals()[kind](*arguments)
