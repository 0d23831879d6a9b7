"""What the techniques do to a Trainer or a model, as text to be pasted: for an interpreter without the workbench."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from workbench.base.errors import ConfigurationError
from workbench.export.dependencies import import_lines
from workbench.export.lines import Lines
from workbench.fit.candidates import Sizes, estimate, offered, settings_to_offer
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
    except Exception:  # of any kind: an older config may be one that transformers does not read any more
        return {}
    there = {*seen["there"], *(family[0].name for family in offered(seen, gpu))}
    possible = []
    for name in REGISTRY.keys() - there:
        possible += [entry for entry in settings_to_offer(REGISTRY[name], gpu)[:1] if _suits(entry, config)]
    possible.sort(key=lambda technique: (estimate(sizes, [technique]), technique.name))
    if seen["kind"] == "loop":  # which has no Trainer
        possible = [technique for technique in possible if technique.trainer() is None]
    texts = {technique.name: _text(technique, family) for technique in possible}
    return {name: text for name, text in texts.items() if text}


def _suits(technique: Technique, config: Any) -> bool:
    try:
        technique.check_config(config)
    except ConfigurationError:
        return False
    return True


def _text(technique: Technique, family: ModelFamily) -> str:
    """Empty where it has no function of ours."""
    lines = Lines()
    change = technique.loaded_model(family) or technique.model(family)
    if change is not None:
        lines.add_call("model = ", lines.sources.add(change.function), ["model"], change.settings)
    change = technique.trainer()
    if change is not None:
        lines.add_call("", lines.sources.add(change.function), ["trainer"], change.settings)
    if not lines.sources.definitions:
        return ""
    imports = "\n".join(import_lines(lines.sources.imports)).strip()
    parts = [imports, *lines.sources.definitions.values(), "\n".join(lines.lines)]
    return "\n\n\n".join(filter(None, parts))
