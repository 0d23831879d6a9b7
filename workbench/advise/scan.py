"""`scan(recipe)`: the longest rows of a file, the steps in which they come, whether they fit, and what makes them fit.

Texts and conversations are read one after another and not kept. For each row its number of tokens is remembered,
counted by the model's own tokenizer.
"""

import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError, in_a_line
from workbench.base.result import Result
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.models.family import positions as positions_of
from workbench.models.load import load_tokenizer
from workbench.models.source import locate_config
from workbench.prediction import predict as prediction
from workbench.recipe import BALANCED, GROUPED, STRATEGY, Recipe, as_command
from workbench.techniques import Capability
from workbench.texts import chat, readers

TOGETHER = 128  # rows that are tokenized at once
MULTIPLE = 8  # tokens: a cap is a multiple of this, as matrix units like it
# Part of a batch's need that is added for gaps: batches of unequal length leave some in the reserved memory, each too
# small for the next batch. With GPT-2 124M on an emulated T4, in epochs of 300 and 1,600 rows, caps with 10 % to spare
# held in eight of eight trainings (batches of 8 and 16, several seeds), and a cap with 5 % in one of two. Micro-batches
# of about equal cost (640 rows, A100) have gaps as well: they need 5.9 GiB by themselves, and an epoch held in 6.5 GiB
# and not in 6.2.
GAPS = 0.1


