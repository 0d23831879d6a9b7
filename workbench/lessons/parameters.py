"""What may be given to a notebook as a parameter: known names, values of the right type, and no secrets.

papermill only warns about an unknown name, and it writes every value three times into the executed notebook. Whether a
recipe or a technique takes a value, they say themselves, in the notebook's first cells.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import papermill

from workbench.base.errors import ConfigurationError
from workbench.base.paths import check_writable, runs_folder
from workbench.base.settings import KINDS, check_settings, named, setting
from workbench.gpus.catalogue import device_name
from workbench.models.source import locate, locate_config
from workbench.texts.corpus import load_corpus

LEAST = {"int": 1, "float": 0}
MAY_BE_ZERO = ("sample_tokens", "num_workers", "seed")
# how the tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, PyPI and npm begin; JSON Web Tokens
TOKENS = re.compile(
    r"(hf_|sk-|gh[opsur]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|pypi-|npm_)[\w-]{8,}|eyJ[\w-]+\.[\w-]+\.[\w-]*"
)


def of(path: Path) -> dict[str, str]:
    """Names that the cell tagged `parameters` defines, with their types: `int`, `str` and so on, or `None`."""
    parameters = papermill.inspect_notebook(str(path))
    return {name: str(facts["inferred_type_name"]) for name, facts in parameters.items()}


def check_parameters(paths: Sequence[Path], parameters: Mapping[str, Any]) -> None:
    """Refuse what papermill would pass on without a word, and names of what is not there.

    Raises:
        ConfigurationError: a name that none of the notebooks has, a value of another type than a notebook declares, a
            number out of range, a value that looks like a secret; a text, a GPU or a model that there is not; or
            records that could not be written.
        UnavailableError: the model cannot be had.
    """
    declared = list(map(of, paths))
    named(parameters, sorted(set().union(*declared)), "notebooks", "parameter")
    for name, value in parameters.items():
        secret = TOKENS.search(str(value))  # of a list or a dictionary all that is in it
        if secret:  # which the message must not repeat
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
    """As the settings of a technique are checked: by a dataclass, whose fields are the parameters that have a type."""
    fields = []
    typed = []
    for name, value in values.items():
        if types[name] in KINDS:
            least = 0 if name in MAY_BE_ZERO else LEAST.get(types[name])
            fields.append((name, types[name], setting(None, "", minimum=least)))
            typed.append(value)
    check_settings(dataclasses.make_dataclass("Parameters", fields)(*typed), "notebooks")


def _check_names(values: Mapping[str, Any], trains: bool) -> None:
    """What parameters name is there: a text, a GPU, a model.

    Args:
        trains: the notebook needs a model's weights, and writes records.
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
