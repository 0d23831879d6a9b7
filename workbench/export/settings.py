"""Settings that people have, as a recipe: one of our own, or settings of Hugging Face's classes.

Each class reads its own settings, in the installed version, so defaults, types, aliases and checks are its own. What
the fields mean is in `classes.py`. Everything else is rejected with the command that runs it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Never

from workbench.base.errors import ConfigurationError, brief, explain_errors
from workbench.base.patches.transformers import look_at_no_device
from workbench.export.classes import (
    ADAPTERS,
    HARMLESS,
    NOT_COVERED,
    PACKAGES,
    PASSED,
    RENAMED,
    SEVERAL_GPUS,
    SFT,
    defaults_of,
    find_class,
    lists,
    name_with_version,
    reason_in,
)
from workbench.export.elsewhere import RUN_THE_SCRIPT, names_in, program_with, rejection_of_program
from workbench.export.pasted import ACCEPTED, ClassCall, read_pasted
from workbench.recipe import Recipe, as_command
from workbench.techniques import (
    ActivationOffloading,
    Attention,
    ChunkedCrossEntropy,
    DataLoading,
    Dora,
    GradientAccumulation,
    GradientCheckpointing,
    Ia3,
    Lora,
    MixedPrecision,
    Optimizer,
    PrefixTuning,
    PromptTuning,
    PureBf16,
    Qlora,
    Technique,
)

OURS = {field.name for field in fields(Recipe)} | {"technique"}
FORMS = {".toml": "TOML", ".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}  # for each ending of a file's name
# Names that settings of any script may have, so that they do not say that a file is one of TRL's.
ANYBODYS = {"model_name_or_path", "model_revision", "dataset_name", "trust_remote_code"}
# A file of `trl sft --config` may have these in addition to the fields of its classes.
OF_THE_COMMAND = {
    "env": "environment variables: set them where you start the workbench",
    "accelerate_config": SEVERAL_GPUS,
    "num_processes": SEVERAL_GPUS,
}
# The kinds of the technique `optimizer` by the names of the Trainer; "" is the optimizer of every recipe.
OPTIMIZER_KINDS = {
    "adamw_torch_fused": "",
    "adamw_torch": "adamw_foreach",  # PyTorch's own choice on a GPU
    "adafactor": "adafactor",
    "sgd": "sgd",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit_paged",
    "paged_adamw": "adamw_paged",
    "paged_adamw_32bit": "adamw_paged",
}
# Arguments of `from_pretrained` that have a counterpart, or that do not change the memory.
LOADING = {"dtype", "torch_dtype", "attn_implementation", "device_map", "revision", "trust_remote_code"}
# The values of LoRA's `init_lora_weights` that draw new numbers and leave the base weights as they are.
DRAWN = (True, False, "gaussian", "orthogonal")
WEIGHTS = "weights in fp32, because no setting says their type; for bf16 add the technique pure_bf16"
SECRETS = ("hub_token", "env")  # These may hold a token, and an answer is printed and stored in notebooks.
Pairs = list[tuple[str, str]]


@dataclass
class ImportedRecipe:
    """A recipe from settings, and what became of each setting that was stated and is not its default.

    Attributes:
        classes: the classes that read the settings, with their versions; empty for a recipe of the workbench.
        read: settings that are in the recipe.
        harmless: pairs (setting, why it does not change the memory).
        not_covered: pairs (setting, what it is about).
        assumed: what the recipe has although no setting says it; empty if there is nothing.
    """

    recipe: Recipe
    classes: str = ""
    read: list[str] = field(default_factory=list)
    harmless: Pairs = field(default_factory=list)
    not_covered: Pairs = field(default_factory=list)
    assumed: str = ""

    @property
    def without(self) -> str:
        """The words that a headline needs next to a prediction of the recipe; "" if every setting is covered."""
        names = list(dict.fromkeys(setting.partition(":")[0] for setting, _ in self.not_covered))
        if not names:
            return ""
        settings = "this setting does" if len(names) == 1 else f"these {len(names)} settings do"
        return f"without what {settings}: {', '.join(names)}"

    def __str__(self) -> str:
        lines = [f"read as settings of {self.classes or 'the workbench'}", f"  {as_command(self.recipe)}"]
        lines += [f"  assumed: {self.assumed}"] if self.assumed else []
        lines += [f"  harmless: {setting} ({reason})" for setting, reason in self.harmless]
        lines += [f"  NOT COVERED: {setting} ({about})" for setting, about in self.not_covered]
        return "\n".join(lines)


@dataclass(frozen=True)
class ClassSettings:
    """Settings of one class.

    Attributes:
        value: the object that the class `name` made of them.
        stated: the values that somebody stated, by field.
    """

    name: str
    value: Any
    stated: Mapping[str, Any]


def read_settings(text: str, base: Recipe | None = None, form: str = "") -> ImportedRecipe:
    """Read a recipe (TOML, JSON), a record, or settings of Hugging Face's classes as a file or as Python calls.

    Args:
        base: the recipe that gives what the settings do not say: the dataset, and for some of them the model.
        form: JSON, TOML or YAML; empty to find it in the text.

    Raises:
        ConfigurationError: the text is none of these, its class rejects it, or a value is out of range.
        UnavailableError: the package whose settings they are is not installed.
    """
    pasted = read_pasted(text, form)
    if isinstance(pasted, dict) and is_ours(pasted):
        recipe = Recipe.from_dict(pasted.get("recipe", pasted))
        unseen = [show_setting(*item) for item in recipe.arguments.items()]  # No control of the playground shows these.
        unseen += [f"callbacks: {name}, whose code a run imports" for name in recipe.callbacks]
        return ImportedRecipe(recipe, read=unseen)
    base = replace(base or Recipe(), techniques=(), learning_rate=None, arguments={})
    with look_at_no_device():
        of_no_class: Pairs = []
        if isinstance(pasted, dict):
            all_settings, of_no_class = read_file(pasted)
        else:
            all_settings = construct_all(pasted)
        # A class checks few types, so that a value of another type may fail only here.
        with explain_errors("recipe: these settings cannot be used", "Correct the value, or the package named."):
            recipe, lacks = translate({settings.name: settings.value for settings in all_settings}, base)
    stated = [settings for settings in all_settings if settings.stated] or all_settings[:1]
    imported = ImportedRecipe(recipe, ", ".join(name_with_version(settings.name) for settings in stated))
    imported.not_covered += of_no_class
    for settings in all_settings:
        answer_each(settings, lacks, imported)
    if not any(says_weights(settings.value) for settings in all_settings):
        imported.assumed = WEIGHTS
    return imported


def read_settings_file(path: Path | str, base: Recipe | None = None) -> ImportedRecipe:
    """Read settings from a file. Raises as `read_settings`, and ConfigurationError if the file cannot be read."""
    path = Path(path)
    with explain_errors(f"recipe: {path} cannot be read", "Name a file of settings in UTF-8."):
        text = path.read_text(encoding="utf-8")
    return read_settings(text, base, FORMS.get(path.suffix.lower(), ""))


def is_settings_file(name: str) -> bool:
    """Whether the name in the place of a model is that of a file of settings."""
    return Path(name).suffix.lower() in FORMS


def is_ours(settings: Mapping[str, Any]) -> bool:
    """Whether settings are a recipe or a record of the workbench, perhaps with a misspelled name."""
    if isinstance(settings.get("recipe"), dict):
        return True
    names = settings.keys() - {"learning_rate", "seed"}  # all programs have these
    return 2 * len(names & OURS) >= len(names) > 0 and isinstance(settings.get("model", ""), str)


# ---- whose settings, and the objects that the classes make of them ----


def read_file(settings: dict[str, Any]) -> tuple[list[ClassSettings], Pairs]:
    """Read a file's settings by their classes. Returns them, and pairs (setting, what it is about) for those that no
    class has.

    Raises ConfigurationError: no class that is read has them, or more than one could.
    """
    names = settings.keys()
    trainer_fields = defaults_of("TrainingArguments").keys()
    of_quantization = {*defaults_of("BitsAndBytesConfig"), "quant_method", "_load_in_4bit", "_load_in_8bit"}
    if "peft_type" in settings:
        kind = str(settings["peft_type"])
        if kind not in ADAPTERS:
            adapters = ", ".join(ADAPTERS)
            raise ConfigurationError(
                f"recipe: the workbench does not have PEFT's adapter {brief(kind)}, only {adapters}. {RUN_THE_SCRIPT}"
            )
        return split_off(settings, ADAPTERS[kind], {"peft_type"})
    if names and names <= of_quantization:
        return split_off(settings, "BitsAndBytesConfig", {"quant_method", "_load_in_4bit", "_load_in_8bit"})
    if names and names <= trainer_fields:
        return parse(("TrainingArguments",), settings), []
    program = program_with(names_in(settings))
    if program is not None:
        raise rejection_of_program(program)
    sft_fields = {name for class_name in SFT for name in defaults_of(class_name)}
    unknown = [name for name in settings if name not in sft_fields and name not in OF_THE_COMMAND]
    if unknown or not names:
        hints = [f"{name} is {RENAMED[name][0]} since {RENAMED[name][1]}." for name in unknown if name in RENAMED]
        listed = ", ".join(map(brief, unknown[:5])) or "anything"
        if {"r", "lora_alpha"} <= names <= defaults_of("LoraConfig").keys():
            hints.append("For an adapter of PEFT, add peft_type: LORA.")
        classes = f"{name_with_version('TrainingArguments')} and {name_with_version('SFTConfig')}"
        raise ConfigurationError(
            f"recipe: {classes} do not have {listed}. {' '.join([*hints, ACCEPTED, RUN_THE_SCRIPT])}"
        )
    if names <= {*trainer_fields, *ANYBODYS}:
        raise ConfigurationError(
            "recipe: these settings may be of `trl sft` or of a script of yours, whose defaults differ. For TRL, add "
            f"a field of its own, such as max_length: 1024. {RUN_THE_SCRIPT}"
        )
    of_classes = {name: value for name, value in settings.items() if name in sft_fields}
    others = [(show_setting(name, settings[name]), OF_THE_COMMAND[name]) for name in settings if name not in sft_fields]
    return parse(SFT, of_classes), others


def split_off(settings: dict[str, Any], name: str, ignored: set[str]) -> tuple[list[ClassSettings], Pairs]:
    """Return settings of one class, and those that it does not have, without the ignored ones."""
    stated = {key: value for key, value in settings.items() if key in defaults_of(name) and key not in ignored}
    others = [key for key in settings if key not in defaults_of(name) and key not in ignored]
    reason = f"{name_with_version(name)} does not have it"
    return [construct(ClassCall(name, (), stated))], [(show_setting(key, settings[key]), reason) for key in others]


def construct_all(calls: list[ClassCall]) -> list[ClassSettings]:
    """Make the object of each call. Raises ConfigurationError: it is of another class, or two calls exclude each
    other."""
    for call in calls:
        if call.name not in PACKAGES:
            program = program_with([call.name])
            if program is not None:
                raise rejection_of_program(program)
            classes = ", ".join(PACKAGES)
            raise ConfigurationError(
                f"recipe: {call.name} is not a class of settings that is read. Read are {classes}. {RUN_THE_SCRIPT}"
            )
    for group in (("TrainingArguments", "SFTConfig"), tuple(ADAPTERS.values()), *((name,) for name in PACKAGES)):
        called = [call.name for call in calls if call.name in group]
        if len(called) > 1:
            raise ConfigurationError(f"recipe: {' and '.join(called)} cannot both count. Paste the call that counts.")
    return [construct(call) for call in calls]


def construct(call: ClassCall) -> ClassSettings:
    """Call a class of settings. Raises ConfigurationError: it rejects the arguments."""
    defaults = defaults_of(call.name)
    unknown = [name for name in call.keywords if name not in defaults]
    if unknown:
        current = RENAMED.get(unknown[0])
        hint = f" It is {current[0]} since {current[1]}." if current else ""
        raise ConfigurationError(f"recipe: {name_with_version(call.name)} has no argument {unknown[0]!r}.{hint}")
    with explain_errors(f"recipe: {name_with_version(call.name)} rejects these settings", "Correct the value."):
        value = find_class(call.name)(*call.positional, **without_several_gpus(call.keywords))
    return ClassSettings(call.name, value, {**dict(zip(defaults, call.positional, strict=False)), **call.keywords})


def parse(names: tuple[str, ...], settings: dict[str, Any]) -> list[ClassSettings]:
    """Let classes read a file's settings, whose texts become values as on a command line.

    Raises ConfigurationError: a class rejects them.
    """
    classes = [find_class(name) for name in names]
    nulls = ", ".join(name for name, value in settings.items() if value is None)
    cure = f"Correct the value.{f' These have none: {nulls}.' if nulls else ''}"
    with explain_errors(f"recipe: {name_with_version(names[0])} rejects these settings", cure):
        if names == SFT:
            parser = import_module("trl").TrlParser(classes)
        else:
            parser = import_module("transformers").HfArgumentParser(classes)
        parser.error = reject  # A parser prints its usage and ends the process.
        parser.set_defaults(**without_several_gpus(settings))
        values = parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)
    all_settings = []
    for name, value in zip(names, values, strict=True):
        stated = {key: settings[key] for key in defaults_of(name) if key in settings}
        all_settings.append(ClassSettings(name, value, stated))
    return all_settings


def reject(message: str) -> Never:
    """Raise the message of a parser."""
    raise ValueError(message)


def without_several_gpus(settings: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a class would look up when it is made: files of DeepSpeed and FSDP, and other processes."""
    several = NOT_COVERED["TrainingArguments"][SEVERAL_GPUS].split()
    return {name: value for name, value in settings.items() if name not in several}


