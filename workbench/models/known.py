"""The families of models that are known."""

from typing import Any

from workbench.errors import ConfigurationError
from workbench.models.family import ModelFamily
from workbench.models.gpt2 import GPT2

FAMILIES = {family.model_type: family for family in (GPT2,)}


def family_of(config: Any, name: str = "") -> ModelFamily:
    """The family of a model, by its config. Raises ConfigurationError for a kind that is not known."""
    if config.model_type not in FAMILIES:
        raise ConfigurationError(
            f"model: {name or config.name_or_path!r} is a {config.model_type!r}; the workbench trains "
            f"{' and '.join(family.title for family in FAMILIES.values())} only."
        )
    return FAMILIES[config.model_type]
