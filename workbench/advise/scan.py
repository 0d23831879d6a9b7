"""`scan(recipe)`: the longest rows of a file, the steps in which they come, whether they fit, and what makes them fit.

Texts and conversations are read one after another and not kept: of each row stay its place, what bounds its tokens, and
how many they are where that was counted. Every number of tokens that is shown was counted by the model's own tokenizer.
"""

import json
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from workbench.advise.frontier import positions_of
from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError, in_a_line
from workbench.base.result import Result
from workbench.export.written import as_command
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.models.load import load_tokenizer
from workbench.models.source import locate_config
from workbench.prediction import predict as prediction
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Capability, Technique
from workbench.texts import chat, readers

AT_ONCE = 1 << 22  # characters that are tokenized together
MANY = 4096  # rows that are tokenized together
MULTIPLE = 8  # of tokens, a cap: what matrix units like
SHOWN = 8  # rows of a list
# Of what a batch needs: the gaps that batches of unequal length leave in the reserved memory, too small for the next.
# GPT-2 124M on an emulated T4, epochs of 300 and 1,600 rows: caps with 10 % to spare held in eight of eight trainings
# (batches of 8 and 16, several seeds), a cap with 5 % in one of two.
GAPS = 0.1
UNKNOWN = -1  # a number of tokens
ENDLESS = 1 << 62  # tokens, where nothing bounds them
NFC_GROWTH = 3  # UTF-8 bytes for one, at most (Unicode FAQ, "Normalization"); ASCII stays as it is


@dataclass(frozen=True)
class Scan(Result):
    """What a scan found. `needed_bytes` are predicted for a whole batch, padded to the longest row or to `positions`,
    and `gaps` more, a part of the need, for what unequal batches leave free in the allocator's memory.

    Of `rows`, those `counted` were tokenized, the others have too few bytes to matter. `longest` are the longest, each
    with its place, tokens and step of the first epoch, from 1; `batch` are the places of those that the first comes
    with, `empty` the first rows without text. `cap` is a length that fits, with the tokens that it cuts from rows;
    None: all fits, or nothing does.
    """

    recipe: Recipe
    gpu: str
    engine: str
    limit_bytes: int
    needed_bytes: int
    gaps: float
    positions: int
    rows: int
    counted: int
    steps: int
    longest: list[dict[str, Any]]
    batch: list[str]
    empty: list[str]
    cap: Mapping[str, int] | None

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.limit_bytes and self.longest[0]["tokens"] <= self.positions

    @property
    def padded_tokens(self) -> int:
        """To which the largest batch is padded: the longest row, as far as the model has positions."""
        return min(int(self.longest[0]["tokens"]), self.positions)

    def __str__(self) -> str:
        recipe = self.recipe
        lines = [
            f"{recipe.corpus}: {self.rows:,} rows; {self.counted:,} were tokenized, the others have too few bytes",
            f"The longest by the tokenizer of {recipe.model}, and where the Trainer's own order has them for the seed "
            f"{recipe.seed}, of {self.steps:,} steps of the first epoch:",
        ]
        for row in self.longest:
            lines.append(f"{row['tokens']:>12,} tokens   step {row['step']:<9,} {row['place']}")
        more = ", …" if len(self.batch) > SHOWN else ""
        lines += [
            f"The largest batch, in step {self.longest[0]['step']:,}: {', '.join(self.batch[:SHOWN])}{more}",
            f"  A whole batch padded to {self.padded_tokens:,} tokens needs {format_bytes(self.needed_bytes)}, with "
            f"{self.gaps:.0%} added for gaps between unequal batches; {find_gpu(self.gpu).title} has "
            f"{format_bytes(self.limit_bytes)}: "
            f"{'it fits' if self.needed_bytes <= self.limit_bytes else 'it does NOT fit'}. "
            f"Predicted by the {self.engine}, not measured.",
        ]
        if self.longest[0]["tokens"] > self.positions:
            lines.append(
                f"  The longest is beyond the {self.positions:,} positions of {recipe.model}: training stops there."
            )
        if self.empty:
            lines.append(f"Empty, so that nothing is learned from them: {', '.join(self.empty)}")
        return "\n".join([*lines, *([] if self.fits else self._cures())])

    def _cures(self) -> list[str]:
        cap = self.cap
        lines = [f"Not even rows of {MULTIPLE} tokens fit. What may make them fit:"]
        if cap:
            lines = [
                "What makes it fit:",
                f"  a cap at {cap['tokens']:,} tokens: needs {format_bytes(cap['needed_bytes'])}; cuts "
                f"{cap['cut_tokens']:,} tokens from {cap['cut_rows']:,} rows ({cap['cut_rows'] / self.rows:.2%})",
                f"  packing into blocks of {cap['tokens']:,}: needs {format_bytes(cap['packed_bytes'])}; drops at most "
                f"{cap['tokens'] - 1:,} tokens, at the end of the last block; rows are cut at the borders of blocks",
            ]
        tokens = self.padded_tokens
        command = as_command(replace(self.recipe, sequence_length=tokens)).replace(" run ", " plan ", 1)
        lines.append(f"  other techniques, with rows of up to {tokens:,} tokens: {command} --gpu {self.gpu}")
        for name, technique in REGISTRY.items():
            if self.gaps and _leaves_no_gaps(technique()):
                lines.append(f"  no gaps: this scan with --technique {name}")
                break
        return lines

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**vars(self), "recipe": self.recipe.to_dict(), "fits": self.fits}