def show_setting(name: str, value: Any) -> str:
    """Return a setting as YAML writes it, cut at 90 characters, or without its value if that may be a secret."""
    if name in SECRETS:
        return f"{name}: …"
    return f"{name}: {value if isinstance(value, str) else json.dumps(value, default=str):.90}"


# ---- what they mean ----


def answer_each(settings: ClassSettings, lacks: Mapping[str, str], imported: ImportedRecipe) -> None:
    """Give each stated field its answer, and put those that a recipe takes as they are into its arguments.

    Args:
        lacks: fields whose values are not covered, each with what it is about.
    """
    arguments = dict(imported.recipe.arguments)
    defaults = defaults_of(settings.name)
    for name, value in settings.stated.items():
        if value == defaults[name] and name not in lacks:
            continue
        shown = show_setting(name, value)
        about = lacks.get(name) or reason_in(NOT_COVERED, settings.name, name)
        harmless = reason_in(HARMLESS, settings.name, name)
        if settings.name == "ModelConfig" and name.startswith(("lora_", "use_dora")) and not settings.value.use_peft:
            harmless = "it counts only with use_peft: true"
            about = ""
        if about and not (name == "init_lora_weights" and value in DRAWN):
            imported.not_covered.append((shown, about))
        elif harmless:
            imported.harmless.append((shown, harmless))
        else:
            imported.read.append(shown)
        if lists(PASSED, settings.name, name):
            final = getattr(settings.value, name)
            arguments[name] = final.value if isinstance(final, Enum) else final
    arguments = {name: value for name, value in arguments.items() if value is not None}
    imported.recipe = replace(imported.recipe, arguments=arguments)


