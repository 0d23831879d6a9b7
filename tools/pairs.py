"""Find which techniques go together: every pair is measured, emulated, or refused with the reason.

    python tools/pairs.py --save data/reference/cpu/gpt2-tiny/pairs.csv     # all, on the embedded model: 45 minutes
    python tools/pairs.py --technique lora --technique gradient_checkpointing

`workbench.advise.pairs` shows the table.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from itertools import chain, combinations
from pathlib import Path

import pandas as pd

from workbench.advise.pairs import EMULATED, MEASURED, matrix, refusals
from workbench.base.errors import ConfigurationError, OutOfMemoryError, UnavailableError
from workbench.gpus.emulator import place
from workbench.journal.record import Record
from workbench.recipe import Recipe, parse_recipe, read_recipe
from workbench.techniques import REGISTRY
from workbench.techniques import technique as find_technique
from workbench.training.run import run
from workbench.training.world import refuse_several_ranks

UNAVAILABLE = "unavailable"
CARD = "emulated:h100"  # for what this machine cannot run

RunRecipe = Callable[[Recipe], Record]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="gpt2-tiny", help="as `workbench run` takes it, or a RECIPE.toml")
    parser.add_argument("--steps", default="2", metavar="N", help="at least 2, the default")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as in `workbench run`")
    parser.add_argument("--technique", action="append", default=[], metavar="NAME", help="only these")
    parser.add_argument("--save", type=Path, metavar="FILE.csv", help="write the table there")
    args = parser.parse_args(arguments)
    refuse_several_ranks()
    values = {"steps": args.steps}
    file = None
    if args.model.endswith(".toml"):
        file = read_recipe(args.model)
    else:
        values["model"] = args.model
    recipe = parse_recipe(values, changes=args.set, file=file)
    names = [find_technique(name).name for name in args.technique]
    if not names:
        names = [technique.name for technique in recipe.techniques]
    with redirect_stdout(sys.stderr):
        table = pairs(recipe, names or None)
    print(matrix(table).to_string())
    refused = refusals(table)
    if len(refused):
        print(refused.to_string(index=False))
    if args.save:
        table.to_csv(args.save, index=False)


def pairs(
    recipe: Recipe,
    names: Iterable[str] | None = None,
    *,
    device: str | None = None,
    folder: Path | None = None,
) -> pd.DataFrame:
    """Run every technique alone and every pair of them, at their default settings, on one recipe.

    A pair that a recipe refuses costs nothing; the others are run; what this machine cannot run is run on an emulated
    H100, where an emulator is set up. The columns are those of `workbench.advise.pairs`, `peak_allocated_bytes` and
    `memory_source`. What is saved is a part of the peak on the device that the row is from.

    Raises:
        ConfigurationError: a single step, after which no optimizer states have been used yet.
    """
    if recipe.steps < 2:
        raise ConfigurationError("pairs: steps must be at least 2: the states of an optimizer are not there before.")
    chosen = sorted(REGISTRY if names is None else names)
    alone = [(name, name) for name in chosen]
    wanted = alone + list(combinations(chosen, 2))
    here = run_pairs(recipe.baseline, wanted, partial(run, device=device, reuse=True, folder=folder))
    lacking = here[here["verdict"] == UNAVAILABLE]
    if lacking.empty or not place.is_set_up():
        return here
    lacking_pairs = list(zip(lacking["one"], lacking["other"], strict=True))
    emulated = on_the_card(recipe.baseline, lacking_pairs, folder)
    both = pd.concat([here.drop(lacking.index), emulated])
    return both.sort_values(["one", "other"], ignore_index=True)


def on_the_card(baseline: Recipe, lacking: list[tuple[str, str]], folder: Path | None) -> pd.DataFrame:
    """Return the rows of these pairs on an emulated card, where their techniques run alone too, for comparison."""
    names = sorted(set(chain.from_iterable(lacking)))
    alone = [(name, name) for name in names]
    wanted = list(dict.fromkeys(alone + lacking))  # each once: a technique alone may be lacking too
    table = run_pairs(baseline, wanted, partial(run, device=CARD, reuse=True, folder=folder))
    return table.set_index(["one", "other"]).loc[lacking].reset_index()


def run_pairs(baseline: Recipe, wanted: list[tuple[str, str]], run_recipe: RunRecipe) -> pd.DataFrame:
    """Run each pair that is wanted on one device, and return a row for each."""
    baseline_peak = run_recipe(baseline).peak_allocated_bytes or 0
    rows = []
    for first, second in wanted:
        rows.append((first, second, *verdict(baseline, {first, second}, run_recipe)))
    columns = ["one", "other", "verdict", "reason", "peak_allocated_bytes", "memory_source"]
    table = pd.DataFrame(rows, columns=columns).astype({"peak_allocated_bytes": "Int64"})
    peaks = table["peak_allocated_bytes"]
    table["saved_fraction"] = 1 - peaks / baseline_peak
    # A pair is compared with the better of its two techniques alone: does it save more?
    is_pair = table["one"] != table["other"]
    alone = table[~is_pair].set_index("one")["peak_allocated_bytes"]
    both_alone = pd.concat([table["one"].map(alone), table["other"].map(alone)], axis=1)
    better = both_alone.min(axis=1, skipna=False)
    table["saved_beyond_fraction"] = ((better - peaks) / baseline_peak).where(is_pair)
    return table


def verdict(recipe: Recipe, names: set[str], run_recipe: RunRecipe) -> tuple[str, str, int | None, str]:
    """Return the verdict on some techniques together, its reason, and the peak in bytes with its source."""
    try:
        for name in sorted(names):
            recipe = recipe | REGISTRY[name]()
        record = run_recipe(recipe)
    except UnavailableError as error:
        return UNAVAILABLE, str(error), None, ""
    except ConfigurationError as error:
        return "refused", str(error).removeprefix("recipe: "), None, ""
    except OutOfMemoryError as error:
        return "oom", str(error), None, ""
    except Exception as error:  # one pair that fails must not hide the others
        first_line = str(error).splitlines()[0]
        return "failed", f"{type(error).__name__}: {first_line}", None, ""
    outcome = EMULATED if record.memory_source.startswith("emulated") else MEASURED
    return outcome, "", record.peak_allocated_bytes, record.memory_source


if __name__ == "__main__":
    main()
