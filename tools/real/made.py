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


def masks() -> None:
    """32 pictures of 320 x 240 with a mask of two values each, where Pytorch-UNet expects them."""
    from PIL import Image

    for name in ("imgs", "masks"):
        Path("data", name).mkdir(parents=True, exist_ok=True)
    for index in range(32):
        Image.frombytes("RGB", (320, 240), random.randbytes(3 * 320 * 240)).save(f"data/imgs/{index}.jpg")
        Image.frombytes("L", (320, 240), bytes(random.choices((0, 1), k=320 * 240))).save(f"data/masks/{index}.png")


def captions() -> None:
    """The pictures of made/train with a caption each, as open_clip reads a table."""
    pictures()
    rows = [f"{path}\tA picture of noise" for path in sorted(Path("made/train").rglob("*.jpg"))]
    Path("made/captions.csv").write_text("\n".join(["filepath\ttitle", *rows]), encoding="utf-8")


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


def stories() -> None:
    """Random tokens as the shards of llama2.c's TinyStories."""
    folder = Path("data/TinyStories_all_data")
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(2):
        numbers = random.choices(range(32000), k=100_000)
        (folder / f"data{index:02}.bin").write_bytes(struct.pack(f"<{len(numbers)}H", *numbers))


def c4() -> None:
    """Our text as the documents of torchtitan's test of C4."""
    folder = Path("tests/assets/c4_test")
    folder.mkdir(parents=True, exist_ok=True)
    row = json.dumps({"text": TEXT.read_text(encoding="utf-8")[:20_000]})
    (folder / "data.json").write_text(f"{row}\n" * 200, encoding="utf-8")


def nanochat() -> None:
    """Our text as nanochat's documents, and a tokenizer trained on it, in made."""
    import pyarrow
    import pyarrow.parquet
    import torch

    sys.path.insert(0, ".")
    from nanochat.tokenizer import RustBPETokenizer

    text = TEXT.read_text(encoding="utf-8")
    documents = pyarrow.table({"text": [text[start : start + 2000] for start in range(0, len(text), 2000)] * 4})
    Path("made/base_data_climbmix").mkdir(parents=True, exist_ok=True)
    for index in range(2):
        pyarrow.parquet.write_table(documents, f"made/base_data_climbmix/shard_{index:05d}.parquet", row_group_size=64)
    tokenizer = RustBPETokenizer.train_from_iterator(iter([text]), 4096)
    tokenizer.save("made/tokenizer")
    torch.save(torch.ones(tokenizer.get_vocab_size(), dtype=torch.int32), "made/tokenizer/token_bytes.pt")


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


def pieces(name: str) -> None:
    """A vocabulary of sentencepiece, trained on our text, in NAME.model, for older classes of tokenizers."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(input=str(TEXT), model_prefix=name, vocab_size=1000)


def roberta() -> None:
    """DistilRoBERTa's shape under the name that programs ask the hub for."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, num_hidden_layers=6)
    _with_tokenizer(RobertaForMaskedLM(config), "distilbert/distilroberta-base")


