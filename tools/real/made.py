"""Make data and random weights for the programs of `programs.toml`, which fetch theirs: made.py KIND[:ARGUMENT] …

Each kind is a function of that name; it writes where the program looks, seen from the folder it is run in. Of a text,
the project's own Shakespeare is taken; nothing is fetched.
"""

import gzip
import json
import pickle
import random
import shutil
import struct
import subprocess
import sys
import wave
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "data"
TEXT = DATA / "corpora" / "shakespeare" / "train.txt"
TOKENIZER = DATA / "models" / "gpt2-tiny"
GPT2_VOCABULARY = 50257
LLAMA_VOCABULARY = 32000


def make(requests: list[str], kinds: Mapping[str, Callable[..., None]]) -> None:
    """Make each thing: `mnist:data:60000` calls the kind `mnist` with "data" and "60000"."""
    random.seed(0)
    for request in requests:
        kind, *arguments = request.split(":")
        kinds[kind](*arguments)


# pictures


def mnist(folder: str, pictures_of_train: str = "4000") -> None:
    """Write pictures of noise in the files of MNIST, as torchvision keeps them in this folder."""
    raw = new_folder(folder, "MNIST/raw")
    counts = {"train": int(pictures_of_train), "t10k": 1000}
    for part, count in counts.items():
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        pixels = random.randbytes(count * 28 * 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels)
        header = struct.pack(">II", 0x801, count)
        labels = bytes(index % 10 for index in range(count))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels)


def pictures() -> None:
    """Write two classes of 64 JPEG pictures of 256 x 256 in made/train and made/val."""
    for part in ("train", "val"):
        for label in ("a", "b"):
            folder = new_folder("made", part, label)
            for index in range(64):
                noise(256, 256).save(folder / f"{index}.jpg")


def bsds() -> None:
    """Write twenty pictures where the super-resolution example expects the BSDS300."""
    for part in ("train", "test"):
        folder = new_folder("dataset/BSDS300/images", part)
        for index in range(20):
            noise(481, 321).save(folder / f"{index}.jpg")


def masks() -> None:
    """Write 32 pictures of 320 x 240 with a mask of two values each, where Pytorch-UNet expects them."""
    from PIL import Image

    picture_folder = new_folder("data/imgs")
    mask_folder = new_folder("data/masks")
    size = (320, 240)
    for index in range(32):
        noise(*size).save(picture_folder / f"{index}.jpg")
        values = random.choices((0, 1), k=320 * 240)
        Image.frombytes("L", size, bytes(values)).save(mask_folder / f"{index}.png")


def captions() -> None:
    """Write a table of the pictures of made/train with a caption each, as open_clip reads it."""
    pictures()
    lines = ["filepath\ttitle"]
    for path in sorted(Path("made/train").rglob("*.jpg")):
        lines.append(f"{path}\tA picture of noise")
    Path("made/captions.csv").write_text("\n".join(lines), encoding="utf-8")


def noise(width: int, height: int) -> Any:
    from PIL import Image

    return Image.frombytes("RGB", (width, height), random.randbytes(3 * width * height))


# texts and tokens


def text() -> None:
    """Write our text as input.txt."""
    shutil.copyfile(TEXT, "input.txt")


def words() -> None:
    """Write our text as WikiText-2's training part."""
    shutil.copyfile(TEXT, new_folder("data/wikitext-2") / "train.txt")


def enwik8() -> None:
    """Write 90 MB of our text, over and over, as data/enwik8.gz."""
    content = TEXT.read_bytes()
    with gzip.open(new_folder("data") / "enwik8.gz", "wb", compresslevel=1) as file:
        for _ in range(int(95e6) // len(content) + 1):
            file.write(content)


def c4() -> None:
    """Write our text as the documents of torchtitan's test of C4."""
    row = {"text": TEXT.read_text(encoding="utf-8")[:20_000]}
    write_rows(new_folder("tests/assets/c4_test") / "data.json", [row] * 200)


def characters() -> None:
    """Write our text as nanoGPT's shakespeare_char: one number a character."""
    content = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(content))
    numbers = {letter: index for index, letter in enumerate(letters)}
    folder = new_folder("data/shakespeare_char")
    for part in ("train", "val"):
        write_numbers(folder / f"{part}.bin", [numbers[letter] for letter in content])
    facts = {
        "vocab_size": len(letters),
        "stoi": numbers,
        "itos": dict(enumerate(letters)),
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(facts))


