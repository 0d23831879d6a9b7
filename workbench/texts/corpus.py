"""Texts become token blocks: the embedded texts and the user's own, however long.

Documents are joined with the end-of-text token. A text that is too long for memory is read again whenever it is needed,
and its token blocks are in an Arrow file, which is mapped into memory.
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

from workbench.base.errors import explain_errors, in_a_line
from workbench.base.limits import call_within
from workbench.base.paths import CORPORA, folder_of_runs, part_file, put_in_place
from workbench.base.tokens import END_OF_TEXT, cut_into_blocks, encode_text, pack_blocks, pack_conversations
from workbench.texts.chat import label_tokens, template_of
from workbench.texts.faults import refusal
from workbench.texts.folders import Signature, signature_of
from workbench.texts.formats import tally_remarks
from workbench.texts.readers import find_text
from workbench.texts.source import LeftOut, TextSource

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

LINE_END = "\n"  # stands between conversations; the JSON of one has none
HELD_OUT_SHARE = 0.1  # the share of a user's own text that is held out, at its end
HELD_OUT_TOKENS = 4096  # the most tokens of an evaluation
HELD_OUT_CHARACTERS = 1 << 20  # far more than HELD_OUT_TOKENS need
PROMPT_CHARACTERS = 100  # the longest prompt that a sample continues

IN_MEMORY_CHARACTERS = 1 << 24  # 17 million: a longer text is read in pieces
PIECE_S = 30.0  # seconds for the tokens of a piece; a usual tokenizer takes a tenth of one
SLOW_TOKENIZER = "corpus: waiting for the tokenizer, which may need long for a very long word"
CONVERSATION_S = 10.0  # seconds for the tokens of a conversation


@dataclass(frozen=True)
class Stream:
    """A part of a text that is too long for memory, or of conversations; each iteration reads it again.

    `start` and `end` count characters, and the text comes in pieces; or they count conversations, which come one by
    one. `signature` is that of the files when they were surveyed.
    """

    source: TextSource
    start: int
    end: int
    signature: Signature

    def __iter__(self) -> Iterator[str]:
        pieces = _join_documents(self.source, Counter())
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
    """A text in two parts.

    Attributes:
        train: the part to train on; a Stream if it is too long for memory, or if it is conversations.
        held_out: the part for evaluations, cut after HELD_OUT_CHARACTERS.
        sha256: the hash of both, whatever kind of file they were read from.
        documents, characters: numbers of what was read.
        remarks: sentences about what was left out or does not count.
        loss: empty for a text. For conversations, which are lines of JSON then, what counts: "answers" or "all".
        entries: names that messages have beside role and content, each with the number of messages that have it.
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
    """The conversations to train on, as lists of (token, label); each iteration makes them again."""

    corpus: Corpus
    tokenizer: Any

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return (label_line(self.corpus, line, self.tokenizer) for line in self.corpus.train)


@dataclass(frozen=True)
class Blocks:
    """Token blocks: rows with `input_ids` of T tokens each.

    Blocks of conversations have `labels` too, IGNORED where a token does not count.

    Attributes:
        train: the blocks to train on, in whole effective batches.
        held_out: blocks of at most HELD_OUT_TOKENS tokens in all.
        text: for techniques that cut the text in another way: the text of `train` or its conversations, the model's
            tokenizer, T, and the effective batch.
        remarks: sentences about what counts.
    """

    train: "Dataset"
    held_out: "Dataset"
    text: tuple[str | Stream | Conversations, Any, int, int]
    remarks: tuple[str, ...] = ()


def list_embedded() -> list[str]:
    """Return the names of the texts that come with the workbench."""
    return sorted(folder.name for folder in CORPORA.iterdir() if (folder / "train.txt").exists())


def find_embedded(name: str) -> tuple[Path, Path]:
    """Return the files of an embedded text: the training and the held-out part."""
    return CORPORA / name / "train.txt", CORPORA / name / "held_out.txt"


def load_corpus(name: str) -> Corpus:
    """Read an embedded text by name, or the user's own by path or by the name of a data set.

    `workbench.texts.readers` says what a name may be. The last tenth of the user's own text is held out.

    Raises:
        ConfigurationError: there is no such text, it cannot be read, is not in the encoding (with the line), or empty.
    """
    if name in list_embedded():
        train, held_out = (path.read_text(encoding="utf-8") for path in find_embedded(name))
        remarks = []
        if os.path.lexists(name):
            remarks.append(f"{name!r} is the embedded text; what has this name in the working folder is ./{name}")
        digest = hashlib.sha256(f"{train}\0{held_out}".encode()).hexdigest()
        return Corpus(name, train, held_out, digest, remarks=tuple(remarks))
    source = find_text(name, f"Embedded: {', '.join(list_embedded())}. Give one of these or the path of a UTF-8 text.")
    signature = source.signature()
    size = sum(file_size for _, file_size, *_ in signature)
    survey = _survey if size <= IN_MEMORY_CHARACTERS else _survey_unless_changed
    return survey(source, signature)


