"""The techniques' functions as text that a person pastes into a script whose interpreter has no workbench."""

from typing import Any

from transformers import AutoConfig

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.export.dependencies import import_lines
from workbench.export.lines import Lines
from workbench.fit.any_training import Facts
from workbench.fit.candidates import Sizes, estimate, is_left_to_the_program, list_choices, settings_to_offer
from workbench.fit.places import detect_names
from workbench.gpus.catalogue import Gpu
from workbench.models.family import ModelFamily, family_of
from workbench.techniques import REGISTRY, Technique


def functions_to_paste(facts: Facts, gpu: Gpu, sizes: Sizes) -> dict[str, str]:
    """Return, by technique, the source of its functions and below them the call, for each technique that suits the
    program's model and is no argument. Those that by an estimate save most come first.

    Args:
        facts: those about a program whose interpreter has no workbench.
    """
    if "config" not in facts:  # The techniques were not written for models of its kind.
        return {}
    try:
        config = AutoConfig.for_model(**facts["config"])
        family = family_of(config)
    except Exception:
        # This transformers may not read the config of an older one, and then raises anything.
        return {}
    as_arguments = {choice[0].name for choice in list_choices(facts, gpu, by_arguments_alone=True)}
    possible = []
    for name in REGISTRY.keys() - detect_names(facts) - as_arguments:
        gentlest = settings_to_offer(REGISTRY[name], gpu)[:1]
        possible += [entry for entry in gentlest if _suits(entry, config, facts)]
    possible.sort(key=lambda technique: (estimate(sizes, [technique]), technique.name))
    texts = {}
    for technique in possible:
        text = _write_text(technique, family)
        if text:
            texts[technique.name] = text
    return texts


def _suits(technique: Technique, config: Any, facts: Facts) -> bool:
    """Whether the program has what the technique's function changes, as far as its facts tell."""
    if facts["kind"] == "loop" and technique.trainer() is not None:  # The function changes a Trainer.
        return False
    # A Trainer's own loss may read the logits.
    if "own_loss" in facts and Category.LOGITS_AND_LOSS in technique.attacks:
        return False
    try:
        technique.check_config(config)
    except ConfigurationError:
        return False
    return not is_left_to_the_program(type(technique), facts)


def _write_text(technique: Technique, family: ModelFamily) -> str:
    """Return the imports, the source and the call of a technique's functions; "" if it has no function of ours."""
    lines = Lines()
    lines.add_calls("model = ", ["model"], [technique.change_loaded_model(family) or technique.model(family)])
    lines.add_calls("", ["trainer"], [technique.trainer()])
    if not lines.sources.definitions:
        return ""
    imports = "\n".join(import_lines(lines.sources.imports)).strip()
    parts = [imports, *lines.sources.definitions.values(), "\n".join(lines.lines)]
    return "\n\n\n".join(filter(None, parts))