def tokens() -> None:
    """Write random tokens as nanoGPT's openwebtext, without a vocabulary, so that it takes GPT-2's."""
    folder = new_folder("data/openwebtext")
    for part in ("train", "val"):
        numbers = random.choices(range(GPT2_VOCABULARY), k=100_000)
        write_numbers(folder / f"{part}.bin", numbers)


def stories() -> None:
    """Write random tokens as the shards of llama2.c's TinyStories."""
    folder = new_folder("data/TinyStories_all_data")
    for index in range(2):
        numbers = random.choices(range(LLAMA_VOCABULARY), k=100_000)
        write_numbers(folder / f"data{index:02}.bin", numbers)


def nanochat() -> None:
    """Write our text as nanochat's documents, and a tokenizer trained on it, in made."""
    import pyarrow
    import pyarrow.parquet
    import torch

    sys.path.insert(0, ".")
    from nanochat.tokenizer import RustBPETokenizer

    content = TEXT.read_text(encoding="utf-8")
    documents = [content[start : start + 2000] for start in range(0, len(content), 2000)]
    table = pyarrow.table({"text": documents * 4})
    folder = new_folder("made/base_data_climbmix")
    for index in range(2):
        pyarrow.parquet.write_table(table, folder / f"shard_{index:05d}.parquet", row_group_size=64)
    tokenizer = RustBPETokenizer.train_from_iterator(iter([content]), 4096)
    tokenizer.save("made/tokenizer")
    token_bytes = torch.ones(tokenizer.get_vocab_size(), dtype=torch.int32)
    torch.save(token_bytes, "made/tokenizer/token_bytes.pt")


def pieces(name: str) -> None:
    """Train a vocabulary of sentencepiece on our text, in NAME.model, for older classes of tokenizers."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(input=str(TEXT), model_prefix=name, vocab_size=1000)


def write_numbers(file: Path, numbers: list[int]) -> None:
    """Write two bytes a number."""
    file.write_bytes(struct.pack(f"<{len(numbers)}H", *numbers))


# rows of a data set


def conversations() -> None:
    """Write 64 rows of each kind that TRL's trainers and PEFT's examples read, in made/KIND."""
    prompt = [{"role": "user", "content": "Say a line of Shakespeare, " * 20}]
    answer = [{"role": "assistant", "content": "To be, or not to be, that is the question. " * 20}]
    preferred = {"prompt": prompt, "completion": answer, "label": True}
    data_sets = {
        "sft": [{"messages": prompt + answer}] * 64,
        "preference": [{"prompt": prompt, "chosen": answer, "rejected": answer}] * 64,
        "unpaired": [preferred, {**preferred, "label": False}] * 32,
        "prompts": [{"prompt": prompt}] * 64,
        "text": [{"text": answer[0]["content"]}] * 64,
    }
    for name, rows in data_sets.items():
        folder = new_folder("made", name)
        for part in ("train", "test"):
            write_rows(folder / f"{part}.jsonl", rows)


def instructions(lines: str = "30") -> None:
    """Write 256 rows of an instruction, an input and an output of so many lines in made/alpaca.json."""
    row = {
        "instruction": "Write a line as Shakespeare would. " * 8,
        "input": "",
        "output": "To be, or not. " * int(lines),
    }
    write_json(new_folder("made") / "alpaca.json", [row] * 256)


def stsb() -> None:
    """Write 512 pairs of sentences with a score, under the name that programs ask the hub for."""
    folder = new_folder("sentence-transformers/stsb")
    row = {
        "sentence1": "A man plays. " * 10,
        "sentence2": "Somebody makes music. " * 8,
        "score": 0.5,
    }
    for part in ("train", "validation", "test"):
        write_rows(folder / f"{part}.jsonl", [row] * 512)


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")


# models


def llama() -> None:
    """Save SmolLM2's shape, a Llama of 135 million parameters, with our tokenizer and a chat template in made/llama."""
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
    save_with_tokenizer(LlamaForCausalLM(config), "made/llama")


def distilbert() -> None:
    """Save DistilBERT's shape under the name that programs ask the hub for."""
    from transformers import DistilBertConfig, DistilBertModel

    save_with_tokenizer(DistilBertModel(DistilBertConfig()), "distilbert-base-uncased")


