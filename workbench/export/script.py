"""A recipe as a plain Hugging Face script: no import of the workbench, to be read and changed like any other.

The script takes the same steps on the same blocks as `run`, in the same order, so on one machine it finds the same
losses. A technique does its work by arguments of transformers and PEFT, which the script has too, or by a plain
function: then the script contains the function's source, and the call that `run` makes.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path, PurePath
from textwrap import indent
from typing import Any

from transformers import TrainingArguments

from workbench.base.errors import ConfigurationError
from workbench.base.paths import DATA
from workbench.export.dependencies import header, import_lines, imports_of
from workbench.export.lines import WIDTH, Lines, literal, relative_path, wrap_call
from workbench.export.reading import read_text
from workbench.models.family import family_of, on_meta
from workbench.models.known import PUBLISHED
from workbench.models.load import BUILD_ARGUMENTS
from workbench.models.source import RANDOM, ModelSource, is_gpt2
from workbench.recipe import Recipe
from workbench.techniques.base import Arguments, Call
from workbench.texts import corpus
from workbench.texts.readers import split_name
from workbench.training.arguments import build_training_arguments, check_optimizer
from workbench.training.job import Job, Material, prepare, read_material
from workbench.training.ranks.shards import Ranks, split_batch
from workbench.training.world import World

TEMPLATE = '''
"""Fine-tune {title}.

