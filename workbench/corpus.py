"""Text to token blocks: the embedded corpora and the user's own files, one place that reads them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import ConfigurationError
from workbench.locations import CORPORA
from workbench.techniques.base import TrainingText

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

HELD_OUT_SHARE = 0.1
HELD_OUT_TOKENS = 8192
PROMPT_CHARACTERS = 100


@dataclass(frozen=True)
class Corpus:
    """A text in two parts. `sha256` identifies both."""

    name: str
    train: str
    held_out: str
    sha256: str


@dataclass(frozen=True)
class Blocks:
    """Token blocks of T tokens each, rows `input_ids`; the held-out part is capped at HELD_OUT_TOKENS tokens.

    `text` is what `train` was cut from.
    """

    train: "Dataset"
    held_out: "Dataset"
    text: TrainingText


def embedded() -> list[str]:
    """Names of the texts that come with the workbench."""
    return sorted(folder.name for folder in CORPORA.iterdir() if (folder / "train.txt").exists())


def load(name: str) -> Corpus:
    """Read an embedded text by name, or a UTF-8 text file by path; of a file, the last tenth is held out.

    Raises:
        ConfigurationError: no such text, not readable, not UTF-8 (with the line), or nothing in it.
    """
    if name in embedded():
        train, held_out = (_read(CORPORA / name / f"{part}.txt") for part in ("train", "held_out"))
    else:
        text = _read(_file(name))
        cut = int(len(text) * (1 - HELD_OUT_SHARE))
        train, held_out = text[:cut], text[cut:]
        if not held_out.strip():
            raise ConfigurationError(f"corpus: the last tenth of {name}, which is held out, is blank. Trim the file.")
    return Corpus(name, train, held_out, hashlib.sha256(f"{train}\0{held_out}".encode()).hexdigest())


def _file(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigurationError(
            f"corpus: there is no file {name!r} (looked in {Path.cwd()}), and no embedded text of that name. "
            f"Embedded: {', '.join(embedded())}. Give one of these or the path of a UTF-8 text file."
        )
    if path.is_dir():
        raise ConfigurationError(f"corpus: {name!r} is a folder. Give one UTF-8 text file.")
    if path.suffix.lower() not in (".txt", ".md", ""):
        raise ConfigurationError(f"corpus: {name!r} ends in {path.suffix}; only plain text (.txt, .md) is read so far.")
    return path


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"corpus: {path} cannot be read: {error.strerror}. Check its permissions.") from None
    if b"\0" in data:
        raise ConfigurationError(f"corpus: {path} is not a text file: it contains zero bytes.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"corpus: {path} is not UTF-8: byte {data[error.start]:#04x} in line {line}. "
            f"Convert it, for example: iconv -f latin1 -t utf-8 {path.name} > fixed.txt"
        ) from None
    if not text.strip():
        raise ConfigurationError(f"corpus: {path} is empty. Give a file with text in it.")
    return text.replace("\r\n", "\n")


def prompt(corpus: Corpus) -> str:
    """A few lines from the held-out part, at the beginning of a paragraph, for samples to continue."""
    text = corpus.held_out
    paragraph = text.find("\n\n", len(text) // 10)
    passage = text[max(paragraph, 0) :].strip() or text.strip()
    return passage[:PROMPT_CHARACTERS].rsplit(maxsplit=1)[0]


def make_blocks(corpus: Corpus, tokenizer: "PreTrainedTokenizerBase", sequence_length: int, batch: int) -> Blocks:
    """Tokenise both parts and cut them into blocks of T = `sequence_length` tokens.

    Dropped are the last, shorter piece, and the training blocks that would not fill a batch of B: every step of every
    recipe then sees as many tokens, however the batch is divided.

    Raises:
        ConfigurationError: the text is too short for one batch (B blocks) or for one held-out block.
    """
    train = _cut(corpus.train, tokenizer, sequence_length)
    held_out = _cut(corpus.held_out, tokenizer, sequence_length)[: max(1, HELD_OUT_TOKENS // sequence_length)]
    if len(train) < batch:
        raise ConfigurationError(
            f"corpus: {corpus.name} gives {len(train)} training blocks of {sequence_length} tokens, but a batch needs "
            f"{batch}. Use a longer text, a smaller sequence_length or a smaller effective_batch_size."
        )
    if not held_out:
        raise ConfigurationError(
            f"corpus: the held-out part of {corpus.name} is shorter than one block of {sequence_length} tokens. "
            "Use a longer text or a smaller sequence_length."
        )
    from datasets import Dataset

    train = train[: len(train) // batch * batch]
    return Blocks(
        Dataset.from_dict({"input_ids": train}),
        Dataset.from_dict({"input_ids": held_out}),
        TrainingText(corpus.train, tokenizer, sequence_length, batch),
    )


def _cut(text: str, tokenizer: "PreTrainedTokenizerBase", length: int) -> list[list[int]]:
    tokens = tokenizer(text, verbose=False)["input_ids"]
    return [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]