@dataclass(frozen=True)
class Scan(Result):
    """The result of a scan.

    Attributes:
        needed_bytes: the memory that is predicted for a whole batch, padded to the longest row or to `positions`, with
            the gaps added.
        gaps: the part of the need that is added for what unequal batches leave free in the allocator's memory.
        positions: the tokens that the model can take.
        rows: how many rows there are.
        steps: how many steps the first epoch has.
        longest: the longest rows, each with its place, its tokens and its step of the first epoch, from 1.
        empty: how many rows have no text.
        cap: the longest length that fits, with what it needs padded and packed and the tokens that it cuts from rows;
            None if all fits, or nothing does.
        balanced: the widest micro-batch of the first epoch where a step's rows are dealt out by their cost, with what
            it needs; None if all fits, or a step has one micro-batch.
    """

    recipe: Recipe
    gpu: str
    engine: str
    limit_bytes: int
    needed_bytes: int
    gaps: float
    positions: int
    rows: int
    steps: int
    longest: list[dict[str, Any]]
    empty: int
    cap: Mapping[str, int] | None = None
    balanced: Mapping[str, int] | None = None

    @property
    def fits(self) -> bool:
        """Whether the longest rows fit into the card's memory and the model's positions."""
        return self.needed_bytes <= self.limit_bytes and self.longest[0]["tokens"] <= self.positions

    def __str__(self) -> str:
        recipe = self.recipe
        lines = [
            f"{recipe.corpus}: {self.rows:,} rows. "
            f"The longest by the tokenizer of {recipe.model}, and where the Trainer's own order "
            f"has them for the seed {recipe.seed}, of {self.steps:,} steps of the first epoch:",
        ]
        for row in self.longest:
            lines.append(f"{row['tokens']:>12,} tokens   step {row['step']:<9,} {row['place']}")
        longest_tokens = self.longest[0]["tokens"]
        padded_tokens = min(longest_tokens, self.positions)
        lines += [
            f"A whole batch padded to {padded_tokens:,} tokens needs "
            f"{format_bytes(self.needed_bytes)}, with {self.gaps:.0%} added for gaps between "
            f"unequal batches; {find_gpu(self.gpu).title} has {format_bytes(self.limit_bytes)}: "
            f"{'it fits' if self.needed_bytes <= self.limit_bytes else 'it does NOT fit'}. "
            f"Predicted by the {self.engine}, not measured.",
        ]
        if longest_tokens > self.positions:
            lines.append(
                f"  The longest is beyond the {self.positions:,} positions of {recipe.model}: training stops there."
            )
        if self.empty:
            lines.append(f"{self.empty:,} rows are empty: nothing is learned from them.")
        if not self.fits:
            lines += self._cap_in_words()
            lines += self._order_in_words()
            command = as_command(replace(recipe, sequence_length=padded_tokens)).replace(" run ", " plan ", 1)
            lines.append(f"  other techniques, with rows of up to {padded_tokens:,} tokens: {command} --gpu {self.gpu}")
        return "\n".join(lines)

    def _cap_in_words(self) -> list[str]:
        cap = self.cap
        if cap is None:
            return [f"Not even rows of {MULTIPLE} tokens fit. What may make them fit:"]
        return [
            "What makes it fit:",
            f"  a cap at {cap['tokens']:,} tokens: needs {format_bytes(cap['needed_bytes'])}; "
            f"cuts {cap['cut_tokens']:,} tokens from {cap['cut_rows']:,} rows "
            f"({cap['cut_rows'] / self.rows:.2%})",
            f"  packing into blocks of {cap['tokens']:,}: "
            f"needs {format_bytes(cap['packed_bytes'])}; drops at most {cap['tokens'] - 1:,} "
            "tokens, at the end of the last block; rows are cut at the borders of blocks",
        ]

    def _order_in_words(self) -> list[str]:
        lines = [f'  {STRATEGY}="{GROUPED}" needs as much: its first batch is as wide, of the longest rows']
        balanced = self.balanced
        if balanced:
            is_enough = "" if balanced["needed_bytes"] <= self.limit_bytes else ", which is NOT enough"
            lines.append(
                f'  {STRATEGY}="{BALANCED}", which deals the rows of a step out by their cost: at most '
                f"{balanced['rows']:,} × {balanced['tokens']:,} tokens at once in the first epoch; needs "
                f"{format_bytes(balanced['needed_bytes'])}{is_enough}"
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {**vars(self), "recipe": self.recipe.to_dict(), "fits": self.fits}


def scan(recipe: Recipe, gpu: str = "h100", *, longest: int = 5) -> Scan:
    """Find the longest rows of the recipe's corpus, and whether a batch with them fits.

    Args:
        longest: how many of the longest rows are named.

    Raises:
        ConfigurationError: the corpus is a stream, cannot be read, or has no text or fewer rows than a batch; a
            technique makes examples of its own; or the recipe names an order by length, about which the message says
            what a scan without it tells.
    """
    card = find_gpu(gpu)
    if recipe.arguments.get(STRATEGY) in (GROUPED, BALANCED):
        raise ConfigurationError(
            f"scan: leave {STRATEGY} out. {GROUPED!r} needs what a random order needs, "
            f"in the first step; what {BALANCED!r} needs is said where that does not fit."
        )
    source = row_source(recipe)
    recipe = prediction.resolve_model(recipe, [card.name])
    positions = positions_of(recipe.config) - sum(technique.positions for technique in recipe.techniques)
    tokenizer = load_tokenizer(locate_config(recipe.model))
    prediction.warm_predictions(card.name)  # the process starts while the rows are counted
    signature = source.signature()
    tokens, empty = _count_tokens(source, tokenizer)
    if len(tokens) < recipe.shape.sequences or empty == len(tokens):
        raise ConfigurationError(
            f"scan: {source.name} has {len(tokens)} rows, {empty} of them empty. "
            f"Give at least a batch of {recipe.shape.sequences} rows, with text in them."
        )

    accumulated = recipe.training_arguments()["gradient_accumulation_steps"]
    batches = training_order(recipe, tokens)
    order = np.concatenate(batches)
    # The position of each row in the epoch, (rows,). A row that the epoch leaves out comes behind all others.
    position = np.full(len(tokens), len(order))
    position[order] = np.arange(len(order))
    longest_rows = np.lexsort((position, -tokens))[:longest]  # among equals, those that come first
    places = _places(source, longest_rows)
    if source.signature() != signature:
        raise readers.refusal(f"{source.name} was changed while it was read. Start again.")

    gaps = GAPS
    for technique in recipe.techniques:
        if technique.allocator_settings().get("expandable_segments"):
            gaps = 0.0

    def predict_need(length: int, padding: bool = True, rows: int | None = None) -> int:
        """Predict the bytes of a step with micro-batches of this length and so many rows, by default the recipe's."""
        cut = replace(recipe, sequence_length=max(length, 2))
        if rows is not None:
            cut = replace(cut, effective_batch_size=rows * accumulated)
        predicted = prediction.predict(cut, card.name, padding=padding)
        return round(predicted.need_bytes * (1 + gaps * padding))

    ends = np.cumsum(list(map(len, batches)))
    examples = []
    for row in longest_rows:
        step = int(np.searchsorted(ends, position[row], side="right")) // accumulated + 1
        examples.append({"place": places[row], "tokens": int(tokens[row]), "step": step})
    scanned = Scan(
        recipe=recipe,
        gpu=card.name,
        engine=prediction.engine_for(card.name),
        limit_bytes=card.memory_bytes,
        needed_bytes=predict_need(min(examples[0]["tokens"], positions)),
        gaps=gaps,
        positions=positions,
        rows=len(tokens),
        steps=-(-len(batches) // accumulated),
        longest=examples,
        empty=empty,
    )
    if scanned.fits:
        return scanned
    cap = _longest_cap(scanned, predict_need, tokens)
    return replace(scanned, cap=cap, balanced=_widest_balanced(scanned, predict_need, tokens))


def _longest_cap(scan: Scan, predict_need: Callable[..., int], tokens: Any) -> dict[str, int] | None:
    """Return the longest length that fits, with what it needs padded and packed, and what it cuts.

    None means that no length fits.
    """
    caps = range(MULTIPLE, min(scan.longest[0]["tokens"] - 1, scan.positions) + 1, MULTIPLE)
    fitting = caps[: bisect_right(caps, scan.limit_bytes, key=predict_need)]
    if not fitting:
        return None
    cap = fitting[-1]
    longer = tokens[tokens > cap]
    return {
        "tokens": cap,
        "needed_bytes": predict_need(cap),
        "packed_bytes": predict_need(cap, padding=False),
        "cut_rows": len(longer),
        "cut_tokens": int((longer - cap).sum()),
    }


def _widest_balanced(scan: Scan, predict_need: Callable[..., int], tokens: Any) -> dict[str, int] | None:
    """Return the micro-batch that needs most where a step's rows are dealt out by their cost.

    None means that a step has one micro-batch, that this transformers knows no such order, or that a technique changes
    how many sequences a step has.
    """
    from transformers import TrainingArguments

    recipe = scan.recipe
    is_known = BALANCED in TrainingArguments.__dataclass_fields__[STRATEGY].metadata["choices"]
    is_split = recipe.training_arguments()["gradient_accumulation_steps"] > 1
    if not is_known or not is_split or recipe.shape.sequences != recipe.effective_batch_size:
        return None
    balanced = replace(recipe, arguments={**recipe.arguments, STRATEGY: BALANCED})
    shapes = set()
    for batch in training_order(balanced, tokens):
        shapes.add((len(batch), min(int(tokens[batch].max()), scan.positions)))
    # Most memory grows with the tokens. Masks, and attention that keeps its probabilities, grow with the square of the
    # length, so that either micro-batch may need most.
    largest = max(shapes, key=prod)
    longest = max(shapes, key=lambda shape: shape[0] * shape[1] ** 2)
    widest = []
    for rows, length in (largest, longest):
        widest.append({"rows": rows, "tokens": length, "needed_bytes": predict_need(length, rows=rows)})
    return max(widest, key=lambda batch: batch["needed_bytes"])


def row_source(recipe: Recipe) -> readers.TextSource:
    """Find the file or folder whose rows are the examples. Raises what `scan` raises."""
    for technique in recipe.techniques:
        if Capability.TRAINING_SET in technique.forbids:
            raise ConfigurationError(
                f"scan: {technique.name} makes other examples of a text; here each row is one, "
                f"as it is. Leave {technique.name} out."
            )
    name = recipe.corpus
    path = Path(name)
    if name == "-" or "://" in name or (path.exists() and not path.is_file() and not path.is_dir()):
        raise ConfigurationError(
            f"scan: {name!r} is a stream, and the order of training is known only for rows that "
            "can be counted. Write it to a file first, for example rows.jsonl."
        )
    source = readers.find_text(name, "Give a file with one example per row.")
    for file in source.files():
        if file.is_file() and readers.kind_of(file) in readers.PLAIN:
            raise ConfigurationError(
                f"scan: {file} is plain text, which has no rows and is packed into blocks of "
                f"equal length. Give {', '.join(sorted({*readers.KINDS} - {*readers.PLAIN}))}."
            )
    next(source.rows(), None)  # raises an error that is at the beginning of the text
    return source


def _count_tokens(source: readers.TextSource, tokenizer: Any) -> tuple[Any, int]:
    """Return the number of tokens of every row, (rows,), and how many rows have no text."""
    counts = array("q")
    empty = 0
    remaining = iter(tqdm(source.rows(), source.name, unit=" rows", disable=None, leave=False))
    while rows := list(islice(remaining, TOGETHER)):
        texts = []
        for place, text in rows:
            is_empty = isinstance(text, readers.LeftOut) or not text.strip()
            texts.append((place, "" if is_empty else text))
            empty += is_empty
        counts.extend(_lengths(texts, tokenizer, bool(source.loss)))
    return np.array(counts), empty


def _lengths(rows: list[tuple[str, str]], tokenizer: Any, conversations: bool) -> Iterable[int]:
    """Return the numbers of tokens of rows.

    Args:
        rows: the place and the text of each.
        conversations: whether the texts are conversations, which are counted as they are trained on.
    """
    if not conversations:
        _, texts = zip(*rows, strict=True)
        tokenizer.backend_tokenizer.no_truncation()
        return map(len, tokenizer.backend_tokenizer.encode_batch_fast(texts))
    lengths = []
    for place, line in rows:
        try:
            lengths.append(len(chat.label_tokens(line, tokenizer, chat.ALL)) if line else 0)
        except Exception as error:  # a template may raise anything
            raise readers.refusal(
                f"{place}: the chat template cannot be used ({in_a_line(error)}). "
                "Correct the row, or use a model with another template."
            ) from None
    return lengths


def _places(source: readers.TextSource, rows: Iterable[Any]) -> dict[int, str]:
    """Return the place of each row: `line 7`, with the file's name where there are several files."""
    wanted = set(map(int, rows))
    is_one_file = len(source.files()) == 1
    places = {}
    for row, (place, _) in enumerate(source.rows()):
        if row in wanted:
            path, _, line = place.rpartition(", ")
            places[row] = line if is_one_file else f"{Path(path).name}, {line}"
    return places


class Lengths:
    """A dataset for a Trainer's samplers, which look at nothing but the number of tokens of each row."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, range]:
        return {"input_ids": range(self.tokens[row])}


def training_order(recipe: Recipe, tokens: Any) -> list[list[int]]:
    """Return the micro-batches of the first epoch, each with the numbers of its rows, as the Trainer's sampler makes
    them.

    Args:
        tokens: the number of tokens of every row, (rows,).
    """
    import torch
    from transformers import Trainer

    from workbench.training.arguments import build_training_arguments, complete_arguments

    with tempfile.TemporaryDirectory() as folder:
        values = complete_arguments(recipe, 1.0) | {"report_to": "none"}
        arguments = build_training_arguments(values, "cpu", Path(folder))
        arguments.eval_on_start = False
        rows: Any = Lengths(tokens)
        loader: Any = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=rows).get_train_dataloader()
    return [*loader.batch_sampler]