{start}
"""

{imports}

# a row has LENGTH tokens, a step BATCH rows
{constants}


{definitions}def main():
{main}


if __name__ == "__main__":
    main()
'''
ALONE = "`uv run THIS_FILE.py` brings along the packages that are named above."
ON_RANKS = """\
`accelerate launch --config_file accelerate.yaml THIS_FILE.py` starts it on {count} ranks, which
share the rows of each step. The packages that it needs are named above."""
COUNTED_ALIKE = """\
# held-out rows count alike, whichever ranks evaluate them together; in training tokens do
alike = patch.object(args, "average_tokens_across_devices", False)
trainer.evaluation_loop = alike(trainer.evaluation_loop)"""
FLAVOURS = {"trainer": ("Trainer", "TrainingArguments"), "trl": ("SFTTrainer", "SFTConfig")}
DEFAULTS = {field.name: field.default for field in fields(TrainingArguments)}
CHECKPOINTING = "activation_checkpointing"
if CHECKPOINTING not in DEFAULTS:  # This transformers is older than 5.23.
    CHECKPOINTING = "gradient_checkpointing"
# SFTConfig's own defaults would cut rows, and have the other two on.
TRL = {"max_length": None, "bf16": False, CHECKPOINTING: False}
# The script states these arguments even if they have their default.
STATED = {"per_device_train_batch_size", "learning_rate", "max_steps"}


def script(recipe: Recipe, flavour: str = "trainer", ranks: Ranks | None = None) -> str:
    """Write Python source that trains the recipe with transformers, datasets and what the techniques need.

    Args:
        flavour: `trainer` is transformers' Trainer, `trl` TRL's SFTTrainer, whose losses are the same up to rounding.
        ranks: the ranks that share the batch, for `accelerate launch` with the configuration of `export.several`; None
            for one process.

    Raises:
        ConfigurationError, UnavailableError: as `run` does before it loads a model; or the model is an adapter, the
            text a folder, or the flavour has no arguments for what a technique does.
    """
    if ranks:
        ranks.check(recipe)
    if flavour not in FLAVOURS:
        raise ConfigurationError(f"script: {flavour!r} is no flavour. Choose one of {', '.join(FLAVOURS)}.")
    job = prepare(recipe, World.find(), material=known_material(recipe))
    # Made for their refusals alone: the script would refuse the same.
    arguments = build_training_arguments(job.arguments, job.device.kind, Path("fine-tuned"))
    check_optimizer(recipe, job.material.config, arguments, job.callbacks)
    if job.material.source.adapter:
        raise ConfigurationError(f"script: {recipe.model!r} is an adapter. Save the model as 'merged' and use that.")
    main = Main(job, flavour, ranks)
    main.add_data()
    main.add("")
    main.add_model()
    main.add("")
    main.add_trainer()
    lines = "\n".join(main.lines)
    # `make_rows` stands last, since it may use the functions that read conversations.
    definitions = [*main.sources.definitions.values(), main.make_rows]
    imports = main.sources.imports | imports_of(f"{main.make_rows}\n\n{lines}")
    # Files are named as seen from where the script will run.
    title = f"{recipe.model} on {recipe.corpus}: {recipe.label}".replace(f"{Path.cwd()}{os.sep}", "")
    text = TEMPLATE.lstrip().format(
        title=title.replace('"', "'").replace("\\", "/"),
        start=ON_RANKS.format(count=ranks.count) if ranks else ALONE,
        imports="\n".join([*environment_lines(recipe), *import_lines(imports)]),
        constants=constant_lines(main.constants),
        definitions="".join(f"{source}\n\n\n" for source in definitions),
        main=indent(lines, "    "),
    )
    return f"{header(text)}\n{text}"


def known_material(recipe: Recipe) -> Material | None:
    """Return the material of a size of GPT-2, whose script can be written without asking the hub; None for another
    model, whose material is read."""
    if not is_gpt2(recipe.model):
        return None
    material = read_material(replace(recipe, model=f"{RANDOM}{recipe.model}"))
    return replace(material, source=ModelSource(recipe.model, recipe.model, random=False))


class Main(Lines):
    """The lines of `main`: those of the data, of the model and of the trainer, in this order.

    Attributes:
        make_rows: the source of the function that makes rows.
        switches: TrainingArguments that do what a technique's function does in a run.
        trainer_arguments: further keyword arguments of the Trainer, as source.
        counts_unequally: whether rows have unequal numbers of tokens that count in the loss, as conversations have.
        place: the model's name on the hub, or its folder.
        tokenizer: the same for the tokenizer.
        constants: the script's constants by name, as source.
    """

    def __init__(self, job: Job, flavour: str, ranks: Ranks | None) -> None:
        super().__init__()
        self.job = job
        self.recipe = job.recipe
        self.flavour = flavour
        self.ranks = ranks
        self.make_rows = ""
        self.switches: Arguments = {}
        self.trainer_arguments: list[str] = []
        self.counts_unequally = False
        source = job.material.source
        self.place = source.address.repository if source.address else relative_path(source.location)
        self.revision = source.address.revision if source.address else ""
        location = job.material.tokenizer.name_or_path
        is_beside_it = location == source.location or (is_gpt2(self.place) and not source.random)
        self.tokenizer = self.place if is_beside_it else relative_path(location or "gpt2")
        self.constants = {"MODEL": literal(self.place)} if self.place == self.tokenizer else {}
        self.constants["LENGTH"] = str(job.recipe.sequence_length)
        self.constants["BATCH"] = str(job.recipe.effective_batch_size)

    # ---- the data ----

    def add_data(self) -> None:
        """Add `train_rows`, `eval_rows` and `data_collator`, in the order in which a run changes them."""
        reading = read_text(self, self.job)
        self.make_rows = reading.make_rows.strip()
        self.counts_unequally = bool(reading.labelling)
        self.add_call("tokenizer = ", "AutoTokenizer.from_pretrained", self.source_arguments(self.tokenizer), {})
        if reading.template:
            self.add(f"tokenizer.chat_template = {literal(reading.template)}")
        examples = self.calls("examples")
        if examples:
            self.add(*reading.labelling)
        else:
            # Rows that do not fill a step are left out, as in a run.
            self.add(
                f"train_rows = make_rows({reading.train}, tokenizer)",
                "train_rows = train_rows.select(range(len(train_rows) // BATCH * BATCH))",
            )
        train = "train" if reading.labelling else reading.train
        arguments = [train, "tokenizer", "LENGTH", "BATCH", str(self.recipe.seed)]
        self.add_calls("train_rows = ", arguments, examples)
        most = max(corpus.HELD_OUT_TOKENS, self.recipe.sequence_length)
        self.add(f"eval_rows = make_rows({reading.held_out}, tokenizer, most={most})")
        self.add_calls("train_rows = ", ["train_rows"], self.calls("dataset"))
        collators = self.calls("collator")
        if collators:
            self.add("data_collator = default_data_collator")
            self.trainer_arguments.append("data_collator=data_collator")
        for call in collators:
            function = self.sources.add(call.function)
            self.add_call("data_collator = ", "partial", [function, "data_collator"], call.settings)

    def source_arguments(self, place: str) -> list[str]:
        """List the arguments, as source, that name a model or a tokenizer. Code that comes with one of the hub is not
        run."""
        name = "MODEL" if self.constants.get("MODEL") == literal(place) else literal(place)
        if Path(place).is_dir():
            return [name]
        revision = [f"revision={literal(self.revision)}"] if self.revision and place == self.place else []
        return [name, "trust_remote_code=False", *revision]

    # ---- the model ----

    def add_model(self) -> None:
        """Add `model`, with the weights of a run, and the techniques' changes of it."""
        config = self.job.material.config
        family = family_of(config)
        arguments = {"dtype": "float32", **self.recipe.model_arguments(family)}
        place = self.place
        if self.job.material.source.random:
            # New weights are in memory already. They are loaded again only if an argument acts on loading.
            arguments = self.add_new_weights(arguments)
            place = "new-weights"
        if arguments:
            self.add_call("model = ", "AutoModelForCausalLM.from_pretrained", self.source_arguments(place), arguments)
        if getattr(on_meta(config), "loss_type", None) != "ForCausalLM":
            self.add('model.loss_type = "ForCausalLM"  # else T labels are counted, not T - 1')
        calls = self.calls("model", family)
        if calls:
            # Weights that a technique adds are drawn with this seed; TRL's trainer sets it by itself.
            self.add(f"torch.manual_seed({self.recipe.seed})")
        self.add_calls("model = ", ["model"], calls)

    def add_new_weights(self, arguments: Arguments) -> Arguments:
        """Add a model whose weights are drawn as in a run.

        Returns:
            The arguments with which it must be saved and loaded again, such as quantization, which acts on loading;
            empty if there are none.

        Raises:
            ConfigurationError: every one of several ranks would have to save it.
        """
        config = self.job.material.config
        built = {name: value for name, value in arguments.items() if name in BUILD_ARGUMENTS}
        on_loading = dict(arguments)
        sizes = dict(PUBLISHED.get(self.place, {}))
        model_type = sizes.pop("model_type", None)
        for name in arguments:
            if name not in BUILD_ARGUMENTS and hasattr(config, name):
                sizes[name] = on_loading.pop(name)
        self.add("torch.manual_seed(0)")  # the seed of all new weights, whatever the recipe's
        if model_type:
            self.add_call("config = ", "AutoConfig.for_model", [literal(model_type)], sizes)
        else:
            self.add_call("config = ", "AutoConfig.from_pretrained", self.source_arguments(self.place), sizes)
        drawn = {**built, "dtype": "float32"}
        self.add_call("model = ", "AutoModelForCausalLM.from_config", ["config"], drawn)
        if arguments["dtype"] != "float32":
            self.add(f"model = model.to(torch.{arguments['dtype']})")
        if on_loading.keys() <= built.keys():
            return {}
        if self.ranks:
            raise ConfigurationError(
                "script: new weights that are quantized as they load would be written by every "
                "rank. Take a model that has weights."
            )
        self.add('model.save_pretrained("new-weights")')
        return on_loading

    # ---- the trainer ----

    def add_trainer(self) -> None:
        """Add `args` and `trainer`, and the lines that train, evaluate and save."""
        trainer_class, arguments_class = FLAVOURS[self.flavour]
        always: Arguments = TRL if self.flavour == "trl" else {}
        values = always | self.job.arguments | self.switches
        if self.ranks:
            values |= self.arguments_on_ranks(self.ranks, values)
        stated = {}
        for name, value in values.items():
            if name in STATED or name in always or value != DEFAULTS.get(name):
                stated[name] = value
        keywords = ['output_dir="fine-tuned"']
        # On a CPU the Trainer refuses bf16 without `use_cpu`, and every rank would train alone.
        if values.get("bf16") or self.ranks:
            keywords.append("use_cpu=not torch.accelerator.is_available()")
        self.add_call("args = ", arguments_class, keywords, stated)
        parts = ["model", "args", "train_dataset=train_rows", "eval_dataset=eval_rows"]
        if self.flavour == "trl":
            parts.append("processing_class=tokenizer")
        self.add(wrap_call(f"trainer = {trainer_class}(", [*parts, *self.trainer_arguments], ")"))
        self.add_calls("", ["trainer"], self.calls("trainer"))
        if self.ranks and self.counts_unequally:
            self.add(COUNTED_ALIKE)
        for callback in self.recipe.callbacks:
            module, _, name = callback.partition(":")
            self.sources.imports.add((module, name))
            self.add(f"trainer.add_callback({name})")
        self.add_end()

    def arguments_on_ranks(self, ranks: Ranks, values: Arguments) -> Arguments:
        """Return the TrainingArguments whose values on each of several ranks differ from those in one process."""
        micro_batch, micro_batches = split_batch(values, ranks.count)
        # Batches must be whole: the Trainer fills up the last one with rows that it then counts twice.
        rows = len(self.job.data["eval_dataset"])
        sizes = range(1, values["per_device_eval_batch_size"] + 1)
        others: Arguments = {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": micro_batches,
            "per_device_eval_batch_size": max(size for size in sizes if rows % size == 0),
        }
        if ranks.engine == "ddp":
            others["ddp_find_unused_parameters"] = False
        if ranks.engine == "deepspeed":
            others["bf16"] = False  # DeepSpeed's own configuration asks for autocast.
        return others

    def add_end(self) -> None:
        """Add the lines that train, evaluate and save. One of several ranks prints the loss and saves the tokenizer."""
        self.add("trainer.train()")
        if self.ranks:
            self.add("trainer.accelerator.print(trainer.evaluate())  # once, not from every rank")
        else:
            self.add("print(trainer.evaluate())")
        self.add("trainer.save_model()", "trainer.save_state()")
        if self.flavour == "trainer":  # SFTTrainer saves the tokenizer by itself.
            save = "tokenizer.save_pretrained(args.output_dir)"
            self.add(f"if trainer.is_world_process_zero():\n    {save}" if self.ranks else save)
        if self.ranks:
            self.add("trainer.accelerator.wait_for_everyone()", "trainer.accelerator.end_training()")

    # ---- what the techniques do ----

    def calls(self, seam: str, *arguments: Any) -> list[Call]:
        """List the techniques' calls through one of their methods (a seam), such as `model`. A call whose work
        arguments of the Trainer do is left out, and these become `switches`.

        Raises:
            ConfigurationError: TRL's trainer, which calls none of their functions, has no arguments for it.
        """
        calls = []
        for technique in self.recipe.techniques:
            call: Call | None = getattr(technique, seam)(*arguments)
            if call is None:
                continue
            # If this transformers has arguments for it, the script needs no line.
            switches = technique.switches()
            if seam == "model" and switches and switches.keys() <= DEFAULTS.keys():
                self.switches |= switches
            elif self.flavour == "trainer":
                calls.append(call)
            elif call.function.__module__.startswith("peft."):
                # The call adds an adapter. SFTTrainer does that by itself, given the adapter's settings.
                self.trainer_arguments += [self.setting(name, value) for name, value in call.settings.items()]
            else:
                raise ConfigurationError(
                    f"script: {technique.name}, set as it is, does what TRL's trainer has no "
                    "arguments for. Leave it out, or take the flavour trainer."
                )
        return calls


