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
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from workbench.advise.candidate import Candidate
from workbench.advise.frontier import positions_of
from workbench.errors import ConfigurationError, in_a_line
from workbench.export.written import as_command
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.measure.categories import format_bytes
from workbench.models.load import load_tokenizer
from workbench.models.source import locate_config
from workbench.predict import predict as prediction
from workbench.predict.worker import start
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Capability, Technique
from workbench.texts import chat, readers

AT_ONCE, MANY = 1 << 22, 4096  # characters, and rows, that are tokenized together
MULTIPLE = 8  # of tokens, a cap: what matrix units like
SHOWN = 8  # rows of a list
# Of what a batch needs: the gaps that batches of unequal length leave in the reserved memory, too small for the next.
# GPT-2 124M on an emulated T4, epochs of 300 and 1,600 rows: caps with 10 % to spare held in eight of eight trainings
# (batches of 8 and 16, several seeds), a cap with 5 % in one of two.
GAPS = 0.1
UNKNOWN, ENDLESS = -1, 1 << 62
NFC_GROWTH = 3  # UTF-8 bytes for one, at most (Unicode FAQ, "Normalization"); ASCII stays as it is


@dataclass(frozen=True)
class Scan:
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
    card, source = find_gpu(gpu), row_source(recipe)
    engine, recipe = prediction.engine_for(card.name, engine), prediction.resolved(recipe, [card.name])
    positions = positions_of(recipe) - sum(technique.positions for technique in recipe.techniques)
    lengths = _Lengths(source, load_tokenizer(locate_config(recipe.model)))
    if engine == prediction.engine_for(card.name):
        start(card.name)  # meanwhile
    lengths.count_longest(longest)
    if len(lengths.tokens) < recipe.shape.sequences or len(lengths.empty) == len(lengths.tokens):
        words = f"scan: {source.name} has {len(lengths.tokens)} rows, {len(lengths.empty)} of them empty"
        raise ConfigurationError(f"{words}. Give at least a batch of {recipe.shape.sequences} rows, with text in them.")
    order = training_order(recipe, len(lengths.tokens))
    examples, batch, steps = _placed(recipe, lengths, order)
    most = min(examples[0]["tokens"], positions)
    gaps = 0.0 if any(_leaves_no_gaps(technique) for technique in recipe.techniques) else GAPS

    def needed(tokens: int, padding: bool = True) -> int:
        one = replace(recipe, sequence_length=max(tokens, 2))
        predicted = prediction.predict(one, card.name, padding=padding, engine=engine)
        return round(Candidate(one, (), predicted, card.memory_bytes).needed_bytes * (1 + gaps * padding))

    counted = len(order) - lengths.tokens.count(UNKNOWN)
    facts = engine, card.memory_bytes, needed(most), gaps, positions, len(order), counted, steps
    found = Scan(recipe, card.name, *facts, examples, batch, [*map(lengths.place, lengths.empty[:SHOWN])], None)
    possible = range(MULTIPLE, min(examples[0]["tokens"] - 1, positions) + 1, MULTIPLE)
    if found.fits or not (fitting := possible[: bisect_right(possible, card.memory_bytes, key=needed)]):
        return found
    cap = fitting[-1]
    sizes = {"needed_bytes": needed(cap), "packed_bytes": needed(cap, padding=False)}
    return replace(found, cap={"tokens": cap, **sizes, **lengths.cut(cap)})


def _leaves_no_gaps(technique: Technique) -> bool:
    return bool(technique.allocator_settings().get("expandable_segments"))


def row_source(recipe: Recipe) -> readers.TextSource:
    """The file or folder whose rows are the examples, its beginning read. Raises as `scan` does."""
    for technique in recipe.techniques:
        if Capability.TRAINING_SET in technique.forbids:
            words = f"scan: {technique.name} makes other examples of a text; here each row is one, as it is"
            raise ConfigurationError(f"{words}. Leave {technique.name} out.")
    path = Path(name := recipe.corpus)
    if name == "-" or "://" in name or (path.exists() and not path.is_file() and not path.is_dir()):
        words = f"scan: {name!r} is a stream, and the order of training is known only for rows that can be counted"
        raise ConfigurationError(f"{words}. Write it to a file first, for example rows.jsonl.")
    source = readers.find_text(name, "Give a file with one example per row.")
    if plain := [file for file in source.files() if file.is_file() and readers.kind_of(file) in readers.PLAIN]:
        words = f"scan: {plain[0]} is plain text, which has no rows and is packed into blocks of equal length"
        raise ConfigurationError(f"{words}. Give {', '.join(sorted({*readers.KINDS} - {*readers.PLAIN}))}.")
    next(source.documents(), None)
    return source


