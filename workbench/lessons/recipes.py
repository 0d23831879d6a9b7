"""The recipes of a lesson: one for the reader's machine, and those of the tables on real GPUs, each with variants."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from workbench.base.device import pick_device
from workbench.models.source import resolve_auto
from workbench.recipe import Recipe
from workbench.techniques.base import Technique

Variant = Technique | tuple[Technique, ...]  # one technique, or several together


def recipe(model: str = "auto", **settings: Any) -> Recipe:
    """Return a `Recipe` whose model is decided: `auto` is GPT-2 124M on a GPU, and the embedded model on a CPU.

    Raises ConfigurationError for a setting that cannot be.
    """
    return Recipe(model=resolve_auto(model, pick_device().type), **settings)


def on_cards(model: str, variants: Iterable[Variant], length: int) -> list[Recipe]:
    """Return the recipe of full fine-tuning with 8 × `length` tokens a step, and that of each variant."""
    return with_variants(Recipe(model=model, effective_batch_size=8, sequence_length=length), variants)


def with_variants(off: Recipe, variants: Iterable[Variant]) -> list[Recipe]:
    """Return a recipe, and then for each variant the recipe with it."""
    recipes = [off]
    for variant in variants:
        techniques = variant if isinstance(variant, tuple) else (variant,)
        recipes.append(replace(off, techniques=(*off.techniques, *techniques)))
    return recipes