def constant_lines(values: Mapping[str, str]) -> str:
    """Write the constants on one line, or on a line each if that would be long."""
    line = f"{', '.join(values)} = {', '.join(values.values())}"
    if len(line) <= WIDTH:
        return line
    return "\n".join(f"{name} = {value}" for name, value in values.items())


def environment_lines(recipe: Recipe) -> list[str]:
    """Write the lines that set what the techniques need in the environment, before torch is imported."""
    lines = []
    for technique in recipe.techniques:
        for name, value in technique.environment().items():
            lines.append(f"os.environ[{literal(name)}] = {literal(value)}")
    return ["import os", "", *lines, ""] if lines else []


def portable(recipe: Recipe, text: str) -> tuple[str, dict[str, str]]:
    """Make the paths in a text about a recipe relative, so that it can be used on another machine.

    A path below the working directory becomes relative to it; another one is cut to its name. The recipe's own names
    count as paths, and so does what stands alone between double quotes.

    Returns:
        The text, and for each file that it needs the path here, with its path in the text.
    """
    moved = {}
    named_by_recipe = {recipe.model.removeprefix(RANDOM), recipe.corpus}
    for path in named_by_recipe | set(re.findall(r'"([^"\n]{2,})(?=")', text)):
        if not PurePath(path).is_absolute():
            place = Path.cwd() / split_name(path)[0]
            if (path in named_by_recipe or DATA in place.parents) and os.path.exists(place):
                moved[str(Path.cwd() / path)] = path
            continue
        relative = PurePath(relative_path(path))
        short = relative.name if relative.is_absolute() else relative.as_posix()
        if short:
            stands_alone = r"(?<![^\s\"':=])" + re.escape(path) + r"(?![\w/.-])"
            text = re.sub(stands_alone, short.replace("\\", r"\\"), text)
            moved[path] = short
    return text, moved