def translate(objects: Mapping[str, Any], recipe: Recipe) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe with what the objects of the classes mean, and by field what is not covered.

    Raises ConfigurationError: a value is out of range.
    """
    lacks: dict[str, str] = {}
    techniques: list[Technique] = []
    trainer = objects.get("SFTConfig") or objects.get("TrainingArguments")
    model = objects.get("ModelConfig")
    adapter = next((objects[name] for name in ADAPTERS.values() if name in objects), None)
    quantization = objects.get("BitsAndBytesConfig")
    if model is not None:
        if model.model_name_or_path:
            revision = "" if model.model_revision == "main" else f"@{model.model_revision}"
            recipe = replace(recipe, model=f"{model.model_name_or_path}{revision}")
        trl = import_module("trl")
        adapter = adapter or trl.get_peft_config(model)
        quantization = quantization or trl.get_quantization_config(model)
    if adapter is not None:
        recipe = replace(recipe, model=adapter.base_model_name_or_path or recipe.model)
        techniques.append(translate_adapter(adapter, quantization, lacks))
        task = getattr(adapter.task_type, "value", adapter.task_type)
        if task not in (None, "CAUSAL_LM"):
            lacks |= dict.fromkeys(("task_type", "lora_task_type"), f"the task {task}, with another head and loss")
    if quantization is not None and quantization.load_in_4bit and not isinstance(adapter, find_class("LoraConfig")):
        lacks["load_in_4bit"] = "4-bit weights are predicted only with LoRA"
    if trainer is not None:
        techniques += translate_precision(trainer, model, lacks)
        techniques += translate_techniques(trainer, model, lacks)
        recipe = translate_trainer(trainer, recipe, lacks)
    return replace(recipe, techniques=tuple(techniques)), lacks


def translate_trainer(trainer: Any, recipe: Recipe, lacks: dict[str, str]) -> Recipe:
    """Return the recipe with the fields that a TrainingArguments or SFTConfig decides."""
    sizes = (trainer.per_device_train_batch_size, trainer.gradient_accumulation_steps)
    if not all(isinstance(size, int) for size in sizes):
        raise ConfigurationError(f"recipe: batch size and accumulation steps must be integers, got {brief(sizes)}.")
    values: dict[str, Any] = {
        "effective_batch_size": math.prod(sizes),
        "learning_rate": trainer.learning_rate,
        "seed": trainer.seed,
    }
    if trainer.optim.value not in OPTIMIZER_KINDS:  # The Trainer makes it, as in the script.
        passed = {"optim": trainer.optim.value, "optim_args": trainer.optim_args}
        values["arguments"] = {name: value for name, value in passed.items() if value is not None}
    if trainer.max_steps > 0:
        values["steps"] = trainer.max_steps
    if trainer.do_eval:
        values["evaluation_batch_size"] = trainer.per_device_eval_batch_size
    if not hasattr(trainer, "max_length"):
        return replace(recipe, **values)
    if trainer.max_length is None:
        lacks["max_length"] = "sequences as long as the dataset has them; sequence_length stays"
    else:
        multiple = trainer.pad_to_multiple_of or 1
        values["sequence_length"] = -(-int(trainer.max_length) // multiple) * multiple
    return replace(recipe, **values)


def says_weights(value: Any) -> bool:
    """Whether an object of a settings' class says the type of the weights."""
    loading = getattr(value, "model_init_kwargs", None) or {}
    return hasattr(value, "dtype") or bool({"dtype", "torch_dtype"} & loading.keys())


