"""A notebook's parameters have known names and values of the right type, and are no secrets.

papermill only warns about an unknown name, and it writes every value three times into the executed notebook. Recipes
and techniques check their values themselves, in the notebook's first cells.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import papermill

from workbench.base.errors import ConfigurationError
from workbench.base.paths import check_writable, runs_folder
from workbench.base.settings import KINDS, check_names, check_settings, setting
from workbench.gpus.catalogue import device_name
from workbench.models.source import locate, locate_config
from workbench.texts.corpus import load_corpus

# the least value of a number, by its type, and the parameters that may be 0 although they are integers
LEAST = {"int": 1, "float": 0}
MAY_BE_ZERO = ("sample_tokens", "num_workers", "seed")
# the tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, PyPI and npm; JSON Web Tokens
TOKENS = re.compile(
    r"(hf_|sk-|gh[opsur]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|pypi-|npm_)[\w-]{8,}|eyJ[\w-]+\.[\w-]+\.[\w-]*"
)


def parameter_types(path: Path) -> dict[str, str]:
    """Return the type of each name in the cell tagged `parameters`: "int", "str" and so on, or "None" if unknown."""
    parameters = papermill.inspect_notebook(str(path))
    return {name: str(facts["inferred_type_name"]) for name, facts in parameters.items()}


def check_parameters(paths: Sequence[Path], parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that papermill would pass on without a word, and a text, a GPU or a model that does not exist.

    Raises:
        ConfigurationError: a name that none of the notebooks has, a value of another type than a notebook declares, a
            number out of range, a value that looks like a secret; a text, a GPU or a model that there is not; or
            records that could not be written.
        UnavailableError: the model cannot be had.
    """
    declared = list(map(parameter_types, paths))
    check_names(parameters, sorted(set().union(*declared)), "notebooks", "parameter")
    for name, value in parameters.items():
        # the text of a list or a dictionary has all that is in it
        secret = TOKENS.search(str(value))
        if secret:  # the message must not repeat it
            raise ConfigurationError(
                f"notebooks: the value of {name} looks like a secret ({secret[0][:3]}…, "
                f"{len(secret[0])} characters), and the executed notebook would show it. "
                "Put it into an environment variable, or run `hf auth login`."
            )
    for types in declared:
        values = {name: value for name, value in parameters.items() if name in types}
        _check_types(types, values)
        _check_names(values, trains="steps" in types)


def _check_types(types: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Check values as settings of a technique are checked: by a dataclass with a field for each typed parameter."""
    fields = []
    typed = []
    for name, value in values.items():
        if types[name] in KINDS:
            least = 0 if name in MAY_BE_ZERO else LEAST.get(types[name])
            fields.append((name, types[name], setting(None, "", minimum=least)))
            typed.append(value)
    check_settings(dataclasses.make_dataclass("Parameters", fields)(*typed), "notebooks")


def _check_names(values: Mapping[str, Any], trains: bool) -> None:
    """Refuse a text, a GPU or a model that does not exist.

    Args:
        trains: whether the notebook needs a model's weights, and writes records.
    """
    if trains:
        check_writable(runs_folder())
    if "corpus" in values:
        load_corpus(values["corpus"])
    if "gpu" in values:
        device_name(values["gpu"])
    model = values.get("model", "auto")
    if model != "auto":
        find = locate if trains else locate_config
        find(model)