def _join_documents(source: TextSource, tally: Counter[str]) -> Iterator[str]:
    """Yield all documents in pieces, with END_OF_TEXT or LINE_END between them; count those left out in `tally`."""
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
    """Read a text once for its hash, its length and its faults, and a long one again for its held-out part."""
    digest = hashlib.sha256()
    tally = Counter[str]()  # counts what is left out, does not count, or seems to be wrong
    entries = Counter[str]()
    pieces: list[str] = []
    characters = 0
    for piece in _join_documents(source, tally):
        digest.update(piece.encode())
        characters += len(piece)
        tally["characters are U+FFFD: the text was read in a wrong encoding once"] += piece.count("\ufffd")
        if source.loss and piece != LINE_END:
            tally_remarks(tally, entries, json.loads(piece))
        if characters <= IN_MEMORY_CHARACTERS:
            pieces.append(piece)
    documents = tally.pop("documents", 0)
    tally["files of other kinds or splits left out"] = len(source.others())
    remarks = [f"{count} {what}" for what, count in sorted((+tally).items())]  # `+` drops zeros
    if not documents:
        reason = "; ".join(remarks) or "there is no document in it"
        raise refusal(f"{source.name} is empty: {reason}. Give a file with text in it.")
    size = characters
    most = HELD_OUT_CHARACTERS
    if source.loss:
        size = documents
        most = HELD_OUT_TOKENS  # a conversation has at least one token
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


# To read a long text takes seconds to minutes; its Corpus is small, since it holds streams.
_survey_unless_changed = lru_cache(maxsize=2)(_survey)


def prompt(corpus: Corpus) -> str:
    """Return a few words of the held-out part for samples to continue.

    They are the beginning of a paragraph, or of the first conversation.
    """
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
    """Raise ConfigurationError if a technique needs all of a text that is too long for memory.

    Args:
        owners: the names of the techniques that need all of it.
    """
    if owners and text.characters > IN_MEMORY_CHARACTERS:
        raise refusal(
            f"{owners[0]} cuts the text into examples of its own and needs all of it in memory, "
            f"but {text.name} has more than {IN_MEMORY_CHARACTERS:,} characters. Use a part of it, "
            f"or drop {owners[0]}."
        )


def make_blocks(corpus: Corpus, tokenizer: "PreTrainedTokenizerBase", sequence_length: int, batch: int) -> Blocks:
    """Tokenise both parts and cut them into blocks of T = `sequence_length` tokens.

    The last, shorter piece is dropped, and so are blocks of conversations in which nothing counts. Training blocks that
    do not fill an effective batch of `batch` blocks are dropped too: so every step of every recipe sees as many tokens,
    however the batch is divided.

    Raises:
        ConfigurationError: the text is too short for one batch or for one held-out block, or the chat template cannot
            be used for a conversation.
        UnavailableError: there is no room on the disk for the tokens of a long text.
    """
    import pyarrow as pa
    from datasets import Dataset

    if isinstance(corpus.train, str):
        blocks = pa.array(cut_into_blocks(_tokenise(corpus.train, tokenizer), sequence_length), pa.list_(pa.int32()))
        # `datasets` would make a fingerprint from three copies of the table.
        train = Dataset(pa.table({"input_ids": blocks}), fingerprint=os.urandom(8).hex())
    else:
        train = Dataset.from_file(str(_tokenise_to_file(corpus, corpus.train, tokenizer, sequence_length)))
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
    """Return remarks on conversations: what counts, and which entries of messages the chat template does not write."""
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


# The tokens of the last text that was in memory, four bytes each. To make them takes 0.9 s per MB, and the runs of a
# notebook share them. The key is the text's hash and the tokenizer's state.
_IDS: dict[tuple[str, str], Any] = {}


