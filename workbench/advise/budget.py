"""Memory as a test: a limit for the peak of a recipe or a program, and what has changed since the peak was stored.

Each table of `budget.toml` is a budget. Its usage is stored in `budget.lock.json` beside it, with the versions of the
libraries, so that a later check can say what an upgrade has cost:

    [lora-on-a-t4]
    limit = "6.5GiB"
    gpu = "t4"
    recipe = { model = "gpt2", effective_batch_size = 8, sequence_length = 1024, techniques = { lora = { rank = 8 } } }

    [the-recipe-of-a-file]
    limit = "6.5GiB"
    gpu = "t4"
    recipe = "recipe.toml"

    [my-script]
    limit = "13GiB"
    gpu = "t4"
    script = "python train.py --epochs 1"

The check counts what the allocator reserves, as a program can assert of itself: `torch.cuda.max_memory_reserved()` on
the card. CUDA's context comes on top, so that the limit must be lower than the card's memory.
"""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.base.categories import Category, Phase, format_bytes, parse_bytes
from workbench.base.errors import ConfigurationError, brief, explain_errors
from workbench.base.operations import operation_in_words
from workbench.base.paths import read_toml, versions, write_whole
from workbench.base.result import Result
from workbench.base.settings import check_names, type_adapter
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator.card import DEVICE
from workbench.gpus.emulator.launch import emulate
from workbench.gpus.emulator.report import Emulation
from workbench.prediction.predict import Prediction, predict
from workbench.recipe import Recipe, read_recipe

KEYS = ("limit", "gpu", "recipe", "script")
EXAMPLE = (
    'A table has a limit = "6.5GiB", a gpu = "t4", and a recipe = {model = "gpt2"} or a script = "python train.py".'
)
UNUSED = "reserved, unused"
TIME_LIMIT_S = 1800.0  # for a script, which may wait for a value that an emulated GPU never computes
SHOWN = 5  # differences, the largest first
LAYER_NUMBER = re.compile(r"\.\d+\b")  # the `.3` in the name of a module


@dataclass(frozen=True)
class Budget:
    """A recipe, or a program's command line, with the limit of its memory on a card.

    Raises:
        ConfigurationError: the limit is no amount of memory, or more than the card has; the card is unknown; or the
            program is no command line.
    """

    name: str
    what: Recipe | str
    limit: str | int
    gpu: str

    def __post_init__(self) -> None:
        if not isinstance(self.what, Recipe):
            with explain_errors(
                f"check: the script of {self.name} must be a command line, got {brief(self.what)}", EXAMPLE
            ):
                shlex.split(self.what)
        card = find_gpu(self.gpu)
        room = card.memory_bytes - card.context_bytes_estimate
        if self.limit_bytes > room:
            raise ConfigurationError(
                f"check: the limit of {self.name}, {format_bytes(self.limit_bytes)}, "
                f"is more than the {card.title} has beside CUDA's context, "
                f"{format_bytes(room)}. Lower it, or name a larger card."
            )

    @property
    def limit_bytes(self) -> int:
        return parse_bytes(self.limit, f"check: the limit of {self.name}")


@dataclass(frozen=True)
class Usage:
    """The memory that a recipe or a program uses.

    Attributes:
        peak_bytes: the most that the allocator reserves.
        holders: the bytes at the peak, by the category and operation of a recipe, or by a program's lines.
        facts: the recipe or the command, the source of the numbers, and the versions of the libraries.
        refused: whether the program ran out of memory, and so needs more than its peak.
    """

    peak_bytes: int
    holders: dict[str, int]
    facts: dict[str, str]
    refused: bool = False


LOCK = type_adapter(dict[str, Usage])


@dataclass(frozen=True)
class Verdict(Result):
    """The usage of a budget's recipe or program now, and the usage that was stored before; None if none was."""

    budget: Budget
    found: Usage
    before: Usage | None
    json_fields = ("name", "limit_bytes", "over", "grown_bytes", "found", "before")

    @property
    def name(self) -> str:
        return self.budget.name

    @property
    def limit_bytes(self) -> int:
        return self.budget.limit_bytes

    @property
    def over(self) -> bool:
        return self.found.refused or self.found.peak_bytes > self.limit_bytes

    @property
    def grown_bytes(self) -> int:
        if self.before is None:
            return 0
        return self.found.peak_bytes - self.before.peak_bytes

    def __str__(self) -> str:
        """Show the verdict, and below it the largest changes, or the largest holders if the first usage is too much."""
        now = self.found
        before = self.before
        verdict = "within"
        if now.refused:
            verdict = "out of the card's memory, over"
        elif self.over:
            verdict = "over"
        need = f"{format_bytes(now.peak_bytes)} reserved ({now.facts['source']})"
        text = f"{self.name}: {need}, {verdict} its limit of {format_bytes(self.limit_bytes)}"
        if before and before != now:
            text += f"\n  {_with_sign(self.grown_bytes)} since it was stored: {_list_changed_facts(before, now)}"
            changes = Counter(now.holders)
            changes.subtract(before.holders)
            for name in sorted(changes, key=lambda name: -abs(changes[name]))[:SHOWN]:
                if changes[name]:
                    text += f"\n    {_with_sign(changes[name]):>10}  {_in_words(name)}"
        elif self.over:
            text += "\n  largest allocations at the peak"
            for name, size in Counter(now.holders).most_common(SHOWN):
                text += f"\n    {format_bytes(size):>10}  {_in_words(name)}"
        return text