def roberta() -> None:
    """Save DistilRoBERTa's shape under the name that programs ask the hub for."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
        num_hidden_layers=6,
    )
    save_with_tokenizer(RobertaForMaskedLM(config), "distilbert/distilroberta-base")


def t5() -> None:
    """Save Flan-T5's base shape in made/t5, and 64 rows of tokens as FastChat prepares them."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=768,
        d_kv=64,
        d_ff=2048,
        num_layers=12,
        num_heads=12,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    save_with_tokenizer(T5ForConditionalGeneration(config), "made/t5")
    rows = [random.choices(range(2, 500), k=256) for _ in range(64)]
    write_json(Path("made/t5.json"), {"input_ids": rows, "labels": rows})


def qwen() -> None:
    """Save the shape of Qwen 2.5 with 0.5 billion parameters in made/qwen, with a vocabulary of bytes alone."""
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
    vocabulary = our_tokenizer()["model"]
    write_json(Path("made/qwen/vocab.json"), vocabulary["vocab"])
    lines = ["#version: 0.2", *merge_lines(vocabulary["merges"])]
    Path("made/qwen/merges.txt").write_text("\n".join(lines), encoding="utf-8")


def autoencoder() -> None:
    """Save Stable Diffusion's autoencoder under the name that DiT asks the hub for."""
    from diffusers import AutoencoderKL

    blocks = 4
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
    )
    model.save_pretrained("stabilityai/sd-vae-ft-ema")


def whisper() -> None:
    """Save Whisper's tiny shape in made/tiny.pt, and half a minute of noise in made/noise.wav."""
    import torch
    from whisper.model import ModelDimensions, Whisper

    shape = {
        "n_audio_ctx": 1500,
        "n_audio_state": 384,
        "n_audio_head": 6,
        "n_audio_layer": 4,
        "n_mels": 80,
        "n_text_ctx": 448,
        "n_text_state": 384,
        "n_text_head": 6,
        "n_text_layer": 4,
        "n_vocab": 51865,
    }
    folder = new_folder("made")
    model = Whisper(ModelDimensions(**shape))
    torch.save({"dims": shape, "model_state_dict": model.state_dict()}, folder / "tiny.pt")
    with wave.open("made/noise.wav", "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(random.randbytes(2 * 16000 * 30))


def checkpoint(name: str = "pythia-160m", dtype: str = "float32", hub_config: str = "") -> None:
    """Save a model of litgpt's with random weights and our tokenizer in made/pythia, and a file of its config_hub."""
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    folder = new_folder("made/pythia")
    config = Config.from_name(name)
    torch.set_default_dtype(getattr(torch, dtype))
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    if hub_config:
        lines = Path("config_hub/finetune", hub_config).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.startswith("checkpoint_dir:"):
                lines[number] = f"checkpoint_dir: {folder}"
        Path("made/config.yaml").write_text("\n".join(lines), encoding="utf-8")
    save_config(config, folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, folder / file)
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})


def save_with_tokenizer(model: Any, folder: str) -> None:
    """Save a model and our tokenizer beside it, whose pairs are written as libraries of 2023 read them too."""
    from transformers import PreTrainedTokenizerFast

    new_folder(folder)
    content = our_tokenizer()
    content["model"]["merges"] = merge_lines(content["model"]["merges"])
    write_json(Path(folder, "tokenizer.json"), content)
    shutil.copyfile(TOKENIZER / "tokenizer_config.json", Path(folder, "tokenizer_config.json"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    tokenizer.model_max_length = 512
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def our_tokenizer() -> dict[str, Any]:
    return json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))


def merge_lines(merges: list[Any]) -> list[str]:
    """Return `h e` for each pair; newer files have the pairs as lists."""
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]


# other things that programs look for


def hub(repository: str) -> None:
    """Make a repository without models where torch.hub keeps those that it has fetched, if TORCH_HOME is made."""
    folder = new_folder("made/hub", repository)
    (folder / "hubconf.py").write_text("dependencies = []\n", encoding="utf-8")


def extension() -> None:
    """Build an extension of C++ and CUDA where it lies; NVIDIA's compiler has to be there."""
    subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], check=True)


def new_folder(*parts: str) -> Path:
    folder = Path(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    make(sys.argv[1:], globals())
