"""Text to token blocks: the embedded corpora and the user's own texts, however long.

Documents are joined with the end-of-text token. A text too long to be held in memory is read again where it is
needed, and its token blocks lie in an Arrow file, memory-mapped.
"""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from workbench.base.errors import explained, in_a_line
from workbench.base.limits import within
from workbench.base.paths import CORPORA, aside, folder_of_runs, put_in_place
from workbench.base.tokens import END_OF_TEXT, cut_into_blocks, encoded, labelled_rows, packed
from workbench.texts.chat import labelled, template_of
from workbench.texts.faults import refusal
from workbench.texts.folders import Signature, signature_of
from workbench.texts.formats import notice, preference
from workbench.texts.readers import find_text
from workbench.texts.source import LeftOut, TextSource

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

LINE_END = "\n"  # between conversations, in whose JSON there is none
HELD_OUT_SHARE = 0.1
HELD_OUT_TOKENS = 4096
HELD_OUT_CHARACTERS = 1 << 20  # far more than HELD_OUT_TOKENS need
PROMPT_CHARACTERS = 100

IN_MEMORY_CHARACTERS = 1 << 24
PIECE_S = 30.0  # to make its tokens; a usual tokenizer takes a tenth of a second
CONVERSATION_S = 10.0


@dataclass(frozen=True)
class Stream:
    """Characters `start` to `end` of a text too long to be held, in pieces, or so many conversations, each in one: read
    anew each time it is iterated. `signature` is that of the files when they were surveyed.
    """

    source: TextSource
    start: int
    end: int
    signature: Signature

    def __iter__(self) -> Iterator[str]:
        pieces = _joined(self.source, Counter())
        if self.source.loss:
            conversations = (piece for piece in pieces if piece != LINE_END)
            yield from islice(conversations, self.start, self.end)
            return
        position = 0
        for piece in pieces:
            if position >= self.end:
                return
            yield piece[max(self.start - position, 0) : self.end - position]
            position += len(piece)

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Corpus:
    """A text in two parts. `sha256` identifies both, whatever kind of file they were read from.

    `held_out` is cut after HELD_OUT_CHARACTERS; `documents` and `characters` count what was read, and `remarks` say
    what was left out or does not count. With a `loss`, "answers" or "all" that counts, the lines are conversations in
    JSON; `entries` are the names of what their messages have beside role and content, and how many have it.
    """

    name: str
    train: str | Stream
    held_out: str
    sha256: str
    documents: int = 1
    remarks: tuple[str, ...] = ()
    loss: str = ""
    characters: int = 0
    entries: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Conversations:
    """Those to train on, each as its tokens with their labels, made anew whenever they are iterated."""

    corpus: Corpus
    tokenizer: Any

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return (labelled_line(self.corpus, line, self.tokenizer) for line in self.corpus.train)


@dataclass(frozen=True)
class Blocks:
    """Token blocks of T tokens each, rows `input_ids`; the held-out part is capped at HELD_OUT_TOKENS tokens.

    Those of conversations have `labels` too, IGNORED where a token does not count. `text` is for techniques that cut it
    in another way: that of `train`, or its conversations, the model's tokenizer, T, and B sequences per optimizer step.
    """

    train: "Dataset"
    held_out: "Dataset"
    text: tuple[str | Stream | Conversations, Any, int, int]
    remarks: tuple[str, ...] = ()


def embedded() -> list[str]:
    """Names of the texts that come with the workbench."""
    return sorted(folder.name for folder in CORPORA.iterdir() if (folder / "train.txt").exists())


def embedded_files(name: str) -> tuple[Path, Path]:
    """The training and the held-out part of an embedded text."""
    return CORPORA / name / "train.txt", CORPORA / name / "held_out.txt"


