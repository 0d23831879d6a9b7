"""A text before it is trained on: what the model will see of it, which tokens count, and what is cut or left out."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, groupby, islice
from typing import Any

from workbench.base.device import pick_device
from workbench.base.result import Result
from workbench.base.tokens import END_OF_TEXT, IGNORED, encode_text, pack_blocks
from workbench.models.load import load_tokenizer, quiet
from workbench.models.source import locate_config, resolve_auto
from workbench.texts import corpus as texts
from workbench.texts.chat import count_rewritten
from workbench.texts.corpus import Corpus

# The lengths are measured on so many documents, or on so many characters of them.
MEASURED_ROWS = 2_000
MEASURED_CHARACTERS = 1 << 21
SHOWN_TOKENS = 200  # an example is shown up to there
QUANTILES = {"least": 0.0, "10 %": 0.1, "half": 0.5, "90 %": 0.9, "99 %": 0.99, "most": 1.0}
MARKS = ("⟦", "⟧")  # around text that counts; a notebook highlights it instead
Pairs = list[tuple[int, int]]  # (token, label), the label IGNORED where the token does not count


@dataclass(frozen=True)
class Example:
    """The beginning of a row.

    Attributes:
        pieces: its text in pieces, each with whether it counts for the loss.
        tokens, counted: how many tokens the whole row has, and how many of them count.
        hidden: how many tokens are not shown.
    """

    pieces: tuple[tuple[str, bool], ...]
    tokens: int
    counted: int
    hidden: int

    def text_with_marks(self) -> str:
        """Return the text, with marks around what counts, unless all of it does."""
        begin, end = MARKS
        if self.counted == self.tokens:
            begin = ""
            end = ""
        return "".join(f"{begin}{text}{end}" if counts else text for text, counts in self.pieces)


@dataclass(frozen=True)
class TextPreview(Result):
    """The text as a model will see it: examples, lengths, and what becomes of it at a sequence length.

    Attributes:
        text, model, sequence_length: as they were given; `auto` is resolved.
        documents: how many there are, the held-out ones among them.
        measured: how many of them, from the first, were turned into tokens.
        conversations: whether they are conversations, of which the answers count, or texts, of which all does.
        examples: the first conversations, or the first blocks of a text.
        lengths: the quantiles of the measured documents' lengths, in tokens.
        tokens, counted: how many tokens the measured documents have together, and how many of them count.
        longer: how many measured documents have more tokens than a block.
        blocks: how many blocks of `sequence_length` tokens they fill, one after the other.
        idle_blocks: how many blocks are dropped because nothing counts in them.
        dropped_tokens: how many tokens at the end fill no block.
        remarks: what is left out, does not count or is not written, one sentence each.
    """

    text: str
    model: str
    sequence_length: int
    documents: int
    measured: int
    conversations: bool
    examples: tuple[Example, ...]
    lengths: dict[str, int]
    tokens: int
    counted: int
    longer: int
    blocks: int
    idle_blocks: int
    dropped_tokens: int
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.headline(), *(f"  {remark}" for remark in self.remarks)]
        for number, example in enumerate(self.examples, 1):
            lines += ["", f"{number}. {self.caption(example)}", *example.text_with_marks().splitlines()]
        return "\n".join([*lines, "", *self.about_lengths()])

    def _repr_html_(self) -> str:
        page = super()._repr_html_()
        for mark, tag in zip(MARKS, ("<mark>", "</mark>"), strict=True):
            page = page.replace(mark, tag)
        return page

    def headline(self) -> str:
        """Say what was read, and by whose tokenizer."""
        return f"{self.text}: {self.documents:,} {self._rows()}, by the tokenizer of {self.model}"

    def caption(self, example: Example) -> str:
        """Say how long an example is, and how much of it counts."""
        counted = "all count"
        if example.counted < example.tokens:
            counted = f"{example.counted:,} count: what is marked"
        shown = f", the first {example.tokens - example.hidden:,} shown" if example.hidden else ""
        return f"{example.tokens:,} tokens, {counted}{shown}"

    def about_lengths(self) -> list[str]:
        """Say how long the rows are, and what becomes of them at the chosen length."""
        of = "" if self.measured == self.documents else f" of the first {self.measured:,}"
        quantiles = ", ".join(f"{name} {length:,}" for name, length in self.lengths.items())
        share = f", of which {self.counted / max(self.tokens, 1):.0%} count" if self.conversations else ""
        idle = f" ({self.idle_blocks:,} are dropped: nothing counts in them)" if self.idle_blocks else ""
        if self.measured == 1:
            quantiles = "it is one"
        return [
            f"Tokens of the {self._rows()}{of}: {quantiles}; {self.tokens:,} in all{share}.",
            f"At sequence_length {self.sequence_length:,} they fill {self.blocks:,} blocks one "
            f"after the other{idle}; the last {self.dropped_tokens:,} tokens are dropped.",
            f"{self.longer:,} of {self.measured:,} are longer than a block and go on in the next; "
            "with padding each is cut there.",
        ]

    def _rows(self) -> str:
        name = "conversation" if self.conversations else "text"
        return name if self.documents == 1 else f"{name}s"


def show(text: str, model: str = "auto", *, sequence_length: int = 128, examples: int = 3) -> TextPreview:
    """Show a text as a model will see it. Only the model's tokenizer is loaded, the embedded one without a network.

        show("chats.jsonl", "gpt2", sequence_length=512)

    Args:
        text: what a recipe's `corpus` takes: a file, a folder, an embedded text or a data set of the hub.
        model: what a recipe's `model` takes.
        examples: how many are shown, from the first.

    Raises:
        ConfigurationError: the text, or its first rows with this model's chat template, cannot be used.
        UnavailableError: the hub cannot be reached, and what is needed is not in the cache.
    """
    corpus = texts.load_corpus(text)
    name = resolve_auto(model, pick_device().type) if model == "auto" else model
    with quiet():
        tokenizer = load_tokenizer(locate_config(name))
    rows = list(_label_rows(corpus, tokenizer))
    lengths = sorted(map(len, rows)) or [0]
    blocks = list(pack_blocks(rows, sequence_length))
    tokens = sum(lengths)
    remarks = [*corpus.remarks, *texts.remarks_of_template(corpus, tokenizer)]
    shown = rows
    if corpus.loss:
        remarks += _rewritten(corpus, tokenizer)
    else:
        shown = blocks or rows
    return TextPreview(
        text=text,
        model=name,
        sequence_length=sequence_length,
        documents=corpus.documents,
        measured=len(rows),
        conversations=bool(corpus.loss),
        examples=tuple(_example(row, tokenizer) for row in shown[:examples]),
        lengths={name: lengths[round(share * (len(lengths) - 1))] for name, share in QUANTILES.items()},
        tokens=tokens,
        counted=sum(_count_labels(row) for row in rows),
        longer=sum(length > sequence_length for length in lengths),
        blocks=len(blocks),
        idle_blocks=sum(not _count_labels(block[1:]) for block in blocks),
        dropped_tokens=tokens - len(blocks) * sequence_length,
        remarks=tuple(remarks),
    )


def _label_rows(corpus: Corpus, tokenizer: Any) -> Iterator[Pairs]:
    """Yield the first documents as tokens with labels: at most MEASURED_ROWS, of about MEASURED_CHARACTERS."""
    characters = 0
    for document in islice(_documents(corpus), MEASURED_ROWS):
        if characters > MEASURED_CHARACTERS:
            return
        characters += len(document)
        if corpus.loss:
            yield texts.label_line(corpus, document, tokenizer)
        else:
            end = "" if corpus.documents == 1 else END_OF_TEXT
            ids = chain.from_iterable(encode_text([f"{document}{end}"], tokenizer))
            yield [(token, token) for token in ids]


def _documents(corpus: Corpus) -> Iterable[str]:
    """Return all conversations, the held-out ones last; or the first texts, of about MEASURED_CHARACTERS."""
    if corpus.loss:
        return chain(corpus.train, corpus.held_out.split(texts.LINE_END))
    text = ""
    for part in chain([corpus.train] if isinstance(corpus.train, str) else corpus.train, [corpus.held_out]):
        text += part
        if len(text) > MEASURED_CHARACTERS:
            *whole, begun = text[:MEASURED_CHARACTERS].split(END_OF_TEXT)
            return whole or [begun]
    return text.split(END_OF_TEXT)


def _rewritten(corpus: Corpus, tokenizer: Any) -> Iterable[str]:
    """Yield a sentence, if there are messages of which the template writes something else than their text."""
    count = 0
    for line in islice(_documents(corpus), MEASURED_ROWS):
        count += count_rewritten(json.loads(line), tokenizer)
    if count:
        yield f"{count} messages are not written as they stand: the chat template changes or leaves out part of them"


def _count_labels(row: Pairs) -> int:
    return sum(label != IGNORED for _, label in row)


def _example(row: Pairs, tokenizer: Any) -> Example:
    pieces = []
    for counts, run in groupby(row[:SHOWN_TOKENS], key=lambda pair: pair[1] != IGNORED):
        pieces.append((str(tokenizer.decode([token for token, _ in run])), counts))
    return Example(tuple(pieces), len(row), _count_labels(row), max(len(row) - SHOWN_TOKENS, 0))