def tokens_at_most(tokenizer: Any) -> Callable[[str], int]:
    """How many tokens a text has at most, by its bytes.

    A byte-level BPE begins with a token for every byte, and merges them; normalizing to NFC may give more bytes. Of any
    other tokenizer nothing is known: `ENDLESS`.
    """
    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.to_str())
    before, model, more = json.dumps(state["pre_tokenizer"]), state["model"], backend.num_special_tokens_to_add(False)
    normalizer = (state["normalizer"] or {"type": None})["type"]
    by_bytes = '"ByteLevel"' in before and '"add_prefix_space": true' not in before and not model.get("byte_fallback")
    if model["type"] != "BPE" or not by_bytes or normalizer not in (None, "NFC"):
        return lambda text: ENDLESS
    growth = NFC_GROWTH if normalizer else 1
    return lambda text: more + (len(text) if text.isascii() else growth * len(text.encode()))


class _Lengths:
    """Of every row its file, its line or row there, a bound of its tokens, and their number where it was counted."""

    def __init__(self, source: readers.TextSource, tokenizer: Any) -> None:
        self.source, self.files, self.signature = source, source.files(), source.signature()
        self.tokenizer, self.template = tokenizer, chat.template_of(tokenizer)  # of conversations
        self.at_most, self.backend = tokens_at_most(tokenizer), tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.more = self.backend.num_special_tokens_to_add(False)  # but a template writes its own
        self.file, self.number, self.bound, self.special, self.tokens, self.empty = (array("q") for _ in range(6))
        self.longest: list[int] = []  # numbers of tokens, in order

    def count_longest(self, many: int) -> None:
        self.longest = [0] * many
        self._read(lambda row: self.bound[row] >= self.longest[0])

    def cut(self, cap: int) -> dict[str, int]:
        """From how many rows how many tokens a cap cuts."""
        self._read(lambda row: self.tokens[row] == UNKNOWN and self.bound[row] > cap)
        if self.source.signature() != self.signature:
            raise readers.refusal(f"{self.source.name} was changed while it was read. Start again.")
        over = [tokens - cap for tokens in self.tokens if tokens > cap]
        return {"cut_rows": len(over), "cut_tokens": sum(over)}

    def place(self, row: int) -> str:
        return self._place(self.files[self.file[row]], self.number[row])

    def _place(self, path: Path, number: int) -> str:
        unit = "row" if readers.kind_of(path) in (*readers.TABLES, ".json") else "line"
        return f"{path.name + ', ' if len(self.files) > 1 else ''}{unit} {number}"

    def _read(self, wanted: Callable[[int], bool]) -> None:
        """Read all rows, and tokenize those that are wanted, many together."""
        waiting, size = dict[int, str](), 0
        for row, (file, number, text, special, bound) in enumerate(self._rows()):
            if row == len(self.tokens):
                self.file.append(file)
                self.number.append(number)
                self.bound.append(bound)
                self.special.append(special)
                self.tokens.append(UNKNOWN)
                self.empty.extend([] if text and not text.isspace() else [row])
            if wanted(row):
                waiting[row] = text
                size += len(text)
            if size > AT_ONCE or len(waiting) == MANY:
                self._tokenize(waiting)
                waiting, size = {}, 0
        self._tokenize(waiting)

    def _rows(self) -> Iterator[tuple[int, int, str, int, int]]:
        """Of every row the file, the line or row there, the text, of a null none, its special tokens, and the bound."""
        try:
            for file, path in enumerate(self.files):
                rows = readers.read_documents(str(path), self.source.column, self.source.encoding)
                for number, found in tqdm(rows, path.name, unit=" rows", disable=None, leave=False):
                    text, special = self._written(path, number, found) if self.source.loss else (found or "", self.more)
                    yield file, number, text, special, self.at_most(text)
        except Exception:
            sum(1 for _ in self.source.documents())  # says what is wrong, where, and what to do
            raise

    def _written(self, path: Path, number: int, found: Any) -> tuple[str, int]:
        """A conversation as the text that its template makes of it, and the special tokens that it gets beside."""
        if (line := chat.in_one_line(self.source.column, found)) is None:
            return "", 0
        try:
            parts, write = chat.parts_of(json.loads(line), self.tokenizer, self.template)
            return str(write(parts)), self.more if isinstance(parts, str) else 0
        except Exception as error:  # a template may raise anything
            place = f"{self.source.name}: {self._place(path, number)}"
            words = f"{place}: the chat template cannot be used ({in_a_line(error)})"
            raise readers.refusal(f"{words}. Correct the row, or use a model with another template.") from None

    def _tokenize(self, texts: dict[int, str]) -> None:
        encodings = self.backend.encode_batch_fast([*texts.values()], add_special_tokens=False)
        counted = [len(encoding) + self.special[row] for row, encoding in zip(texts, encodings, strict=True)]
        for row, tokens in zip(texts, counted, strict=True):
            self.tokens[row] = tokens
        self.longest = sorted([*self.longest, *counted])[-len(self.longest) :]


