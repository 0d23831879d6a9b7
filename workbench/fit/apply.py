"""`apply`: techniques on somebody's own Trainer, on a model before it, or on the model and optimizer of a loop.

The functions are those of a run and of an exported script. There is no record and no meter, and nothing else changes.
"""

import inspect
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, TypeVar, cast

from workbench.base.categories import Category
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, UnavailableError, brief, explained
from workbench.fit.any_training import about, is_causal, optimizer_of_its_own, several
from workbench.fit.places import Site, already_there, as_argument, changed_arguments, site_of
from workbench.models.family import ModelFamily, family_of
from workbench.techniques import Technique
from workbench.techniques.base import Arguments, Stage, check_together

Target = TypeVar("Target")

OPTIMIZERS = (Stage.OPTIMIZE, Stage.STEP)
# what optimizers of several kinds have by groups
SHARED = ("params", "lr", "betas", "eps", "weight_decay", "momentum")


def apply(target: Target, *techniques: Technique) -> Target:
    """Put techniques on your own training, with the checks that a recipe has.

        trainer = apply(trainer, GradientCheckpointing(), ChunkedCrossEntropy())
        model = apply(model, Lora(rank=8))
        model, optimizer = apply((model, optimizer), ChunkedCrossEntropy(), StepInBackward())

    Args:
        target: a transformers Trainer before `train()`; a causal language model of transformers, before a Trainer or
            an optimizer is made for it; or a pair of a model and its optimizer, before the first step.

    Returns:
        What to go on with, in the shape of the target: the same Trainer, the model (an adapter wraps it), or the pair.

    Raises:
        ConfigurationError: the techniques exclude each other or what is there already, do not suit the model, or can
            only be set as an argument, which the message then names.
        UnavailableError: this device, or what is installed here, lacks what a technique needs.
    """
    from transformers import PreTrainedModel, Trainer

    if not techniques:
        raise ConfigurationError("apply: name at least one technique, as in apply(trainer, GradientCheckpointing()).")
    for entry in techniques:
        if not isinstance(entry, Technique):
            raise ConfigurationError(f"apply: {brief(entry)} is not a technique. Write for example Lora(rank=8).")
    in_order = sorted(techniques, key=lambda entry: (entry.stage, entry.name))
    if isinstance(target, Trainer):
        _apply_to_trainer(target, in_order)
        return target
    if isinstance(target, PreTrainedModel) or hasattr(target, "get_base_model"):
        return cast("Target", _applied_to_model(target, in_order))
    if isinstance(target, tuple) and len(target) == 2:
        model, optimizer = target
        return cast("Target", _applied_to_loop(model, optimizer, in_order))
    raise ConfigurationError(
        "apply: it takes a transformers Trainer, a model of transformers, or (model, optimizer), "
        f"got a {type(target).__name__}. Take the model out of what wraps it, and apply before "
        "accelerate prepares it."
    )


# ---- a built Trainer ----


def _apply_to_trainer(trainer: Any, techniques: list[Technique]) -> None:
    model = trainer.model
    arguments = vars(trainer.args)
    if trainer.model_init is not None:
        raise ConfigurationError("apply: train() makes this model anew, by model_init. Apply to the model inside it.")
    family = _checked_family(model, techniques, trainer.args.device.type, arguments)
    optimizer = optimizer_of_its_own(trainer)
    for entry in techniques:
        site = site_of(entry, family)
        if site is Site.ARGUMENT:
            raise _only_as_argument(entry, as_argument(entry, family, arguments))
        if site is Site.MODEL:
            raise ConfigurationError(
                f"apply: {entry.name} replaces the model, for which this Trainer is built already. "
                f"Before it, write model = apply(model, {type(entry).__name__}(…))."
            )
        if entry.stage in OPTIMIZERS and optimizer:
            raise ConfigurationError(
                f"apply: {entry.name} decides about the optimizer, and this Trainer takes "
                f"{optimizer}. Leave one of them out, and apply before train()."
            )
        _check_ranks_and_checkpoints(trainer.args, entry)
        entry.check_loss(model, trainer)
    for entry in techniques:
        for change in (entry.loaded_model(family), entry.model(family)):
            if change is not None:
                change(model)  # in place: what would make another model was refused
        entry.check_model(model)
        call = entry.trainer()
        if call is not None:
            for name, value in changed_arguments(entry, arguments).items():
                setattr(trainer.args, name, value)
            call(trainer)


