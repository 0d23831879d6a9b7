"""What may be given to a notebook as a parameter: known names, values of the right type, and no secrets.

papermill only warns about an unknown name, and it writes every value three times into the executed notebook.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import papermill

from workbench.errors import ConfigurationError
from workbench.gpus.catalogue import gpu
from workbench.measure.categories import parse_bytes
from workbench.models.source import locate, locate_config
from workbench.paths import check_writable, runs_folder
from workbench.recipe import Recipe
from workbench.settings import IN_WORDS, KINDS
from workbench.techniques import REGISTRY, parse_technique, technique
from workbench.texts.corpus import load_corpus

MAY_BE_ZERO = ("sample_tokens", "num_workers", "seed")  # of the counts; no lesson has a negative one
# how the tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, PyPI and npm begin; JSON Web Tokens
TOKENS = re.compile(
    r"(hf_|sk-|gh[opsur]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|pypi-|npm_)[\w-]{8,}|eyJ[\w-]+\.[\w-]+\.[\w-]*"
)
LONG = re.compile(r"[A-Za-z0-9+/=_-]{32,}")


def of(path: Path) -> dict[str, str]:
    """Names that the cell tagged `parameters` defines, with their types, empty where none is written."""
    found = papermill.inspect_notebook(str(path))
    types = {name: str(facts["inferred_type_name"]) for name, facts in found.items()}
    return {name: "" if kind == "None" else kind for name, kind in types.items()}


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """With paths as absolute texts, which JSON can hold; the notebooks run in a folder of their own."""
    return {
        name: str(value.expanduser().resolve()) if isinstance(value, Path) else value
        for name, value in parameters.items()
    }


def check_parameters(paths: Sequence[Path], parameters: Mapping[str, Any]) -> None:
    """Refuse what papermill would pass on without a word.

    Raises:
        ConfigurationError: a name that none of the notebooks has, a value of another type than the notebook declares,
            a value that looks like a secret, or one that a cell would refuse.
        UnavailableError: the model cannot be had.
    """
    declared = [of(path) for path in paths]
    known = sorted({name for names in declared for name in names})
    for name, value in parameters.items():
        if name not in known:
            raise ConfigurationError(f"notebooks: no parameter is called {name!r}. There are: {', '.join(known)}.")
        _refuse_secret(name, value)
        for kind in {names[name] for names in declared if name in names}:
            _refuse_type(name, value, kind)
    for path, names in zip(paths, declared, strict=True):
        _refuse_values(path, names, parameters)


def _refuse_values(path: Path, known: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """What a cell of this notebook would refuse some ten seconds after its kernel was started: by the recipe, by the
    technique that is taught, by the text and the model; and records that could not be written."""
    if "steps" in known:
        check_writable(runs_folder())
    values = {name: value for name, value in given.items() if name in known}
    taught = REGISTRY.get(path.stem.partition("_")[2], Recipe)
    for made in (Recipe, taught):
        made(**{name: values[name] for name in values.keys() & made.__dataclass_fields__})  # type: ignore[union-attr]
    found: dict[str, Callable[[str], Any]] = {"corpus": load_corpus, "large_model": locate_config, "gpu": gpu}
    found["model"] = locate if "steps" in known else locate_config
    found["budget"] = lambda text: parse_bytes(text, "budget")
    found["kinds"] = lambda kinds: [taught(kind=kind) for kind in kinds.split("+")]  # type: ignore[call-arg]
    budgeted = next((name for name, cls in REGISTRY.items() if "memory_budget" in cls.__dataclass_fields__), "")  # type: ignore[attr-defined]
    found["budgets"] = lambda text: [parse_technique(f"{budgeted}=memory_budget:{one}") for one in text.split("+")]
    found["card_models"] = lambda names: [locate_config(name) for name in names.split("+")]
    found["among"] = lambda names: [technique(name) for name in names.split()]
    for name in values.keys() & found.keys():
        if values[name] not in ("auto", "cpu"):  # the lesson's own choice, and no GPU
            found[name](values[name])


def _refuse_type(name: str, value: Any, kind: str) -> None:
    accepted: Any = KINDS.get(kind, object)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind in ("int", "float")):
        raise ConfigurationError(f"notebooks: {name} must be {IN_WORDS[kind]}, got {value!r}.")
    least = int(kind == "int" and name not in MAY_BE_ZERO)
    if kind in ("int", "float") and not least <= value < math.inf:
        raise ConfigurationError(f"notebooks: {name} must be a number from {least}, got {value!r}.")


def _refuse_secret(name: str, value: Any) -> None:
    """In lists and dictionaries too. The message must not repeat it."""
    for text in _texts(value):
        if looks_secret(text):
            raise ConfigurationError(
                f"notebooks: the value of {name} looks like a secret ({text[:3]}…, {len(text)} characters), and the "
                "executed notebook would show it. Put it into an environment variable, or run `hf auth login`."
            )


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for item in value.items() for part in item for text in _texts(part)]
    if isinstance(value, list | tuple | set):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def looks_secret(text: str) -> bool:
    """A known kind of token anywhere in it, or a long random word that is no existing path."""
    if TOKENS.search(text):
        return True
    return not os.path.exists(text) and any(_random(word) for word in LONG.findall(text))


def _random(word: str) -> bool:
    """Hexadecimal digits alone, or capitals, small letters and digits all mixed, as nobody names things."""
    if re.fullmatch(r"[0-9a-fA-F-]+", word):
        return bool(re.search(r"\d", word) and re.search(r"[a-fA-F]", word))
    changes = len(re.findall(r"(?<=[a-z])[A-Z0-9]|(?<=[0-9])[A-Za-z]", word))
    return bool(re.search("[a-z]", word) and re.search("[A-Z]", word) and re.search("[0-9]", word)) and changes >= 6