def t5() -> None:
    """Flan-T5's base shape in made/t5, and 64 rows of tokens as FastChat prepares them."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
    config = T5Config(**shape, feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)
    _with_tokenizer(T5ForConditionalGeneration(config), "made/t5")
    rows = [random.choices(range(2, 500), k=256) for _ in range(64)]
    Path("made/t5.json").write_text(json.dumps({"input_ids": rows, "labels": rows}), encoding="utf-8")


def qwen() -> None:
    """The shape of Qwen 2.5 with 0.5 billion parameters in made/qwen, with a vocabulary of bytes alone."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained("made/qwen")
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    Path("made/qwen/vocab.json").write_text(json.dumps(tokenizer["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *_as_words(tokenizer["merges"])]
    Path("made/qwen/merges.txt").write_text("\n".join(lines), encoding="utf-8")


def autoencoder() -> None:
    """Stable Diffusion's autoencoder under the name that DiT asks the hub for."""
    from diffusers import AutoencoderKL

    blocks = 4
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
    )
    model.save_pretrained("stabilityai/sd-vae-ft-ema")


def hub(repository: str) -> None:
    """A repository without models where torch.hub keeps those that it has fetched, if TORCH_HOME is made."""
    folder = Path("made/hub", repository)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hubconf.py").write_text("dependencies = []\n", encoding="utf-8")


def whisper() -> None:
    """Whisper's tiny shape in made/tiny.pt, and half a minute of noise in made/noise.wav."""
    import wave

    import torch
    from whisper.model import ModelDimensions, Whisper

    shape = {"n_audio_ctx": 1500, "n_audio_state": 384, "n_audio_head": 6, "n_audio_layer": 4, "n_mels": 80}
    shape |= {"n_text_ctx": 448, "n_text_state": 384, "n_text_head": 6, "n_text_layer": 4, "n_vocab": 51865}
    Path("made").mkdir(exist_ok=True)
    model = Whisper(ModelDimensions(**shape))
    torch.save({"dims": shape, "model_state_dict": model.state_dict()}, "made/tiny.pt")
    with wave.open("made/noise.wav", "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(random.randbytes(2 * 16000 * 30))


def extension() -> None:
    """An extension of C++ and CUDA, built where it lies; NVIDIA's compiler has to be there."""
    import subprocess

    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], check=True)


def _with_tokenizer(model, folder: str) -> None:
    """Beside the model our tokenizer, whose pairs are written as libraries of 2023 read them too."""
    from transformers import PreTrainedTokenizerFast

    Path(folder).mkdir(parents=True, exist_ok=True)
    content = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["merges"] = _as_words(content["model"]["merges"])
    Path(folder, "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    Path(folder, "tokenizer_config.json").write_bytes((TOKENIZER / "tokenizer_config.json").read_bytes())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.model_max_length = 512
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _as_words(pairs: list) -> list[str]:
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]


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


def instructions(lines: str = "30") -> None:
    """256 rows of an instruction, an input and an output of so many lines in made/alpaca.json."""
    answer = "To be, or not. " * int(lines)
    row = {"instruction": "Write a line as Shakespeare would. " * 8, "input": "", "output": answer}
    Path("made").mkdir(exist_ok=True)
    Path("made/alpaca.json").write_text(json.dumps([row] * 256), encoding="utf-8")


def stsb() -> None:
    """512 pairs of sentences with a score, under the name that programs ask the hub for."""
    folder = Path("sentence-transformers/stsb")
    folder.mkdir(parents=True, exist_ok=True)
    row = {"sentence1": "A man plays. " * 10, "sentence2": "Somebody makes music. " * 8, "score": 0.5}
    for part in ("train", "validation", "test"):
        (folder / f"{part}.jsonl").write_text((json.dumps(row) + "\n") * 512, encoding="utf-8")


def checkpoint(name: str = "pythia-160m", dtype: str = "float32", hub_config: str = "") -> None:
    """A model of litgpt's with random weights and our tokenizer in made/pythia, and a file of its config_hub for it."""
    import shutil

    import torch
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    folder = Path("made/pythia")
    folder.mkdir(parents=True, exist_ok=True)
    config = Config.from_name(name)
    torch.set_default_dtype(getattr(torch, dtype))
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    if hub_config:
        lines = Path("config_hub/finetune", hub_config).read_text(encoding="utf-8").splitlines()
        lines = [f"checkpoint_dir: {folder}" if line.startswith("checkpoint_dir:") else line for line in lines]
        Path("made/config.yaml").write_text("\n".join(lines), encoding="utf-8")
    save_config(config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))


if __name__ == "__main__":
    random.seed(0)
    for word in sys.argv[1:]:
        kind, *arguments = word.split(":")
        globals()[kind](*arguments)
