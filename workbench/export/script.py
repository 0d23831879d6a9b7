"""A recipe as a plain Hugging Face script: no import of the workbench, to be read and changed like any other.

The script takes the same steps on the same blocks as `run`, in the same order, so on one machine it finds the same
losses. What a technique does is arguments of transformers and PEFT, which the script has too, or a plain function: then
the script contains its source, and the call that `run` makes.
"""

import ast
import os
import re
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from textwrap import indent, wrap
from typing import Any

from transformers import TrainingArguments

from workbench.errors import ConfigurationError
from workbench.export.sources import Sources
from workbench.models.family import family_of, on_meta
from workbench.models.known import PUBLISHED
from workbench.models.load import BUILT
from workbench.models.source import RANDOM
from workbench.paths import beside
from workbench.ranks.shards import Ranks, shared
from workbench.recipe import Recipe
from workbench.run.arguments import training_arguments
from workbench.run.job import Job, prepare
from workbench.run.world import World
from workbench.techniques.base import Arguments, Call
from workbench.texts import chat, corpus, readers

TEMPLATE = Path(__file__).with_name("template.txt")  # for `str.format`: a brace of the script stands there twice
WORDS = beside(__file__, "script.toml")
WIDTH = 88  # of a line, ruff's own
DEFAULTS = {field.name: field.default for field in fields(TrainingArguments)}
CHECKPOINTING = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in DEFAULTS)
TRL = {"max_length": None, "bf16": False, CHECKPOINTING: False}  # rows are cut there by default, and these two true
EVALUATED = "per_device_eval_batch_size"
PARTS = "per_device_train_batch_size", "gradient_accumulation_steps"  # what ranks share
SAID = {"per_device_train_batch_size", "learning_rate", "max_steps", *TRL}  # even where they are the defaults


def script(recipe: Recipe, flavour: str = "trainer", ranks: Ranks | None = None) -> str:
    """Python source that trains the recipe with transformers, datasets and what the techniques need.

    Args:
        flavour: `trainer` is transformers' Trainer, `trl` TRL's SFTTrainer, whose losses are the same up to rounding.
        ranks: that share the batch, for `accelerate launch` with the configuration of `export.several`.

    Raises:
        ConfigurationError, UnavailableError: as `run` does before it loads a model; or the model is an adapter, the
            text a folder, or the flavour has no arguments for what a technique does.
    """
    if ranks:
        ranks.check(recipe)
    if flavour not in WORDS["flavours"]:
        raise ConfigurationError(f"script: {flavour!r} is no flavour. Choose one of {', '.join(WORDS['flavours'])}.")
    job = prepare(recipe, World.find())
    training_arguments(job.arguments, job.device.kind, Path("fine-tuned"))  # what it refuses, the script would refuse
    if job.material.source.adapter:
        raise ConfigurationError(f"script: {recipe.model!r} is an adapter. Save the model as 'merged' and use that.")
    main = _Main(job, flavour, ranks)
    lines = "\n\n".join("\n".join(part) for part in (main.data(), main.model(), main.trainer()))
    used = {node.id for node in ast.walk(ast.parse(f"{main.rows}\n\n{lines}")) if isinstance(node, ast.Name)}
    known = {(module, name) for module, names in WORDS["imports"].items() for name in names if (name or module) in used}
    title = f"{recipe.model} on {recipe.corpus}: {recipe.label}".replace(f"{Path.cwd()}{os.sep}", "")
    text = TEMPLATE.read_text(encoding="utf-8").format(
        title=title.replace('"', "'").replace("\\", "/"),
        start=WORDS["starts"]["ranks" if ranks else "alone"].format(ranks=ranks and ranks.count),
        imports="\n".join([*_environment(recipe), *_sorted_imports(main.sources.imports | known)]),
        constants=_constants(main.constants),
        definitions="".join(f"{source}\n\n\n" for source in (*main.sources.definitions.values(), main.rows)),
        main=indent(lines, "    "),
    )
    return f"{_header(text)}\n{text}"


def portable(recipe: Recipe, text: str) -> tuple[str, dict[str, str]]:
    """A text about a recipe with relative paths, and what became of each absolute one.

    A path below the working directory is relative to it; of another one only the name stays. What counts as a path is
    the recipe's own names, and what stands alone between double quotes.
    """
    moved = {}
    for path in {recipe.model.removeprefix(RANDOM), recipe.corpus, *re.findall(r'"([^"\n]{2,})(?=")', text)}:
        near = PurePath(_near(path))
        short = near.name if near.is_absolute() else near.as_posix()
        if PurePath(path).is_absolute() and short:
            before, after = r"(?<![^\s\"':=])", r"(?![\w/.-])"
            text, moved[path] = re.sub(before + re.escape(path) + after, short.replace("\\", r"\\"), text), short
    return text, moved


