"""What the techniques do to a Trainer or a model, as text to be pasted: for an interpreter without the workbench."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.export.dependencies import import_lines
from workbench.export.lines import Lines
from workbench.fit.candidates import Sizes, estimate, is_left_to_the_program, offered, settings_to_offer
from workbench.fit.places import names_there
from workbench.gpus.catalogue import Gpu
from workbench.models.family import ModelFamily, family_of
from workbench.techniques import REGISTRY, Technique


def functions_to_paste(seen: Mapping[str, Any], gpu: Gpu, sizes: Sizes) -> dict[str, str]:
    """Of each technique that suits this model and is no argument: its functions, and below them the call. First those
    that by an estimate save most.

    Args:
        seen: of a program, in an interpreter without the workbench.
    """
    if "config" not in seen:  # another kind of model
        return {}
    try:
        config = AutoConfig.for_model(**seen["config"])
        family = family_of(config)
    except Exception:
        # of any kind: an older config may be one that transformers does not read any more
        return {}
    as_arguments = {choice[0].name for choice in offered(seen, gpu, by_arguments_alone=True)}
    possible = []
    for name in REGISTRY.keys() - names_there(seen) - as_arguments:
        gentlest = settings_to_offer(REGISTRY[name], gpu)[:1]
        possible += [entry for entry in gentlest if _suits(entry, config, seen)]
    possible.sort(key=lambda technique: (estimate(sizes, [technique]), technique.name))
    texts = {}
    for technique in possible:
        text = _text(technique, family)
        if text:
            texts[technique.name] = text
    return texts


def _suits(technique: Technique, config: Any, seen: Mapping[str, Any]) -> bool:
    """Whether the program has what its function changes, as far as that can be told without the program."""
    if seen["kind"] == "loop" and technique.trainer() is not None:  # it has no Trainer
        return False
    # a loss of its own may look at logits
    if "own_loss" in seen and Category.LOGITS_AND_LOSS in technique.attacks:
        return False
    try:
        technique.check_config(config)
    except ConfigurationError:
        return False
    return not is_left_to_the_program(type(technique), seen)


def _text(technique: Technique, family: ModelFamily) -> str:
    """Empty where it has no function of ours."""
    lines = Lines()
    lines.add_calls("model = ", ["model"], [technique.loaded_model(family) or technique.model(family)])
    lines.add_calls("", ["trainer"], [technique.trainer()])
    if not lines.sources.definitions:
        return ""
    imports = "\n".join(import_lines(lines.sources.imports)).strip()
    parts = [imports, *lines.sources.definitions.values(), "\n".join(lines.lines)]
    return "\n\n\n".join(filter(None, parts))