def scan(recipe: Recipe, gpu: str = "h100", *, longest: int = 5, engine: str | None = None) -> Scan:
    """Find the longest rows of the recipe's corpus, and whether a batch with them fits.

    Args:
        longest: how many rows are named.

    Raises:
        ConfigurationError: the corpus is a stream, cannot be read, or has no text or fewer rows than a batch; or a
            technique makes examples of its own.
    """
    card = find_gpu(gpu)
    source = row_source(recipe)
    engine = prediction.engine_for(card.name, engine)
    recipe = prediction.resolved(recipe, [card.name])
    positions = positions_of(recipe) - sum(technique.positions for technique in recipe.techniques)
    rows = _Rows(source, load_tokenizer(locate_config(recipe.model)))
    if engine == prediction.engine_for(card.name):
        prediction.warm_predictions(card.name)  # meanwhile
    rows.count_longest(longest)
    if len(rows.tokens) < recipe.shape.sequences or len(rows.empty) == len(rows.tokens):
        raise ConfigurationError(
            f"scan: {source.name} has {len(rows.tokens)} rows, {len(rows.empty)} of them empty. Give at least a "
            f"batch of {recipe.shape.sequences} rows, with text in them."
        )
    gaps = 0.0 if any(_leaves_no_gaps(technique) for technique in recipe.techniques) else GAPS

    def needed(tokens: int, padding: bool = True) -> int:
        cut = replace(recipe, sequence_length=max(tokens, 2))
        predicted = prediction.predict(cut, card.name, padding=padding, engine=engine)
        return round(predicted.need_bytes * (1 + gaps * padding))

    order = training_order(recipe, len(rows.tokens))
    examples, batch, steps = _placed(recipe, rows, order)
    scanned = Scan(
        recipe=recipe,
        gpu=card.name,
        engine=engine,
        limit_bytes=card.memory_bytes,
        needed_bytes=needed(min(examples[0]["tokens"], positions)),
        gaps=gaps,
        positions=positions,
        rows=len(order),
        counted=len(order) - rows.tokens.count(UNKNOWN),
        steps=steps,
        longest=examples,
        batch=batch,
        empty=[rows.place(row) for row in rows.empty[:SHOWN]],
        cap=None,
    )
    return scanned if scanned.fits else replace(scanned, cap=_longest_cap(scanned, needed, rows))


def _longest_cap(scan: Scan, needed: Callable[..., int], rows: "_Rows") -> dict[str, int] | None:
    """The longest length that fits, with what it needs padded and packed, and what it cuts; None: none fits."""
    caps = range(MULTIPLE, min(scan.longest[0]["tokens"] - 1, scan.positions) + 1, MULTIPLE)
    fitting = caps[: bisect_right(caps, scan.limit_bytes, key=needed)]
    if not fitting:
        return None
    tokens = fitting[-1]
    cap = {"tokens": tokens, "needed_bytes": needed(tokens), "packed_bytes": needed(tokens, padding=False)}
    return cap | rows.cut(tokens)