def _near(path: str) -> str:
    """Relative to the working directory, where the script will be run, if it lies below it."""
    pure, here = PurePath(path), Path.cwd()
    return pure.relative_to(here).as_posix() if pure.is_relative_to(here) else path


class _Main:
    """The lines of `main`: those of each part, in their order, and what they need.

    Attributes:
        sources: definitions and imports.
        constants: by name, as source.
        switches: arguments of the Trainer's that do what a technique's function does in a run.
        given: what the trainer is given, beside them and the rows.
        rows: the function that makes them.
        template: the line that gives the tokenizer one for conversations, if it has none.
        labelled: the lines that label conversations for a technique that makes rows of its own.
    """

    def __init__(self, job: Job, flavour: str, ranks: Ranks | None) -> None:
        self.job, self.recipe, self.flavour, self.ranks = job, job.recipe, flavour, ranks
        self.sources, self.switches, self.given = Sources(), Arguments(), list[str]()
        self.template, self.labelled = "", ""
        self.rows = WORDS["rows"]["text"].format(given="text", text="text")
        self.tokenizer = _near(job.material.tokenizer.name_or_path or "gpt2")
        self.place = _near(job.material.source.location)
        self.constants = {"MODEL": _literal(self.place)} if self.place == self.tokenizer else {}
        self.constants |= {"LENGTH": str(self.recipe.sequence_length), "BATCH": str(self.recipe.effective_batch_size)}

    def data(self) -> Iterator[str]:
        """Lines that make the data sets and `data_collator`, in the order in which a run changes them."""
        reading, words = self._reading()
        for opening, *items, closing in reading["calls"]:
            yield _broken(opening, [item.format(**words) for item in items], closing.format(**words))
        yield from (line.format(**words) for line in reading["lines"])
        yield from self._statement("tokenizer = ", "AutoTokenizer.from_pretrained", self._named(self.tokenizer), {})
        yield from filter(None, [self.template])
        train, held_out = (part.format(**words) for part in reading["parts"])
        whole = reading.get("whole", train)
        if file := reading.get("file"):
            whole, self.rows = file.format(train), WORDS["rows"]["text"].format(given="file", text=file.format("file"))
        given = [whole, "tokenizer", "LENGTH", "BATCH", str(self.recipe.seed)]
        if calls := [*self._calls("train_rows = ", given, "examples")]:
            calls = [*filter(None, [self.labelled]), *calls]
        yield from calls or [
            f"train_rows = make_rows({train}, tokenizer)",
            "train_rows = train_rows.select(range(len(train_rows) // BATCH * BATCH))",
        ]
        most = max(corpus.HELD_OUT_TOKENS, self.recipe.sequence_length)
        yield f"eval_rows = make_rows({held_out}, tokenizer, most={most})"
        yield from self._calls("train_rows = ", ["train_rows"], "dataset")
        if collators := [*self._calls("data_collator = ", ["data_collator"], "collator")]:
            yield from ["data_collator = default_data_collator", *collators]
            self.given.append("data_collator=data_collator")

    def _reading(self) -> tuple[dict[str, Any], dict[str, str]]:
        """How the text is read, and the words for it as source."""
        name, readings = self.recipe.corpus, WORDS["reading"]
        if name in corpus.embedded():
            train, held_out = (_literal(_near(str(path))) for path in corpus.embedded_files(name))
            return readings["embedded"], {"train": train, "held_out": held_out}
        source = readers.find_text(name, "")
        if source.is_folder:
            cure = "Put its documents into one file: .jsonl or .parquet."
            raise ConfigurationError(f"script: {name!r} is a folder. {cure}")
        ending = "saved" if source.path.is_dir() else source.path.suffix.lower()
        kind = "hub" if source.downloaded else ending
        reading = readings["plain"] if kind in readers.PLAIN else readings.get(kind.strip("."), readings["others"])
        if source.loss:
            reading = self._conversations(source, kind.strip("."))
        if reading is readings["others"]:
            self.sources.add(readers.read_documents)
        words: dict[str, Any] = {"path": _near(str(source.path)), "column": source.column, "encoding": source.encoding}
        words |= {
            "between": self.job.material.tokenizer.eos_token or corpus.END_OF_TEXT,
            "share": 1 - corpus.HELD_OUT_SHARE,
        }
        words |= {"columns": source.column.split(","), "most": corpus.HELD_OUT_TOKENS}
        told = "found" if "," in source.column else "[found]"  # a row of one column is its value
        call = ", ".join(f"{name}={_literal(word)}" for name, word in source.asked if word)
        return reading, {key: _literal(word) for key, word in words.items()} | {"asked": call, "found": told}

    def _conversations(self, source: readers.TextSource, kind: str) -> dict[str, Any]:
        """How they are read; and the function that says what of one counts goes into the rows."""
        known, template = WORDS["reading"]["conversations"], chat.template_of(self.job.material.tokenizer)
        if kind not in known:
            self.sources.add(readers.read_documents)
        reading = known | known.get(kind, known["others"])
        if source.column == "conversations":
            self.sources.add(chat.as_message)
            reading["lines"] = [*reading["lines"], known["renaming"]]
        everything = ", answers=False" if source.loss == chat.ALL else ""
        labels = f"{self.sources.add(chat.labels_of)}(each, tokenizer, template{everything})"
        self.rows = WORDS["rows"]["conversations"].format(labels=labels)
        self.labelled = known["labelling"].format(labels=labels)
        if not self.job.material.tokenizer.chat_template:
            self.template = f"tokenizer.chat_template = {_literal(template)}"
        return reading  # type: ignore[no-any-return]

    def model(self) -> Iterator[str]:
        """Lines that make `model`, with the weights of a run, and change it as the techniques do."""
        material, place = self.job.material, self.place
        family = family_of(material.config)
        arguments = {"dtype": "float32", **self.recipe.model_arguments(family)}
        if material.source.random:
            yield from self._new_weights(place, arguments)
            arguments = {n: value for n, value in arguments.items() if n in BUILT or not hasattr(material.config, n)}
            place = "new-weights" if arguments.keys() - {*BUILT} else ""  # such as quantization, which acts on loading
            if place and self.ranks:
                told = "new weights that are quantized as they load would be written by every rank"
                raise ConfigurationError(f"script: {told}. Take a model that has weights.")
            yield from [f'model.save_pretrained("{place}")'] if place else []
        if place:
            named = self._named(place)
            yield from self._statement("model = ", "AutoModelForCausalLM.from_pretrained", named, arguments)
        if getattr(on_meta(material.config), "loss_type", None) != "ForCausalLM":
            yield 'model.loss_type = "ForCausalLM"  # else T labels are counted, not T - 1'
        if calls := [*self._calls("model = ", ["model"], "model", family)]:
            seed = f"torch.manual_seed({self.recipe.seed})"  # which TRL's trainer sets too before it adds an adapter
            yield from calls if self.flavour == "trl" else [seed, *calls]

    def _named(self, place: str) -> list[str]:
        """Arguments that name a model; one of the hub may bring code from now on, which is not run."""
        named = "MODEL" if self.constants.get("MODEL") == _literal(place) else _literal(place)
        return [named] if Path(place).is_dir() else [named, "trust_remote_code=False"]

    def _new_weights(self, place: str, arguments: Arguments) -> Iterator[str]:
        sizes = dict(PUBLISHED.get(place, {}))
        kind = sizes.pop("model_type", None)
        sizes |= {n: value for n, value in arguments.items() if n not in BUILT and hasattr(self.job.material.config, n)}
        made = f"AutoConfig.{'for_model' if kind else 'from_pretrained'}"
        yield "torch.manual_seed(0)"
        yield from self._statement("config = ", made, [_literal(kind)] if kind else self._named(place), sizes)
        built = {n: value for n, value in arguments.items() if n in BUILT} | {"dtype": "float32"}
        yield from self._statement("model = ", "AutoModelForCausalLM.from_config", ["config"], built)
        if arguments["dtype"] != "float32":
            yield f"model = model.to(torch.{arguments['dtype']})"

    def trainer(self) -> Iterator[str]:
        flavour, own = WORDS["flavours"][self.flavour], TRL if self.flavour == "trl" else {}
        values: Arguments = own | self.job.arguments | self.switches
        if self.ranks:
            values |= zip(PARTS, shared(values, self.ranks.count), strict=True)
            values |= {"ddp_find_unused_parameters": False} if self.ranks.engine == "ddp" else {}
            if self.ranks.engine == "deepspeed":  # whose configuration asks for autocast
                values.pop("bf16", None)
            rows, most = len(self.job.data["eval_dataset"]), values[EVALUATED]
            # whole batches, or the Trainer fills the last one up with rows that it then counts twice
            values[EVALUATED] = max(size for size in range(1, most + 1) if rows % size == 0)
        said = {name: value for name, value in values.items() if name in SAID or value != DEFAULTS.get(name)}
        given = ['output_dir="fine-tuned"']
        if values.get("bf16") or self.ranks:  # else it refuses bf16, and every rank would train alone
            given += ["use_cpu=not torch.accelerator.is_available()"]
        yield from self._statement("args = ", flavour["arguments"], given, said)
        yield _broken(f"trainer = {flavour['trainer']}(", [*flavour["given"], *self.given], ")")
        yield from self._calls("", ["trainer"], "trainer")
        if self.ranks and self.labelled:  # unequally many tokens count in conversations
            self.sources.imports.add(("unittest.mock", "patch"))
            yield from WORDS["rows_alike"]["lines"]
        for module, _, name in (each.partition(":") for each in self.recipe.callbacks):
            self.sources.imports.add((module, name))
            yield f"trainer.add_callback({name})"
        yield from flavour["end_of_ranks" if self.ranks else "end"]

    def _calls(self, target: str, given: list[str], seam: str, *of: Any) -> Iterator[str]:
        """What the techniques do through a seam; no line of it where arguments of the Trainer's do it."""
        for technique in self.recipe.techniques:
            if (call := getattr(technique, seam)(*of)) is None:
                continue
            if call.switches and call.switches.keys() <= DEFAULTS.keys():
                self.switches |= call.switches
            elif self.flavour == "trainer":
                function = self.sources.add(call.function)
                parts = ("partial", [function, *given]) if seam == "collator" else (function, given)
                yield from self._statement(target, *parts, call.settings)
            elif call.function.__module__.startswith("peft."):
                for name, value in call.settings.items():
                    self.given.append((yield from self._setting(name, value)))
            else:
                cure = "Leave it out, or take the flavour trainer."
                what = f"{technique.name}, set as it is, does what TRL's trainer has no arguments for"
                raise ConfigurationError(f"script: {what}. {cure}")

    def _statement(self, target: str, function: str, given: list[str], settings: Mapping[str, Any]) -> Iterator[str]:
        """A call, after the lines that make its settings; the only one, if that is a call, stands in it."""
        opening, closing = f"{target}{function}(", ")"
        match [*settings.items()]:
            case [(name, Call() as inner)]:
                opening += ", ".join([*given, f"{name}={self.sources.add(inner.function)}("])
                given, settings, closing = [], inner.settings, "))"
        for name, value in settings.items():
            given = [*given, (yield from self._setting(name, value))]
        yield _broken(opening, given, closing)

    def _setting(self, name: str, value: Any) -> Generator[str, None, str]:
        """The lines that make the value, if it is a call; then it is given by its name."""
        if not isinstance(value, Call):
            return f"{name}={self.sources.add(value) if callable(value) else _literal(value)}"
        yield from self._statement(f"{name} = ", self.sources.add(value.function), [], value.settings)
        return f"{name}={name}"