def _tokenise(text: str, tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Return the tokens of a text in memory, as an array of int32."""
    import numpy as np

    key = hashlib.sha256(text.encode()).hexdigest(), _state(tokenizer)
    if key not in _IDS:
        _IDS.clear()
        _IDS[key] = np.fromiter(chain.from_iterable(in_time(encode_text([text], tokenizer))), dtype=np.int32)
    return _IDS[key]


def _state(tokenizer: "PreTrainedTokenizerBase", loss: str = "") -> str:
    """Return a text that is equal for tokenizers which give a text the same tokens."""
    chat = f" {loss} {template_of(tokenizer)}" if loss else ""
    return f"{tokenizer.backend_tokenizer.to_str()} {tokenizer.eos_token}{chat}"


def in_time(tokens: Iterator[list[int]]) -> Iterator[list[int]]:
    """Yield the tokens of a text, piece by piece.

    Raises:
        ConfigurationError: a piece takes longer than PIECE_S. An expression in a tokenizer's file may take for ever.
    """
    while True:
        with explain_errors(
            "corpus: the tokenizer does not get through the text", "Use the one that belongs to the model."
        ):
            ids = call_within(PIECE_S, partial(next, tokens, None), SLOW_TOKENIZER)
        if ids is None:
            return
        yield ids


def _rows(corpus: Corpus, text: Iterable[str], tokenizer: Any, length: int) -> Iterator[dict[str, Any]]:
    """Yield blocks as rows of a data set. Raises ConfigurationError for conversations in which nothing counts."""
    if not corpus.loss:
        for block in pack_blocks(in_time(encode_text(text, tokenizer)), length):
            yield {"input_ids": block}
        return
    rows = pack_conversations((label_line(corpus, line, tokenizer) for line in text), length)
    first = list(islice(rows, 1))
    if not first:
        part = "held-out" if isinstance(text, list) else "training"
        raise refusal(
            f"the {part} part of {corpus.name} gives no block of {length} tokens in which one "
            "counts. Use more conversations, with messages of the role assistant, or a smaller "
            "sequence_length."
        )
    yield from chain(first, rows)


def label_line(corpus: Corpus, line: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Return the tokens of a conversation with their labels. A ConfigurationError names its place in the file."""
    try:
        return call_within(CONVERSATION_S, partial(label_tokens, line, tokenizer, corpus.loss), SLOW_TOKENIZER)
    except Exception as error:  # a template may raise anything
        place = find_text(corpus.name, "").place_of(line)
        raise refusal(
            f"{place}: the chat template cannot be used ({in_a_line(error)}). Correct the row, use "
            "a model with another template, or let all tokens count: loss=all"
        ) from None


def _tokenise_to_file(corpus: Corpus, text: Stream, tokenizer: "PreTrainedTokenizerBase", length: int) -> Path:
    """Write the blocks to an Arrow file, once for a text, a tokenizer and a length, and return its path.

    The name ends with the digest of the content, so that a damaged file is found and made again.
    """
    state = hashlib.sha256(f"{corpus.sha256} {_state(tokenizer, corpus.loss)} {length}".encode()).hexdigest()[:24]
    folder = folder_of_runs("tokens")
    with part_file(folder, f"corpus: the tokens of {corpus.name}") as part:
        for path in folder.glob(f"{state}-*.arrow"):
            readable = path.is_file() and os.access(path, os.R_OK)
            if readable and path.stem.endswith(_digest(path, signature_of([path]))):
                return path
            if path.is_dir():  # a damaged file is replaced below, unless another process has done so
                shutil.rmtree(path, ignore_errors=True)
        _write_blocks(_rows(corpus, _with_progress(text), tokenizer, length), part)
        if text.source.signature() != text.signature:
            raise refusal(f"{corpus.name} was changed while it was read. Start again.")
        return put_in_place(part, f"{state}-{_digest(part, ())}.arrow")


@lru_cache(maxsize=8)  # reading 2 GB takes a second
def _digest(path: Path, signature: Signature) -> str:
    """Return the hash of a file; its signature is a part of the cache's key."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:24]


def _with_progress(text: Stream) -> Iterator[str]:
    """Yield the pieces of a text, and show how far it is read."""
    with tqdm(total=len(text), desc="tokenising", unit="char", unit_scale=True, disable=None, leave=False) as bar:
        for piece in text:
            yield piece
            bar.update(1 if text.source.loss else len(piece))


def _write_blocks(rows: Iterator[dict[str, Any]], path: Path) -> None:
    from datasets.arrow_writer import ArrowWriter

    with ArrowWriter(path=str(path)) as writer:
        for row in rows:
            writer.write(row)  # the writer collects rows into batches
        writer.finalize()