def _leaves_no_gaps(technique: Technique) -> bool:
    return bool(technique.allocator_settings().get("expandable_segments"))


def row_source(recipe: Recipe) -> readers.TextSource:
    """The file or folder whose rows are the examples, its beginning read. Raises as `scan` does."""
    for technique in recipe.techniques:
        if Capability.TRAINING_SET in technique.forbids:
            raise ConfigurationError(
                f"scan: {technique.name} makes other examples of a text; here each row is one, as it is. Leave "
                f"{technique.name} out."
            )
    name = recipe.corpus
    path = Path(name)
    if name == "-" or "://" in name or (path.exists() and not path.is_file() and not path.is_dir()):
        raise ConfigurationError(
            f"scan: {name!r} is a stream, and the order of training is known only for rows that can be counted. Write "
            "it to a file first, for example rows.jsonl."
        )
    source = readers.find_text(name, "Give a file with one example per row.")
    for file in source.files():
        if file.is_file() and readers.kind_of(file) in readers.PLAIN:
            raise ConfigurationError(
                f"scan: {file} is plain text, which has no rows and is packed into blocks of equal length. Give "
                f"{', '.join(sorted({*readers.KINDS} - {*readers.PLAIN}))}."
            )
    next(source.documents(), None)  # raises what is wrong at its beginning
    return source


def tokens_at_most(tokenizer: Any) -> Callable[[str], int]:
    """How many tokens a text has at most, by its bytes.

    A byte-level BPE begins with a token for every byte, and merges them; normalizing to NFC may give more bytes. Of any
    other tokenizer nothing is known: `ENDLESS`.
    """
    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.to_str())
    model = state["model"]
    before = json.dumps(state["pre_tokenizer"])
    normalizer = (state["normalizer"] or {"type": None})["type"]
    by_bytes = '"ByteLevel"' in before and '"add_prefix_space": true' not in before and not model.get("byte_fallback")
    if model["type"] != "BPE" or not by_bytes or normalizer not in (None, "NFC"):
        return lambda text: ENDLESS
    special: int = backend.num_special_tokens_to_add(False)
    growth = NFC_GROWTH if normalizer else 1

    def at_most(text: str) -> int:
        return special + (len(text) if text.isascii() else growth * len(text.encode()))

    return at_most