def load_corpus(name: str) -> Corpus:
    """Read an embedded text by name, or texts of the user's by path (`workbench.texts.readers` says which); of
    these the last tenth is held out.

    Raises:
        ConfigurationError: no such text, not readable, not in the encoding (with the line), or nothing in it.
    """
    if name in embedded():
        train, held_out = (path.read_text(encoding="utf-8") for path in embedded_files(name))
        remarks = []
        if os.path.lexists(name):
            remarks.append(f"{name!r} is the embedded text; what has this name in the working folder is ./{name}")
        digest = hashlib.sha256(f"{train}\0{held_out}".encode()).hexdigest()
        return Corpus(name, train, held_out, digest, remarks=tuple(remarks))
    source = find_text(name, f"Embedded: {', '.join(embedded())}. Give one of these or the path of a UTF-8 text.")
    signature = source.signature()
    size = sum(file_size for _, file_size, *_ in signature)
    survey = _survey if size <= IN_MEMORY_CHARACTERS else _survey_unless_changed
    return survey(source, signature)


def _joined(source: TextSource, tally: Counter[str]) -> Iterator[str]:
    """All documents in pieces, END_OF_TEXT between them, or LINE_END; what is left out is counted."""
    last_place = ""
    for place, piece in source.rows():
        if isinstance(piece, LeftOut):
            tally[f"{piece} left out"] += 1
            continue
        if place != last_place:
            if tally["documents"]:
                yield LINE_END if source.loss else END_OF_TEXT
            tally["documents"] += 1
            last_place = place
        yield piece


def _survey(source: TextSource, signature: Signature) -> Corpus:
    """One pass for the hash, the length and the faults; a second one for the held-out part of a long text."""
    digest = hashlib.sha256()
    tally = Counter[str]()  # what was left out, does not count, or seems to be wrong
    entries = Counter[str]()
    pieces: list[str] = []
    characters = 0
    for piece in _joined(source, tally):
        digest.update(piece.encode())
        characters += len(piece)
        tally["characters are U+FFFD: the text was read in a wrong encoding once"] += piece.count("\ufffd")
        if source.loss and piece != LINE_END:
            notice(tally, entries, json.loads(piece))
        if characters <= IN_MEMORY_CHARACTERS:
            pieces.append(piece)
    documents = tally.pop("documents", 0)
    tally["files of other kinds or splits left out"] = len(source.others())
    if source.form and source.form.read is preference:
        tally["rejected answers left out"] = documents
    remarks = [f"{count} {what}" for what, count in sorted((+tally).items())]  # without what counts zero
    if not documents:
        reason = "; ".join(remarks) or "there is no document in it"
        raise refusal(f"{source.name} is empty: {reason}. Give a file with text in it.")
    size = characters
    most = HELD_OUT_CHARACTERS
    if source.loss:
        size = documents
        most = HELD_OUT_TOKENS
    cut = int(size * (1 - HELD_OUT_SHARE))
    train: str | Stream
    if source.loss or characters > IN_MEMORY_CHARACTERS:
        train = Stream(source, 0, cut, signature)
        held_out = (LINE_END if source.loss else "").join(Stream(source, cut, cut + most, signature))
    else:
        text = "".join(pieces)
        train = text[:cut]
        held_out = text[cut : cut + most]
    if not held_out.strip():
        raise refusal(f"the last tenth of {source.name}, which is held out, is blank. Trim the file.")
    return Corpus(
        name=source.name,
        train=train,
        held_out=held_out,
        sha256=digest.hexdigest(),
        documents=documents,
        remarks=(*source.remarks, *remarks),
        loss=source.loss,
        characters=characters,
        entries=tuple(sorted((+entries).items())),
    )


# reading a long text takes seconds to minutes; the corpus that is kept is small: a stream
_survey_unless_changed = lru_cache(maxsize=2)(_survey)