def _broken(opening: str, items: list[str], closing: str) -> str:
    """One line; or if it would be long, as few as hold the items, which ruff is told to leave so."""
    if len(line := f"{opening}{', '.join(items)}{closing}") <= WIDTH - 4:
        return line
    words = " ".join(f"{each},".replace(" ", "\0") for each in items)  # an item stays in one piece
    lines = wrap(words, WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return "\n".join([opening, *(f"    {line}".replace("\0", " ") for line in lines), f"{closing}  # fmt: skip"])


def _constants(values: Mapping[str, str]) -> str:
    """In one line, or a line each if it would be long."""
    line = f"{', '.join(values)} = {', '.join(values.values())}"
    return line if len(line) <= WIDTH else "\n".join(f"{name} = {value}" for name, value in values.items())


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
    return [*lines[True], *([""] if lines[True] else []), *lines[False]]


def _import_line(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= WIDTH else "\n    ".join([f"from {module} import (", *(f"{n}," for n in names)]) + "\n)"


def _header(text: str) -> str:
    """As PEP 723 has it, for `uv run`: the packages that the script imports, in the versions that are here."""
    nodes = [*ast.walk(ast.parse(text))]
    modules = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    needed = {name.partition(".")[0] for name in [*modules, "torch"]} - sys.stdlib_module_names
    needed |= {package for word, package in WORDS["packages"].items() if word in text}
    listed = [f'#     "{_pinned(name)}",' for name in sorted(needed)]
    return "\n".join(["# /// script", '# requires-python = ">=3.11"', "# dependencies = [", *listed, "# ]", "# ///"])


def _pinned(name: str) -> str:
    asked = f"{name}[torch]" if name == "transformers" else name  # with what its Trainer needs
    with suppress(PackageNotFoundError):  # then any
        asked += f"=={version(name).partition('+')[0]}"
    return asked


def _literal(value: Any) -> str:
    """Python source of a value; texts in double quotes, if there is none in them."""
    written = repr(value)
    return written if '"' in written else written.replace("'", '"')