def _placed(recipe: Recipe, lengths: _Lengths, order: Any) -> tuple[list[dict[str, Any]], list[str], int]:
    """The longest rows, of equals the first to come; the batch of the first; and the steps of an epoch."""
    arguments = recipe.training_arguments()
    size, together = arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
    position = np.argsort(order)
    rows = np.lexsort((position, -np.array(lengths.tokens)))[: len(lengths.longest)]
    first, steps = position[rows[0]] // size * size, position // (size * together) + 1
    found = [{"place": lengths.place(r), "tokens": lengths.tokens[r], "step": int(steps[r])} for r in rows]
    return found, [*map(lengths.place, order[first : first + size])], int(steps.max())


def training_order(recipe: Recipe, rows: int, epoch: int = 0) -> Any:
    """The rows, (rows,), in the order in which the Trainer's own sampler takes them in an epoch, counted from 0."""
    import torch
    from transformers import Trainer

    from workbench.run.arguments import argument_values, training_arguments

    with tempfile.TemporaryDirectory() as folder:
        values = argument_values(recipe, 1.0) | {"report_to": "none"}
        arguments = training_arguments(values, "cpu", Path(folder))
        arguments.eval_on_start = False
        loader: Any = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=range(rows)).get_train_dataloader()
    loader.set_epoch(epoch)
    return np.concatenate([*loader.batch_sampler])


def scan_text(found: Scan) -> str:
    """The scan as people read it."""
    recipe, worst, more = found.recipe, found.longest[0], ", …" if len(found.batch) > SHOWN else ""
    tokens, need, room = min(worst["tokens"], found.positions), found.needed_bytes, found.limit_bytes
    lines = [
        f"{recipe.corpus}: {found.rows:,} rows; {found.counted:,} were tokenized, the others have too few bytes",
        f"The longest by the tokenizer of {recipe.model}, and where the Trainer's own order has them for the seed "
        f"{recipe.seed}, of {found.steps:,} steps of the first epoch:",
        *(f"{row['tokens']:>12,} tokens   step {row['step']:<9,} {row['place']}" for row in found.longest),
        f"The largest batch, in step {worst['step']:,}: {', '.join(found.batch[:SHOWN])}{more}",
        f"  A whole batch padded to {tokens:,} tokens needs {format_bytes(need)}, with {found.gaps:.0%} added for gaps "
        f"between unequal batches; {find_gpu(found.gpu).title} has {format_bytes(room)}: "
        f"{'it fits' if need <= room else 'it does NOT fit'}. Predicted by the {found.engine}, not measured.",
    ]
    if worst["tokens"] > found.positions:
        lines += [f"  The longest is beyond the {found.positions:,} positions of {recipe.model}: training stops there."]
    if found.empty:
        lines += [f"Empty, so that nothing is learned from them: {', '.join(found.empty)}"]
    return "\n".join([*lines, *([] if found.fits else _cures(found, tokens))])


def _cures(found: Scan, tokens: int) -> list[str]:
    command = as_command(replace(found.recipe, sequence_length=tokens)).replace(" run ", " plan ", 1)
    others = [f"  other techniques, with rows of up to {tokens:,} tokens: {command} --gpu {found.gpu}"]
    if found.gaps:
        name = next(name for name, technique in REGISTRY.items() if _leaves_no_gaps(technique()))
        others += [f"  no gaps: this scan with --technique {name}"]
    if (cap := found.cap) is None:
        return [f"Not even rows of {MULTIPLE} tokens fit. What may make them fit:", *others]
    return [
        "What makes it fit:",
        f"  a cap at {cap['tokens']:,} tokens: needs {format_bytes(cap['needed_bytes'])}; cuts {cap['cut_tokens']:,} "
        f"tokens from {cap['cut_rows']:,} rows ({cap['cut_rows'] / found.rows:.2%})",
        f"  packing into blocks of {cap['tokens']:,}: needs {format_bytes(cap['packed_bytes'])}; drops at most "
        f"{cap['tokens'] - 1:,} tokens, at the end of the last block; rows are cut at the borders of blocks",
        *others,
    ]