def translate_precision(trainer: Any, model: Any, lacks: dict[str, str]) -> list[Technique]:
    """Translate the type of the weights and autocast's, which act together.

    A TrainingArguments does not know the type of the weights: fp32, as a recipe has them, is assumed.
    """
    loading = getattr(trainer, "model_init_kwargs", None) or {}
    name = "model_init_kwargs" if {"dtype", "torch_dtype"} & loading.keys() else "dtype"
    weights = loading.get("dtype", loading.get("torch_dtype", model.dtype if model is not None else "float32"))
    weights = str(weights).removeprefix("torch.")
    if weights == "bfloat16":
        if trainer.fp16:
            lacks["fp16"] = "fp16 autocast over weights in bf16"
        return [PureBf16()]
    if weights != "float32":
        lacks[name] = f"weights of the type {weights}: fp32 is predicted"
    if trainer.fp16 or trainer.bf16:
        return [MixedPrecision("fp16" if trainer.fp16 else "bf16")]
    return []


def translate_techniques(trainer: Any, model: Any, lacks: dict[str, str]) -> list[Technique]:
    """Translate the fields of a TrainingArguments or SFTConfig that are techniques here."""
    techniques: list[Technique] = []
    if trainer.gradient_accumulation_steps > 1:
        techniques.append(GradientAccumulation(trainer.gradient_accumulation_steps))
    if trainer.dataloader_num_workers:
        techniques.append(DataLoading(memory_mapped=False, num_workers=trainer.dataloader_num_workers))
    if trainer.activation_checkpointing:
        options = dict(trainer.activation_checkpointing_kwargs or {})
        ours = {field.name for field in fields(GradientCheckpointing)}
        unknown = ", ".join(options.keys() - ours)
        if unknown:
            about = f"options of the checkpointing: {unknown}"
            lacks |= {"activation_checkpointing_kwargs": about, "gradient_checkpointing_kwargs": about}
        techniques.append(GradientCheckpointing(**{name: options[name] for name in options.keys() & ours}))
    kind = OPTIMIZER_KINDS.get(trainer.optim.value)
    if kind == "sgd" and (trainer.optim_args or "").replace(" ", "") == "momentum=0.9":
        techniques.append(Optimizer("sgd_momentum"))
    elif kind is not None and trainer.optim_args:
        lacks["optim_args"] = f"arguments of the optimizer {trainer.optim.value}"
    elif kind:
        techniques.append(Optimizer(kind))
    loading = getattr(trainer, "model_init_kwargs", None) or {}
    if loading.keys() - LOADING:
        lacks["model_init_kwargs"] = f"how the model is loaded: {', '.join(loading.keys() - LOADING)}"
    if "eager" in (loading.get("attn_implementation"), getattr(model, "attn_implementation", None)):
        techniques.append(Attention("eager"))
    if getattr(trainer, "activation_offloading", False):
        techniques.append(ActivationOffloading())
    loss = getattr(trainer, "loss_type", "")
    if loss == "nll" and not trainer.label_smoothing_factor:
        techniques.append(ChunkedCrossEntropy())  # the nearest to TRL's own loss, which makes no whole logits
    elif loss and loss != "nll":
        lacks["loss_type"] = "another loss, which needs all logits at once"
    return techniques