class _Rows:
    """Of every row its file, its line or row there, and its tokens, where they were counted."""

    def __init__(self, source: readers.TextSource, tokenizer: Any) -> None:
        self.source = source
        self.files = source.files()
        self.signature = source.signature()
        self.tokenizer = tokenizer
        self.template = chat.template_of(tokenizer)  # of conversations
        self.at_most = tokens_at_most(tokenizer)
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_per_row = self.backend.num_special_tokens_to_add(False)  # but a template writes its own
        self.file = array("q")
        self.number = array("q")
        self.tokens = array("q")
        self.empty = array("q")
        self.longest: list[int] = []  # numbers of tokens, the largest first

    def count_longest(self, many: int) -> None:
        self.longest = [0] * many
        self._read(lambda row, bound: bound >= self.longest[-1])

    def cut(self, cap: int) -> dict[str, int]:
        """From how many rows how many tokens a cap cuts."""
        self._read(lambda row, bound: self.tokens[row] == UNKNOWN and bound > cap)
        if self.source.signature() != self.signature:
            raise readers.refusal(f"{self.source.name} was changed while it was read. Start again.")
        over = [tokens - cap for tokens in self.tokens if tokens > cap]
        return {"cut_rows": len(over), "cut_tokens": sum(over)}

    def place(self, row: int) -> str:
        return self._place(self.files[self.file[row]], self.number[row])

    def _place(self, path: Path, number: int) -> str:
        unit = "row" if readers.kind_of(path) in (*readers.TABLES, ".json") else "line"
        return f"{path.name}, {unit} {number}" if len(self.files) > 1 else f"{unit} {number}"

    def _read(self, wanted: Callable[[int, int], bool]) -> None:
        """Read all rows, and tokenize those that are wanted, by their number and bound, many together."""
        waiting: list[tuple[int, str, int]] = []
        size = 0
        for row, (file, number, text, special, bound) in enumerate(self._texts()):
            if row == len(self.tokens):  # the first reading
                self.file.append(file)
                self.number.append(number)
                self.tokens.append(UNKNOWN)
                if not text or text.isspace():
                    self.empty.append(row)
            if wanted(row, bound):
                waiting.append((row, text, special))
                size += len(text)
            if size > AT_ONCE or len(waiting) == MANY:
                self._tokenize(waiting)
                waiting = []
                size = 0
        self._tokenize(waiting)

    def _tokenize(self, waiting: list[tuple[int, str, int]]) -> None:
        texts = [text for _, text, _ in waiting]
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        counted = []
        for (row, _, special), encoding in zip(waiting, encodings, strict=True):
            self.tokens[row] = len(encoding) + special
            counted.append(self.tokens[row])
        self.longest = nlargest(len(self.longest), [*self.longest, *counted])

    def _texts(self) -> Iterator[tuple[int, int, str, int, int]]:
        """Of every row the file, the line or row there, the text, of a null none, its special tokens, and the bound."""
        try:
            for file, path in enumerate(self.files):
                rows = readers.read_documents(str(path), self.source.column, self.source.encoding)
                for number, content in tqdm(rows, path.name, unit=" rows", disable=None, leave=False):
                    text = content or ""
                    special = self.special_per_row
                    if self.source.kind:
                        text, special = self._written(path, number, readers.line_of(self.source.kind, content))
                    yield file, number, text, special, self.at_most(text)
        except Exception:
            for _ in self.source.documents():  # which says what is wrong, where, and what to do
                pass
            raise

    def _written(self, path: Path, number: int, line: str) -> tuple[str, int]:
        """A conversation as the text that its template makes of it, and the special tokens that it gets beside."""
        if isinstance(line, readers.LeftOut):
            return "", 0
        try:
            parts, write = chat.parts_of(json.loads(line), self.tokenizer, self.template)
            return str(write(parts)), self.special_per_row if isinstance(parts, str) else 0
        except Exception as error:  # a template may raise anything
            raise readers.refusal(
                f"{self.source.name}: {self._place(path, number)}: the chat template cannot be used "
                f"({in_a_line(error)}). Correct the row, or use a model with another template."
            ) from None


def _placed(recipe: Recipe, rows: _Rows, order: Any) -> tuple[list[dict[str, Any]], list[str], int]:
    """The longest rows, of equals the first to come; the batch of the first; and the steps of an epoch."""
    arguments = recipe.training_arguments()
    batch_size = arguments["per_device_train_batch_size"]
    rows_per_step = batch_size * arguments["gradient_accumulation_steps"]
    position = np.argsort(order)  # of each row
    longest_rows = np.lexsort((position, -np.array(rows.tokens)))[: len(rows.longest)]
    longest = []
    for row in longest_rows:
        step = int(position[row]) // rows_per_step + 1
        longest.append({"place": rows.place(row), "tokens": rows.tokens[row], "step": step})
    first = position[longest_rows[0]] // batch_size * batch_size
    batch = [rows.place(row) for row in order[first : first + batch_size]]
    return longest, batch, (len(order) - 1) // rows_per_step + 1


def training_order(recipe: Recipe, rows: int, epoch: int = 0) -> Any:
    """The rows, (rows,), in the order in which the Trainer's own sampler takes them in an epoch, counted from 0."""
    import torch
    from transformers import Trainer

    from workbench.training.arguments import argument_values, training_arguments

    with tempfile.TemporaryDirectory() as folder:
        values = argument_values(recipe, 1.0) | {"report_to": "none"}
        arguments = training_arguments(values, "cpu", Path(folder))
        arguments.eval_on_start = False
        loader: Any = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=range(rows)).get_train_dataloader()
    loader.set_epoch(epoch)
    return np.concatenate([*loader.batch_sampler])
