"""A recipe as a plain Hugging Face script: no import of the workbench, to be read and changed like any other.

The script takes the same steps on the same blocks as `run`, in the same order, so on one machine it finds the same
losses. What a technique does is a plain function: the script contains its source, and the call that `run` makes too.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Any

from workbench.errors import ConfigurationError
from workbench.export.sources import Sources
from workbench.models.family import ModelFamily, family_of
from workbench.models.known import PUBLISHED
from workbench.models.source import RANDOM
from workbench.recipe import Recipe
from workbench.run.job import Job, prepare
from workbench.run.trainer import argument_values, collate, model_arguments
from workbench.run.world import pick_device
from workbench.techniques.base import Call
from workbench.texts import corpus, readers

DOCUMENTS = Path(__file__).with_name("documents.txt")
TEMPLATE = Path(__file__).with_name("template.txt")  # for `str.format`: a brace of the script stands there twice


def script(recipe: Recipe) -> str:
    """Python source that trains the recipe with transformers, datasets and what the techniques need.

    Raises:
        ConfigurationError, UnavailableError: as `run` does before it loads a model; or the model is an adapter.
    """
    job = prepare(recipe, pick_device())
    recipe, family = job.recipe, family_of(job.config)
    if job.source.adapter:
        raise ConfigurationError(f"script: {recipe.model!r} is an adapter. Save the model as 'merged' and use that.")
    sources = Sources()
    return TEMPLATE.read_text(encoding="utf-8").format(
        title=f"{recipe.model} on {recipe.corpus}: {recipe.label}".replace('"', "'").replace("\\", "/"),
        data=_block(_data(recipe, sources)),
        model="\n".join(_model(job, sources)),
        techniques=_block(_calls("model = ", "model", (t.model(family) for t in recipe.techniques), sources)),
        trainer=_block(
            [*_calls("", "trainer", (t.trainer() for t in recipe.techniques), sources), *_callbacks(recipe, sources)]
        ),
        collator=sources.add(collate),
        cut=sources.add(corpus.cut_into_blocks),
        text="\n".join(_text(recipe.corpus, job.tokenizer.eos_token, sources)),
        sequence_length=recipe.sequence_length,
        batch=recipe.effective_batch_size,
        seed=recipe.seed,
        tokenizer=_literal(job.tokenizer.name_or_path or "gpt2"),
        held_out_tokens=corpus.HELD_OUT_TOKENS,
        arguments=_arguments(job),
        imports=_imports(job, sources),  # these two last: of all that the others have needed
        definitions="\n\n\n".join(sources.definitions.values()),
    )


def portable(recipe: Recipe, text: str) -> tuple[str, dict[str, str]]:
    """A text about a recipe with relative paths, and what became of each absolute one.

    A path below the working directory is relative to it; of another one only the name stays. What counts as a path is
    the recipe's own names, and what stands alone between double quotes.
    """
    moved, here = {}, Path.cwd()
    for path in {recipe.model.removeprefix(RANDOM), recipe.corpus, *re.findall(r'"([^"\n]{2,})(?=")', text)}:
        pure = PurePath(path)
        short = pure.relative_to(here).as_posix() if pure.is_relative_to(here) else pure.name
        if pure.is_absolute() and short:
            before, after = r"(?<![^\s\"':=])", r"(?![\w/.-])"
            text, moved[path] = re.sub(before + re.escape(path) + after, short.replace("\\", r"\\"), text), short
    return text, moved


def _block(lines: Iterable[str]) -> str:
    """Whole lines, or nothing at all."""
    return "".join(f"{line}\n" for line in lines)


def _data(recipe: Recipe, sources: Sources) -> Iterator[str]:
    """Lines that change `train_dataset` and `data_collator`, in the order in which a run changes them."""
    given = "train_text, tokenizer, SEQUENCE_LENGTH, BATCH, SEED"
    yield from _calls("train_dataset = ", given, (t.examples() for t in recipe.techniques), sources)
    for technique in recipe.techniques:
        yield from _calls("train_dataset = ", "train_dataset", [technique.dataset()], sources)
        yield from _calls("data_collator = ", "data_collator", [technique.collator()], sources)


def _calls(target: str, given: str, calls: Iterable[Call | None], sources: Sources) -> Iterator[str]:
    for call in calls:
        if call is not None:
            yield target + _written(call, sources, given)


def _callbacks(recipe: Recipe, sources: Sources) -> Iterator[str]:
    for module, _, name in (each.partition(":") for each in recipe.callbacks):
        sources.imports.add((module, name))
        yield f"trainer.add_callback({name})"


def _written(call: Call, sources: Sources, *given: str) -> str:
    """The call as source; its function, and functions among its settings, are included."""
    literals = {name: sources.add(v) if callable(v) else _literal(v) for name, v in call.settings.items()}
    return _wrapped(sources.add(call.function), [*given, *_assigned(literals)])


def _wrapped(function: str, arguments: list[str]) -> str:
    """One line, or one line an argument if it would be long."""
    line = f"{function}({', '.join(arguments)})"
    return line if len(line) <= 100 else "\n".join([f"{function}(", *(f"    {each}," for each in arguments), ")"])


def _imports(job: Job, sources: Sources) -> str:
    family = family_of(job.config)
    names = ["AutoTokenizer", family.model_class, "Trainer", "TrainingArguments", "set_seed"]
    names += [family.config_class] if job.source.random else []
    needed = {("torch", ""), ("datasets", "Dataset")} | {("transformers", name) for name in names}
    needed |= sources.imports
    return "\n".join([*_environment(job.recipe), *_sorted_imports(needed)])


def _environment(recipe: Recipe) -> list[str]:
    variables = [pair for technique in recipe.techniques for pair in technique.environment().items()]
    lines = [f"os.environ[{_literal(name)}] = {_literal(value)}" for name, value in variables]
    return ["import os", "", *lines, ""] if lines else []


def _sorted_imports(needed: set[tuple[str, str]]) -> list[str]:
    """As isort has them: the standard library first, plain imports before those of names."""
    lines: dict[bool, list[str]] = {True: [], False: []}
    for module in sorted({module for module, _ in needed}, key=lambda m: ((m, "") not in needed, m)):
        names = sorted({name for m, name in needed if m == module and name}, key=lambda name: (name.islower(), name))
        standard = lines[module.split(".")[0] in sys.stdlib_module_names]
        standard += [f"import {module}"] if (module, "") in needed else []
        standard += [_import_line(module, names)] if names else []
    return [*lines[True], "", *lines[False]]


def _import_line(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= 120 else _wrapped(f"from {module} import ", names)


def _text(name: str, end_of_text: str | None, sources: Sources) -> list[str]:
    """Lines that make `train_text` and `held_out_text`, with the function that reads a file in a run too."""
    read = sources.add(readers.read_documents)
    if name in corpus.embedded():
        parts = zip(("train", "held_out"), corpus.embedded_files(name), strict=True)
        return [f'{part}_text = "".join(text for _, text in {read}({_literal(str(path))}))' for part, path in parts]
    source = readers.find_text(name, "")
    if source.is_folder:
        raise ConfigurationError(f"script: {name!r} is a folder. Put its documents into one file: .jsonl or .parquet.")
    given = {"column": source.column, "encoding": source.encoding}
    defaults = {f.name: f.default for f in fields(source)}
    settings = [f"{key}={_literal(value)}" for key, value in given.items() if value != defaults[key]]
    call, between = _wrapped(read, [_literal(str(source.path)), *settings]), _literal(end_of_text or corpus.END_OF_TEXT)
    return [DOCUMENTS.read_text(encoding="utf-8").format(read=call, between=between, held_out=corpus.HELD_OUT_SHARE)]


def _model(job: Job, sources: Sources) -> Iterator[str]:
    recipe, family = job.recipe, family_of(job.config)
    arguments = {"dtype": "float32", **model_arguments(recipe, family)}
    for name, value in arguments.items():
        if isinstance(value, Call):
            yield f"{name} = {_written(value, sources)}"
    expressions = {name: name if isinstance(value, Call) else _literal(value) for name, value in arguments.items()}
    if job.source.random:
        yield from _from_config(job, family, expressions)
    else:
        yield from _from_pretrained(family, job.source.location, expressions)


def _from_pretrained(family: ModelFamily, location: str, expressions: dict[str, str]) -> list[str]:
    values = [_literal(location), *_assigned({"use_safetensors": "True", **expressions})]
    return ["model = " + _wrapped(f"{family.model_class}.from_pretrained", values)]


def _from_config(job: Job, family: ModelFamily, expressions: dict[str, str]) -> list[str]:
    published = PUBLISHED.get(job.source.location, {}).items()
    known = {name: _literal(value) for name, value in published if name != "model_type"}
    taken = (vars(job.config).keys() | {"attn_implementation"}) - {"dtype"}
    settings = {name: source for name, source in expressions.items() if name in taken}
    values = _assigned({**known, **settings})
    made = family.config_class if known else f"{family.config_class}.from_pretrained"
    values = values if known else [_literal(job.source.location), *values]
    dtype = expressions["dtype"].strip('"')
    lines = [
        "torch.manual_seed(0)",
        f"config = {_wrapped(made, values)}",
        f"model = {family.model_class}(config).to(torch.{dtype})",
    ]
    if expressions.keys() > {"dtype", *settings}:  # such as quantization, which acts on loading
        again = {name: source for name, source in expressions.items() if name not in family.dropout_fields}  # is saved
        lines += ['model.save_pretrained("new-weights")', *_from_pretrained(family, "new-weights", again)]
    return lines


def _arguments(job: Job) -> str:
    values = {"output_dir": "fine-tuned", **argument_values(job.recipe, job.learning_rate)}
    expressions = {name: _literal(value) for name, value in values.items()}
    expressions["use_cpu"] = "not torch.accelerator.is_available()"
    return "\n".join(f"        {line}," for line in _assigned(expressions))


def _assigned(expressions: dict[str, str]) -> list[str]:
    return [f"{name}={source}" for name, source in expressions.items()]


def _literal(value: Any) -> str:
    """Python source of a value; texts in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