def prompt(corpus: Corpus) -> str:
    """A few lines from the held-out part, at the beginning of a paragraph, for samples to continue; of conversations
    the beginning of the first."""
    text = corpus.held_out
    if corpus.loss:
        first, *_ = json.loads(text.partition(LINE_END)[0]).values()
        text = f"{first if isinstance(first, str) else first[0].get('content')} -"
    paragraph = max(text.find("\n\n", len(text) // 10), 0)
    passage = ""
    for document in f"{text[paragraph:]}{END_OF_TEXT}{text}".split(END_OF_TEXT):
        passage = passage or document.strip()
    return passage[:PROMPT_CHARACTERS].rsplit(maxsplit=1)[0]


def check_in_memory(text: Corpus, owners: list[str]) -> None:
    """Raises ConfigurationError if a technique, one of `owners`, needs all of a text that is too long to be held."""
    if owners and text.characters > IN_MEMORY_CHARACTERS:
        raise refusal(
            f"{owners[0]} cuts the text into examples of its own and needs all of it in memory, "
            f"but {text.name} has more than {IN_MEMORY_CHARACTERS:,} characters. Use a part of it, "
            f"or drop {owners[0]}."
        )


def make_blocks(corpus: Corpus, tokenizer: "PreTrainedTokenizerBase", sequence_length: int, batch: int) -> Blocks:
    """Tokenise both parts and cut them into blocks of T = `sequence_length` tokens.

    Dropped are the last, shorter piece, blocks of conversations in which nothing counts, and the training blocks that
    would not fill a batch of B: every step of every recipe then sees as many tokens, however the batch is divided.

    Raises:
        ConfigurationError: the text is too short for one batch (B blocks) or for one held-out block; the chat template
            cannot be used for a conversation.
        UnavailableError: no room for the tokens of a long text.
    """
    import pyarrow as pa
    from datasets import Dataset

    if isinstance(corpus.train, str):
        blocks = pa.array(cut_into_blocks(_ids(corpus.train, tokenizer), sequence_length), pa.list_(pa.int32()))
        # without a fingerprint it would be made from three copies
        train = Dataset(pa.table({"input_ids": blocks}), fingerprint=os.urandom(8).hex())
    else:
        train = Dataset.from_file(str(_tokenised(corpus, corpus.train, tokenizer, sequence_length)))
    held_out_text = corpus.held_out.split(LINE_END) if corpus.loss else [corpus.held_out]
    held_out_rows = _rows(corpus, held_out_text, tokenizer, sequence_length)
    held_out = Dataset.from_list(list(islice(held_out_rows, max(1, HELD_OUT_TOKENS // sequence_length))))
    if len(train) < batch:
        raise refusal(
            f"{corpus.name} gives {len(train)} training blocks of {sequence_length} tokens, but a "
            f"batch needs {batch}. Use a longer text, a smaller sequence_length or a smaller "
            "effective_batch_size."
        )
    if not held_out:
        raise refusal(
            f"the held-out part of {corpus.name} is shorter than one block of {sequence_length} "
            "tokens. Use a longer text or a smaller sequence_length."
        )
    train = train.select(range(len(train) // batch * batch))
    if not corpus.loss:
        return Blocks(train, held_out, (corpus.train, tokenizer, sequence_length, batch))
    text = Conversations(corpus, tokenizer)
    return Blocks(train, held_out, (text, tokenizer, sequence_length, batch), remarks_of_template(corpus, tokenizer))


def remarks_of_template(corpus: Corpus, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """What of the conversations counts, and what of their messages the tokenizer's chat template does not write."""
    if not corpus.loss:
        return ()
    remark = f"the loss counts {corpus.loss} of the conversations"
    if not tokenizer.chat_template:
        remark += "; there is no chat template: messages, if any, get a simple one"
    template = template_of(tokenizer)
    lost = []
    for name, count in corpus.entries:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            owners = "conversations" if name == "tools" else "messages"
            lost.append(f"{name} of {count} {owners} left out: the chat template does not write it")
    return (remark, *lost)


# The tokens of the last text that was in memory, four bytes each: making them takes 0.9 s per MB, and the runs of a
# notebook share them. The key is the text's hash and the tokenizer's state.
_IDS: dict[tuple[str, str], Any] = {}


def _ids(text: str, tokenizer: "PreTrainedTokenizerBase") -> Any:
    import numpy as np

    key = hashlib.sha256(text.encode()).hexdigest(), _state(tokenizer)
    if key not in _IDS:
        _IDS.clear()
        _IDS[key] = np.fromiter(chain.from_iterable(in_time(encoded([text], tokenizer))), dtype=np.int32)
    return _IDS[key]


def _state(tokenizer: "PreTrainedTokenizerBase", loss: str = "") -> str:
    """Equal for tokenizers that give a text the same tokens."""
    chat = f" {loss} {template_of(tokenizer)}" if loss else ""
    return f"{tokenizer.backend_tokenizer.to_str()} {tokenizer.eos_token}{chat}"


def in_time(tokens: Iterator[list[int]]) -> Iterator[list[int]]:
    """The tokens of a text, piece by piece. Raises ConfigurationError if those of a piece do not come: an expression in
    a tokenizer's file may explode."""
    while True:
        with explained("corpus: the tokenizer does not get through the text", "Use the one that belongs to the model."):
            ids = within(PIECE_S, partial(next, tokens, None))
        if ids is None:
            return
        yield ids


def _rows(corpus: Corpus, text: Iterable[str], tokenizer: Any, length: int) -> Iterator[dict[str, Any]]:
    """Blocks as rows of a data set."""
    if not corpus.loss:
        for block in packed(in_time(encoded(text, tokenizer)), length):
            yield {"input_ids": block}
        return
    rows = labelled_rows((labelled_line(corpus, line, tokenizer) for line in text), length)
    first = list(islice(rows, 1))
    if not first:
        part = "held-out" if isinstance(text, list) else "training"
        raise refusal(
            f"the {part} part of {corpus.name} gives no block of {length} tokens in which one "
            "counts. Use more conversations, with messages of the role assistant, or a smaller "
            "sequence_length."
        )
    yield from chain(first, rows)


def labelled_line(corpus: Corpus, line: str, tokenizer: Any) -> list[tuple[int, int]]:
    """The tokens of a conversation with their labels. Raises ConfigurationError with its place in the file."""
    try:
        return within(CONVERSATION_S, partial(labelled, line, tokenizer, corpus.loss))
    except Exception as error:  # a template may raise anything
        place = find_text(corpus.name, "").place_of(line)
        raise refusal(
            f"{place}: the chat template cannot be used ({in_a_line(error)}). Correct the row, use "
            "a model with another template, or let all tokens count: loss=all"
        ) from None


def _tokenised(corpus: Corpus, text: Stream, tokenizer: "PreTrainedTokenizerBase", length: int) -> Path:
    """The Arrow file of the blocks, made once for a text, a tokenizer and a length, and again if it is damaged: its
    name ends with the digest of its content."""
    state = hashlib.sha256(f"{corpus.sha256} {_state(tokenizer, corpus.loss)} {length}".encode()).hexdigest()[:24]
    folder = folder_of_runs("tokens")
    with aside(folder, f"corpus: the tokens of {corpus.name}") as part:
        for path in folder.glob(f"{state}-*.arrow"):
            readable = path.is_file() and os.access(path, os.R_OK)
            if readable and path.stem.endswith(_digest(path, signature_of([path]))):
                return path
            if path.is_dir():  # a file is replaced, which another process may have done meanwhile
                shutil.rmtree(path, ignore_errors=True)
        _write_blocks(_rows(corpus, _shown(text), tokenizer, length), part)
        if text.source.signature() != text.signature:
            raise refusal(f"{corpus.name} was changed while it was read. Start again.")
        return put_in_place(part, f"{state}-{_digest(part, ())}.arrow")


@lru_cache(maxsize=8)  # reading 2 GB takes a second
def _digest(path: Path, signature: Signature) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def _shown(text: Stream) -> Iterator[str]:
    with tqdm(total=len(text), desc="tokenising", unit="char", unit_scale=True, disable=None, leave=False) as bar:
        for piece in text:
            yield piece
            bar.update(1 if text.source.loss else len(piece))


def _write_blocks(rows: Iterator[dict[str, Any]], path: Path) -> None:
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(path=str(path)) as writer:
        for row in rows:
            writer.write(row)  # in batches
        writer.finalize()