def _only_as_argument(entry: Technique, argument: str) -> ConfigurationError:
    return ConfigurationError(
        f"apply: {entry.name} can only be set as an argument, before anything is built. Set {argument}."
    )


def _check_ranks_and_checkpoints(args: Any, entry: Technique) -> None:
    if args.deepspeed or args.fsdp or args.n_gpu > 1:
        raise ConfigurationError(
            f"apply: this Trainer uses {several(args)}, under which {entry.name} was not tried "
            "from outside. Show it one card, CUDA_VISIBLE_DEVICES=0, or write the recipe with "
            "`workbench script --shard`."
        )
    if args.world_size > 1 and entry.alone:
        raise ConfigurationError(f"apply: {entry.name} works in one process: {entry.alone}. Leave it out.")
    if not entry.can_be_resumed and args.save_strategy != "no" and not args.save_only_model:
        raise ConfigurationError(
            f"apply: {entry.name} keeps what training needs where a checkpoint does not reach. Set "
            "TrainingArguments(save_strategy='no') or save_only_model=True."
        )


# ---- a model ----


def _checked_family(model: Any, techniques: list[Technique], device: str | None, arguments: Arguments) -> ModelFamily:
    """The model's kind. Raises as `apply` does, where techniques do not suit each other, a model, what it has already,
    or a device.

    Args:
        arguments: the TrainingArguments by name; empty without a Trainer.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not is_causal(model):
        raise ConfigurationError(
            f"apply: a {type(base).__name__} is no causal language model of transformers, "
            "which the techniques were written for. Load one with AutoModelForCausalLM."
        )
    seen = {"kind": "trainer", "arguments": arguments, **about(model)}
    check_together([*already_there(seen), *techniques], "apply")
    here = Device.find(device)
    family = family_of(model.config)
    for entry in techniques:
        lacking = entry.missing(here)
        if lacking:
            raise UnavailableError(lacking)
        with explained(f"apply: {entry.name} does not suit a {base.config.model_type!r}", f"Leave {entry.name} out."):
            entry.check_config(base.config)
    return family


def _device_of(model: Any) -> str | None:
    """None, the fastest there is, for a model on the host: a loop sends it to its device later."""
    device = str(model.device.type)
    return None if device == "cpu" else device


def _applied_to_model(model: Any, techniques: list[Technique]) -> Any:
    family = _checked_family(model, techniques, _device_of(model), {})
    for entry in techniques:
        if site_of(entry, family) is Site.ARGUMENT:
            raise _only_as_argument(entry, as_argument(entry, family, {}))
        if entry.stage in OPTIMIZERS:
            raise ConfigurationError(
                f"apply: {entry.name} decides about the optimizer. "
                "Give it too, apply((model, optimizer), …), or the Trainer."
            )
    for entry in techniques:
        loaded = entry.loaded_model(family)
        model = loaded(model) if loaded else entry.applied_to(model)
        entry.check_model(model)
    return with_forward(model, [entry for entry in techniques if entry.trainer()])


def with_forward(model: Any, techniques: list[Technique]) -> Any:
    """The model, whose forward pass in training does what the techniques do to a Trainer's loss and its context."""
    if not techniques:
        return model
    if "forward" in vars(model):
        raise ConfigurationError(
            "apply: this model's forward() has been replaced already, as accelerate's prepare() does. Apply before."
        )
    calls: list[Any] = []
    makes_loss = False
    for entry in techniques:
        if entry.stage is Stage.COMPILE:
            raise _only_as_argument(entry, "model = torch.compile(model) in the loop")
        entry.check_loss(model)
        makes_loss |= Category.LOGITS_AND_LOSS in entry.attacks
        calls.append(entry.trainer())
    names = ", ".join(entry.name for entry in techniques)
    plain_class = type(model)

    @wraps(plain_class.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return plain_class.forward(self, *args, **kwargs)
        if makes_loss and kwargs.get("labels") is None:
            raise ConfigurationError(
                f"{names}: the model is called without labels, so the loss is made elsewhere, "
                "of logits that are never whole. Call model(…, labels=labels) and use its loss, "
                "or leave it out."
            )
        loop = Loop(self, partial(plain_class.forward, self))
        for call in calls:
            call(loop)
        with loop.compute_loss_context_manager():
            output = loop.compute_loss(self, *args, **kwargs)
        return _without_logits(output) if makes_loss else output

    # A class of its own, so that a copy of the model has it too, and computes with the copy's weights.
    members = {"forward": forward, "__module__": plain_class.__module__, "__qualname__": plain_class.__qualname__}
    model.__class__ = type(plain_class.__name__, (plain_class,), members)
    return model


def _without_logits(output: Any) -> Any:
    """What stands there is the hidden states: whoever reads it as logits shall not go on."""
    if not hasattr(output, "logits"):
        raise ConfigurationError("apply: a loss in chunks needs return_dict=True. Call the model with it.")
    kept = dict(output)
    kept.pop("logits", None)
    return type(output)(**kept)


# ---- a loop of one's own ----


class Loop:
    """What the techniques' functions ask of a Trainer, played by the model and optimizer of a loop."""

    prediction_step = None
    args: Any = None
    optimizer_cls_and_kwargs: Any = None

    def __init__(self, model: Any, forward: Any = None) -> None:
        self.model = model
        self.forward = forward

    def compute_loss(self, _: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def compute_loss_context_manager(self) -> ExitStack:
        return ExitStack()

    def get_optimizer_cls_and_kwargs(self, _: Any) -> Any:
        return self.optimizer_cls_and_kwargs


def _applied_to_loop(model: Any, optimizer: Any, techniques: list[Technique]) -> tuple[Any, Any]:
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"apply: the second must be an optimizer, got a {type(optimizer).__name__}.")
    family = _checked_family(model, techniques, _device_of(model), {})
    about_model = []
    about_optimizer = []
    for entry in techniques:
        if entry.stage in OPTIMIZERS:
            about_optimizer.append(entry)
            continue
        about_model.append(entry)
        if site_of(entry, family) is Site.MODEL:
            raise ConfigurationError(
                f"apply: {entry.name} replaces the parameters that this optimizer has. "
                "Apply it to the model, and make the optimizer afterwards."
            )
    if about_model:
        model = _applied_to_model(model, about_model)
    for entry in about_optimizer:
        optimizer = _changed_optimizer(model, optimizer, entry)
    return model, optimizer


def _changed_optimizer(model: Any, optimizer: Any, entry: Technique) -> Any:
    """An optimizer of the same groups, before the first step, that works as the technique says."""
    import torch

    if optimizer.state:
        raise ConfigurationError(f"apply: {entry.name} makes a new optimizer, and this one has states. Apply before.")
    if entry.stage is Stage.OPTIMIZE and type(optimizer) is not torch.optim.AdamW:
        raise ConfigurationError(
            f"apply: {entry.name} takes the place of torch.optim.AdamW, not of {type(optimizer).__name__}. Make that."
        )
    optimizer_class, options = _class_and_options(model, optimizer, entry)
    groups = []
    for group in optimizer.param_groups:
        groups.append({name: group[name] for name in SHARED if name in group})
    return optimizer_class(groups, **options)


def _class_and_options(model: Any, optimizer: Any, entry: Technique) -> tuple[Any, Arguments]:
    from transformers import Trainer, TrainingArguments

    defaults = optimizer.defaults
    arguments: Arguments = {"learning_rate": defaults["lr"]}
    if "betas" in defaults:
        arguments["adam_beta1"], arguments["adam_beta2"] = defaults["betas"]
        arguments["adam_epsilon"] = defaults["eps"]
    call = entry.trainer()
    if call is None:  # the Trainer has a name for it
        arguments |= entry.training_arguments({})
        named: tuple[Any, Arguments] = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments("loop", **arguments))
        return named
    loop = Loop(model)
    loop.args = TrainingArguments("loop", **arguments)
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in defaults.items() if name in accepted}
    if entry.stage is Stage.OPTIMIZE:
        options = {name: value for name, value in options.items() if name in ("lr", "betas", "eps")}
        if defaults.get("fused"):
            options["fused"] = True
    loop.optimizer_cls_and_kwargs = (type(optimizer), options)
    call(loop)
    changed: tuple[Any, Arguments] = loop.optimizer_cls_and_kwargs
    return changed