def translate_adapter(adapter: Any, quantization: Any, lacks: dict[str, str]) -> Technique:
    """Translate one of PEFT's adapters, over 4-bit weights if there is a quantization."""
    name = type(adapter).__name__
    if name == "IA3Config":
        return Ia3()
    if name != "LoraConfig":
        if adapter.num_virtual_tokens is None:
            raise ConfigurationError(f"recipe: {name} needs num_virtual_tokens.")
        technique = PrefixTuning if name == "PrefixTuningConfig" else PromptTuning
        return technique(adapter.num_virtual_tokens)
    values: dict[str, Any] = {"rank": adapter.r, "alpha": adapter.lora_alpha, "dropout": adapter.lora_dropout}
    targets = adapter.target_modules
    if isinstance(targets, str) and targets != "all-linear" and not targets.isidentifier():
        about = "a pattern of names: PEFT's own choice of matrices is predicted"
        lacks |= dict.fromkeys(("target_modules", "lora_target_modules"), about)
    elif not targets and targets is not None:
        lacks |= dict.fromkeys(("target_modules", "lora_target_modules"), "no matrices: PEFT's own choice is predicted")
    elif targets:
        values["targets"] = targets if isinstance(targets, str) else "+".join(sorted(targets))
    if quantization is None or not quantization.load_in_4bit:
        return Dora(**values) if adapter.use_dora else Lora(**values)
    if adapter.use_dora:
        lacks["use_dora"] = "DoRA over 4-bit weights: QLoRA is predicted"
    compute = str(quantization.bnb_4bit_compute_dtype).removeprefix("torch.")
    return Qlora(
        **values,
        format=quantization.bnb_4bit_quant_type,
        double_quantization=quantization.bnb_4bit_use_double_quant,
        compute="float32" if compute == "float32" else "bfloat16",  # fp16 has the same size
    )
