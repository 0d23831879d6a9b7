"""A recipe as a plain Hugging Face script: no import of the workbench, to be read and changed like any other.

The script takes the same steps on the same blocks as `run`, in the same order, so on one machine it finds the same
losses. What a technique needs beyond `TrainingArguments` comes from its own `script` seam.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from workbench.errors import ConfigurationError
from workbench.models.gpt2 import END_OF_TEXT, SIZES
from workbench.models.source import ModelSource, resolve_auto
from workbench.paths import CORPORA
from workbench.recipe import Recipe
from workbench.run import world as devices
from workbench.run.checks import Prepared, prepare
from workbench.run.trainer import argument_values
from workbench.techniques.base import Arguments, Fragment
from workbench.texts import corpus
from workbench.texts import readers as texts

LOSS_TYPE = (
    "# GPT-2 sets none; without it the Trainer divides the loss by B * T instead of B * (T - 1)",
    'model.loss_type = "ForCausalLM"',
)
TEMPLATE = '''"""Fine-tune {title}.

Needs the packages imported below, and runs as it is: python THIS_FILE.py
"""

{imports}

SEQUENCE_LENGTH = {sequence_length}  # tokens
BATCH = {batch}  # sequences; the text is cut to whole batches of so many
SEED = {seed}


def read(path, encoding="utf-8-sig"):
    return Path(path).read_bytes().decode(encoding).replace("\\r\\n", "\\n")


def make_blocks(text):
    """Blocks of SEQUENCE_LENGTH tokens; the last, shorter piece is dropped."""
    tokens = tokenizer(text, verbose=False)["input_ids"]
    starts = range(0, len(tokens) - SEQUENCE_LENGTH + 1, SEQUENCE_LENGTH)
    return [tokens[start : start + SEQUENCE_LENGTH] for start in starts]


def collate(rows):
    """B rows of T tokens to two tensors (B, T); the model shifts the labels itself."""
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    return {{"input_ids": input_ids, "labels": input_ids.clone()}}

{definitions}{text}
tokenizer = AutoTokenizer.from_pretrained({tokenizer}, trust_remote_code=False)
train_blocks = make_blocks(train_text)
train_blocks = train_blocks[: len(train_blocks) // BATCH * BATCH]  # whole batches only
held_out_blocks = make_blocks(held_out_text)[: max(1, {held_out_tokens} // SEQUENCE_LENGTH)]
train_dataset = Dataset.from_dict({{"input_ids": train_blocks}})
eval_dataset = Dataset.from_dict({{"input_ids": held_out_blocks}})
data_collator = collate
{data}
{model}

trainer = Trainer(
    model=model,
    args=TrainingArguments(
{arguments}
    ),
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
    data_collator=data_collator,
)
{trainer}set_seed(SEED)
{training}
trainer.save_model()
trainer.save_state()
tokenizer.save_pretrained(trainer.args.output_dir)
'''


def script(recipe: Recipe) -> str:
    """Python source that trains the recipe with transformers, datasets and what the techniques need.

    Raises:
        ConfigurationError, UnavailableError: as `run` does before it loads a model; or the model is an adapter.
    """
    recipe = replace(recipe, model=resolve_auto(recipe.model, devices.pick_device().type))
    plan = prepare(recipe, devices.pick_device())
    if plan.source.adapter:
        raise ConfigurationError(f"script: {recipe.model!r} is an adapter. Save the model as 'merged' and use that.")
    fragments = [technique.script() for technique in recipe.techniques]
    return TEMPLATE.format(
        title=f"{recipe.model} on {recipe.corpus}: {recipe.label}".replace('"', "'").replace("\\", "/"),
        imports=_imports(plan, fragments),
        sequence_length=recipe.sequence_length,
        batch=recipe.effective_batch_size,
        seed=recipe.seed,
        text=_text(recipe.corpus, plan.tokenizer.eos_token),
        tokenizer=_literal(_tokenizer(plan.source)),
        held_out_tokens=corpus.HELD_OUT_TOKENS,
        definitions="".join(_block(f.definitions, after="\n\n") for f in fragments),
        data=_block(chain.from_iterable(f.data for f in fragments)),
        model=_model(plan, fragments),
        trainer=_block(chain.from_iterable(f.trainer for f in fragments)),
        training=_training([f.context for f in fragments if f.context]),
        arguments=_lines(_arguments(plan), indent=8),
    )


def _block(lines: Iterable[str], after: str = "") -> str:
    """Whole lines, or nothing at all."""
    joined = "\n".join(lines)
    return f"{joined}\n{after}" if joined else ""


def _training(contexts: list[str]) -> str:
    lines = ("trainer.train()", "print(trainer.evaluate())")
    if not contexts:
        return "\n".join(lines)
    return "\n".join([f"with {', '.join(contexts)}:", *(f"    {line}" for line in lines)])


def _imports(plan: Prepared, fragments: list[Fragment]) -> str:
    names = ["AutoTokenizer", "GPT2LMHeadModel", "Trainer", "TrainingArguments", "set_seed"]
    names += ["GPT2Config"] if plan.source.random else []
    others = {"from datasets import Dataset", *chain.from_iterable(fragment.imports for fragment in fragments)}
    standard, more = _document_imports(plan.recipe.corpus)
    libraries = sorted({*others, *more, f"from transformers import {', '.join(sorted(names, key=_import_order))}"})
    lines = [*_environment(fragments), *standard, "from pathlib import Path", "", "import torch", *libraries]
    return "\n".join(lines)


def _environment(fragments: list[Fragment]) -> list[str]:
    variables = [pair for fragment in fragments for pair in fragment.environment]
    lines = [f"os.environ[{_literal(name)}] = {_literal(value)}" for name, value in variables]
    return ["import os", "", *lines, ""] if lines else []


def _import_order(name: str) -> tuple[bool, str]:
    return name.islower(), name


def _text(name: str, end_of_text: str | None) -> str:
    if name in corpus.embedded():
        paths = (str(CORPORA / name / f"{part}.txt") for part in ("train", "held_out"))
        return "\n".join(
            f"{part}_text = read({_literal(path)})" for part, path in zip(("train", "held_out"), paths, strict=True)
        )
    source = texts.find_text(name, "")
    if source.is_folder:
        raise ConfigurationError(f"script: {name!r} is a folder. Put its documents into one file: .jsonl or .parquet.")
    lines = (
        *_documents(source, end_of_text or END_OF_TEXT),
        f"cut = int(len(text) * (1 - {corpus.HELD_OUT_SHARE}))  # the rest is held out",
        "train_text, held_out_text = text[:cut], text[cut:]",
    )
    return "\n".join(lines)


def _documents(source: texts.TextSource, end_of_text: str) -> list[str]:
    """Lines that read one file, as `workbench.texts.readers` does after all its checks."""
    path, column, encoding = _literal(str(source.path)), _literal(source.column), _literal(source.encoding)
    if _kind(source) in (".txt", ".md", ""):
        arguments = path if source.encoding == "utf-8-sig" else f"{path}, {encoding}"
        return [f"text = read({arguments})"]
    rows = {
        ".jsonl": f'[json.loads(line) for line in read({path}, {encoding}).split("\\n") if line.strip()]',
        ".csv": f'csv.DictReader(io.StringIO(read({path}, {encoding}), newline=""))',
        ".tsv": f'csv.DictReader(io.StringIO(read({path}, {encoding}), newline=""), delimiter="\\t")',
        ".parquet": f"Dataset.from_parquet({path})",
        "saved": f"load_from_disk({path})",
    }[_kind(source)]
    limit = [f"csv.field_size_limit({texts.CSV_FIELD_LIMIT})"] if _kind(source) in (".csv", ".tsv") else []
    return [
        *limit,
        f"rows = [row[{column}] for row in {rows}]",
        'documents = [row.replace("\\r\\n", "\\n") for row in rows if row and row.strip()]',
        f"text = {_literal(end_of_text)}.join(documents)",
    ]


def _kind(source: texts.TextSource) -> str:
    return "saved" if source.path.is_dir() else source.path.suffix.lower()


def _document_imports(name: str) -> tuple[list[str], list[str]]:
    """What reading the text needs: of the standard library, and of others."""
    if name in corpus.embedded():
        return [], []
    kind = _kind(texts.find_text(name, ""))
    standard = {".jsonl": ["import json"], ".csv": ["import csv", "import io"], ".tsv": ["import csv", "import io"]}
    return standard.get(kind, []), ["from datasets import load_from_disk"] if kind == "saved" else []


def _tokenizer(source: ModelSource) -> str:
    return "gpt2" if source.random and source.location in SIZES else source.location


def _model(plan: Prepared, fragments: list[Fragment]) -> str:
    arguments: Arguments = {"dtype": "float32"}
    for technique in plan.recipe.techniques:
        arguments = technique.model_arguments(arguments)
    expressions = _expressions(arguments)
    for fragment in fragments:
        expressions |= fragment.loading
    load = _from_config if plan.source.random else _from_weights
    lines = [*load(plan, expressions), *LOSS_TYPE, "set_seed(SEED)", *chain.from_iterable(f.model for f in fragments)]
    return "\n".join(lines)


def _dropout(plan: Prepared) -> Arguments:
    rate = plan.recipe.dropout
    return {} if rate is None else dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), rate)


def _from_weights(plan: Prepared, expressions: dict[str, str]) -> list[str]:
    return _from_pretrained(plan.source.location, {**expressions, **_expressions(_dropout(plan))})


def _from_pretrained(location: str, expressions: dict[str, str]) -> list[str]:
    """One line if it is short."""
    values = _assigned({"use_safetensors": "True", **expressions})
    line = f"model = GPT2LMHeadModel.from_pretrained({', '.join([_literal(location), *values])})"
    if len(line) <= 120:
        return [line]
    return [
        "model = GPT2LMHeadModel.from_pretrained(",
        *(f"    {value}," for value in [_literal(location), *values]),
        ")",
    ]


def _from_config(plan: Prepared, expressions: dict[str, str]) -> list[str]:
    known = SIZES.get(plan.source.location)
    settings = {name: source for name, source in expressions.items() if _is_setting(plan.config, name)}
    values = ", ".join(_assigned({**_expressions(known or {}), **settings, **_expressions(_dropout(plan))}))
    if known is not None:
        config = f"GPT2Config({values})"
    else:
        config = f"GPT2Config.from_pretrained({_literal(plan.source.location)}{', ' + values if values else ''})"
    dtype = expressions["dtype"].strip('"')
    lines = ["torch.manual_seed(0)", f"model = GPT2LMHeadModel({config}).to(torch.{dtype})"]
    if expressions.keys() > {"dtype", *settings}:  # such as quantization, which acts on loading
        lines += ['model.save_pretrained("new-weights")', *_from_pretrained("new-weights", expressions)]
    return lines


def _is_setting(config: Any, name: str) -> bool:
    """Whether an argument of loading is one that a config takes too."""
    return name == "attn_implementation" or (name != "dtype" and hasattr(config, name))


def _arguments(plan: Prepared) -> Arguments:
    return {"output_dir": "fine-tuned", **argument_values(plan.recipe, plan.learning_rate)}


def _expressions(values: dict[str, Any]) -> dict[str, str]:
    return {name: _literal(value) for name, value in values.items()}


def _assigned(expressions: dict[str, str]) -> list[str]:
    return [f"{name}={source}" for name, source in expressions.items()]


def _lines(values: dict[str, Any], indent: int) -> str:
    return "\n".join(
        [f"{'':{indent}}{name}={_literal(value)}," for name, value in values.items()]
        + [f"{'':{indent}}use_cpu=not torch.accelerator.is_available(),"]
    )


def _literal(value: Any) -> str:
    """Python source of a value; texts in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