def _with_sign(nbytes: int) -> str:
    """Return bytes as text with a plus or a minus."""
    if nbytes < 0:
        return f"−{format_bytes(-nbytes)}"
    return f"+{format_bytes(nbytes)}"


def _list_changed_facts(before: Usage, now: Usage) -> str:
    """Return the facts that are not as they were: `transformers 5.17.0 → 5.23.0`."""
    changed = []
    for name, fact in now.facts.items():
        fact_before = before.facts.get(name)
        if fact_before != fact:
            changed.append(f"{name} {fact_before} → {fact}")
    return ", ".join(changed) or "in the same environment"


def _in_words(name: str) -> str:
    """Return the name of a holder for people: a category and its operation, or the line of a program as it is."""
    category, _, operation = name.partition(": ")
    if category not in list(Category):
        return name
    return f"{category.replace('_', ' ')}: {operation_in_words(operation)} ({operation})"


def read_budgets(path: Path) -> list[Budget]:
    """Read the budgets of a file.

    Raises ConfigurationError: the file cannot be read, or a budget in it makes no sense.
    """
    tables = read_toml(path, "check", EXAMPLE)
    if not tables:
        raise ConfigurationError(f"check: {path} has no budget in it. {EXAMPLE}")
    return [_budget(name, table) for name, table in tables.items()]


def _budget(name: str, table: object) -> Budget:
    """Return the budget that a table of the file describes."""
    values = check_names(table, KEYS, f"check: {name}", "key")
    if not {"limit", "gpu"} <= values.keys() or ("recipe" in values) == ("script" in values):
        raise ConfigurationError(f"check: {name} has {', '.join(values) or 'nothing'}. {EXAMPLE}")
    if "script" in values:
        what = values["script"]
    elif isinstance(values["recipe"], str):
        what = read_recipe(values["recipe"])
    else:
        what = Recipe.from_dict(values["recipe"])
    return Budget(name, what, values["limit"], values["gpu"])


def judge(budgets: Iterable[Budget], lock: Path, update: bool = False) -> list[Verdict]:
    """Predict or emulate the usage of each budget, and compare it with the usage in the file `lock`.

    Args:
        update: whether the new usage is stored in place of the old one. Where none is stored yet, it is stored anyway.

    Raises:
        ConfigurationError: the file is not one that this function wrote, or a program failed.
    """
    stored: dict[str, Usage] = {}
    if lock.exists():
        with explain_errors(f"check: {lock} cannot be read", "Remove it: the next check writes it anew."):
            stored = LOCK.validate_json(lock.read_bytes())
    to_store = dict(stored)
    verdicts = []
    for budget in budgets:
        usage = _find_usage(budget)
        verdicts.append(Verdict(budget, usage, stored.get(budget.name)))
        if update or budget.name not in stored:
            to_store[budget.name] = usage
    if to_store != stored:
        write_whole(lock, LOCK.dump_json(to_store, indent=1).decode() + "\n")
    return verdicts


def _find_usage(budget: Budget) -> Usage:
    """Predict the usage of a budget's recipe, or run its program on the emulated GPU."""
    if isinstance(budget.what, Recipe):
        return _usage_of_prediction(predict(budget.what, budget.gpu))
    program = emulate(shlex.split(budget.what), find_gpu(budget.gpu), timeout_s=TIME_LIMIT_S, output=sys.stderr)
    return _usage_of_program(budget, program)


def _usage_of_prediction(prediction: Prediction) -> Usage:
    timeline = prediction.timeline
    assert timeline is not None
    lives = timeline.lives
    event = timeline.peak(Phase(prediction.peak_phase))
    alive = (lives["born"] <= event) & ((lives["died"] < 0) | (lives["died"] > event))
    categories = list(Category)
    peak = prediction.need_bytes - prediction.context_bytes
    holders = Counter({UNUSED: peak - prediction.peak_allocated_bytes})
    for storage in np.flatnonzero(alive):
        category = categories[lives["category"][storage]]
        maker = LAYER_NUMBER.sub(".*", timeline.operations[lives["maker"][storage]])
        holders[f"{category}: {maker}"] += int(lives["nbytes"][storage])
    facts = {"recipe": prediction.recipe_id, "source": prediction.source, "peak in": prediction.peak_phase}
    return Usage(peak, dict(holders), facts | prediction.versions)


def _usage_of_program(budget: Budget, program: Emulation) -> Usage:
    """Return the usage of a program that ran on the emulated GPU.

    Raises ConfigurationError: the program failed before it ran out of memory, or used no GPU.
    """
    devices = program.devices
    refused = program.refusals > 0 and not program.has_recovered
    if not devices or (program.exit_status and not refused):
        used = "used the GPU" if devices else "not used the GPU"
        raise ConfigurationError(
            f"check: the program of {budget.name} ended with exit status {program.exit_status}, "
            f"having {used}. What it said stands above."
        )
    reserved = program.reserved_at_once_bytes
    # A program that recovered from a refusal may have had its peak of allocated memory earlier, and above this.
    allocated = min(devices[0]["peak_allocated_bytes"], reserved)
    holders = {entry["line"]: entry["bytes"] for entry in devices[0].get("lines", [])}
    holders[UNUSED] = reserved - allocated
    facts = {"program": str(budget.what), "source": f"{DEVICE}{program.gpu.name}"}
    if program.command[0] == sys.executable:  # another Python would have other libraries
        facts |= versions()
    facts["torch"] = program.processes[0]["torch"]
    return Usage(reserved, holders, facts, refused)
