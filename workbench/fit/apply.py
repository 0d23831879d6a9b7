"""`apply` puts techniques on somebody's own Trainer, on a model before it, or on the model and optimizer of a loop.

It calls the same functions as a run and an exported script. There is no record and no meter, and nothing else changes.

A technique works on the model (`change_loaded_model`, `model`), on the Trainer (`trainer`: its loss, the context of its
forward pass, its optimizer), or on both. Where there is no Trainer, as in a loop, `StandInTrainer` takes its place.
"""

import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

from workbench.base.categories import Category
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, UnavailableError, brief, explain_errors
from workbench.fit.any_training import Facts, about, is_causal, optimizer_of_its_own, several
from workbench.fit.places import Site, arguments_to_change, as_argument, detect_techniques, site_of
from workbench.models.family import ModelFamily, family_of
from workbench.techniques import Technique
from workbench.techniques.base import Arguments, Stage, check_together

Target = TypeVar("Target")

OPTIMIZERS = (Stage.OPTIMIZE, Stage.STEP)
# The entries of a parameter group that mean the same to optimizers of several kinds: a new optimizer takes them over.
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
        The target to go on with: the same Trainer, the model (wrapped, if an adapter was added), or the pair.

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
        return cast("Target", _apply_to_model(target, in_order))
    if isinstance(target, tuple) and len(target) == 2:
        model, optimizer = target
        return cast("Target", _apply_to_loop(model, optimizer, in_order))
    raise ConfigurationError(
        "apply: it takes a transformers Trainer, a model of transformers, or (model, optimizer), "
        f"got a {type(target).__name__}. Take the model out of what wraps it, and apply before "
        "accelerate prepares it."
    )


# ---- a built Trainer ----


def _apply_to_trainer(trainer: Any, techniques: list[Technique]) -> None:
    """Check techniques against a built Trainer, then put them on it and on its model in place."""
    model = trainer.model
    arguments = vars(trainer.args)
    if trainer.model_init is not None:
        raise ConfigurationError("apply: train() makes this model anew, by model_init. Apply to the model inside it.")
    family = _check_techniques(model, techniques, trainer.args)
    optimizer = optimizer_of_its_own(trainer)
    # These checks come before the first change, so that a refusal leaves the Trainer as it was. Only `check_model` has
    # to see the changed model.
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
        for change in (entry.change_loaded_model(family), entry.model(family)):
            if change is not None:
                change(model)  # in place: a technique that makes another model was refused above
        entry.check_model(model)
        call = entry.trainer()
        if call is not None:
            for name, value in arguments_to_change(entry, arguments).items():
                setattr(trainer.args, name, value)
            call(trainer)


def _only_as_argument(entry: Technique, argument: str) -> ConfigurationError:
    """Make the refusal of a technique that a built training cannot take."""
    return ConfigurationError(
        f"apply: {entry.name} can only be set as an argument, before anything is built. Set {argument}."
    )


def _check_ranks_and_checkpoints(args: Any, entry: Technique) -> None:
    """Refuse a technique that does not go with the Trainer's ranks, shards or checkpoints."""
    if args.deepspeed or args.fsdp or args.n_gpu > 1:
        raise ConfigurationError(
            f"apply: this Trainer uses {several(args)}, under which {entry.name} was not tried "
            "from outside. Show it one card, CUDA_VISIBLE_DEVICES=0, or write the recipe with "
            "`workbench script --shard`."
        )
    if args.world_size > 1 and entry.why_not_on_ranks:
        raise ConfigurationError(f"apply: {entry.name} works in one process: {entry.why_not_on_ranks}. Leave it out.")
    if not entry.can_be_resumed and args.save_strategy != "no" and not args.save_only_model:
        raise ConfigurationError(
            f"apply: {entry.name} keeps what training needs where a checkpoint does not reach. Set "
            "TrainingArguments(save_strategy='no') or save_only_model=True."
        )


# ---- a model ----


def _check_techniques(model: Any, techniques: list[Technique], args: Any = None) -> ModelFamily:
    """Refuse techniques that do not suit each other, the model, what it has already, or the device; return the model's
    family. Raises as `apply` does.

    Args:
        args: the TrainingArguments; None without a Trainer.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not is_causal(model):
        raise ConfigurationError(
            f"apply: a {type(base).__name__} is no causal language model of transformers, "
            "which the techniques were written for. Load one with AutoModelForCausalLM."
        )
    device = model.device.type
    if args is not None:
        device = args.device.type
    elif device == "cpu":
        device = None  # the fastest of this machine, to which a loop sends its model later
    facts: Facts = {"kind": "trainer", "arguments": vars(args) if args else {}, **about(model)}
    check_together([*detect_techniques(facts), *techniques], "apply")
    this_device = Device.find(device)
    family = family_of(model.config)
    for entry in techniques:
        reason = entry.missing(this_device)
        if reason:
            raise UnavailableError(reason)
        with explain_errors(
            f"apply: {entry.name} does not suit a {base.config.model_type!r}", f"Leave {entry.name} out."
        ):
            entry.check_config(base.config)
    return family


def _apply_to_model(model: Any, techniques: list[Technique]) -> Any:
    """Put techniques on a model, and return it; an adapter wraps it."""
    family = _check_techniques(model, techniques)
    for entry in techniques:
        if site_of(entry, family) is Site.ARGUMENT:
            raise _only_as_argument(entry, as_argument(entry, family, {}))
        if entry.stage in OPTIMIZERS:
            raise ConfigurationError(
                f"apply: {entry.name} decides about the optimizer. "
                "Give it too, apply((model, optimizer), …), or the Trainer."
            )
    for entry in techniques:
        change = entry.change_loaded_model(family)
        model = change(model) if change else entry.apply_to(model)
        entry.check_model(model)
    return replace_forward(model, [entry for entry in techniques if entry.trainer()])


def replace_forward(model: Any, techniques: list[Technique]) -> Any:
    """Give the model a forward pass that does, in training, what the techniques do to a Trainer's loss and context."""
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
        trainer = StandInTrainer(self, partial(plain_class.forward, self))
        for call in calls:
            call(trainer)
        with trainer.compute_loss_context_manager():
            output = trainer.compute_loss(self, *args, **kwargs)
        return _drop_logits(output) if makes_loss else output

    # The model gets a class of its own: so a copy of the model has this forward too, with the copy's weights.
    members = {"forward": forward, "__module__": plain_class.__module__, "__qualname__": plain_class.__qualname__}
    model.__class__ = type(plain_class.__name__, (plain_class,), members)
    return model


def _drop_logits(output: Any) -> Any:
    """Return the model's output without `logits`.

    A loss in chunks leaves hidden states in that place, which the loop would take for logits.
    """
    if not hasattr(output, "logits"):
        raise ConfigurationError("apply: a loss in chunks needs return_dict=True. Call the model with it.")
    kept = dict(output)
    kept.pop("logits", None)
    return type(output)(**kept)


# ---- a loop of one's own ----


@dataclass
class StandInTrainer:
    """A stand-in for the Trainer that a loop does not have, with what the techniques' functions use of one.

    Attributes:
        forward: the model's own forward pass, which computes the loss.
        args: TrainingArguments for the optimizer.
        optimizer_cls_and_kwargs: the class of the loop's optimizer and its settings; a technique replaces them.
    """

    model: Any
    forward: Any = None
    args: Any = None
    optimizer_cls_and_kwargs: Any = None
    prediction_step = None  # A technique replaces it. A loop evaluates by itself, and never calls it.

    def compute_loss(self, _: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def compute_loss_context_manager(self) -> ExitStack:
        return ExitStack()

    def get_optimizer_cls_and_kwargs(self, _: Any) -> Any:
        return self.optimizer_cls_and_kwargs


def _apply_to_loop(model: Any, optimizer: Any, techniques: list[Technique]) -> tuple[Any, Any]:
    """Put techniques on the model and the optimizer of a loop, and return both."""
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"apply: the second must be an optimizer, got a {type(optimizer).__name__}.")
    family = _check_techniques(model, techniques)
    on_model = []
    on_optimizer = []
    for entry in techniques:
        if entry.stage in OPTIMIZERS:
            on_optimizer.append(entry)
            continue
        on_model.append(entry)
        if site_of(entry, family) is Site.MODEL:
            raise ConfigurationError(
                f"apply: {entry.name} replaces the parameters that this optimizer has. "
                "Apply it to the model, and make the optimizer afterwards."
            )
    if on_model:
        model = _apply_to_model(model, on_model)
    for entry in on_optimizer:
        optimizer = _replace_optimizer(model, optimizer, entry)
    return model, optimizer


def _replace_optimizer(model: Any, optimizer: Any, entry: Technique) -> Any:
    """Return an optimizer of the same parameter groups that works as the technique says.

    Raises ConfigurationError: this one has taken a step, or the technique replaces AdamW and this is another.
    """
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


def _class_and_options(model: Any, optimizer: Any, entry: Technique) -> Any:
    """Return (class, keyword arguments) of the optimizer that the technique makes of this one."""
    from transformers import Trainer, TrainingArguments

    defaults = optimizer.defaults
    arguments: Arguments = {"learning_rate": defaults["lr"]}
    if "betas" in defaults:
        arguments["adam_beta1"], arguments["adam_beta2"] = defaults["betas"]
        arguments["adam_epsilon"] = defaults["eps"]
    call = entry.trainer()
    if call is None:  # The Trainer knows this optimizer by a name, which `optim` takes.
        arguments |= entry.training_arguments({})
        return Trainer.get_optimizer_cls_and_kwargs(TrainingArguments("loop", **arguments))
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in defaults.items() if name in accepted}
    if entry.stage is Stage.OPTIMIZE:
        options = {name: value for name, value in options.items() if name in ("lr", "betas", "eps")}
        if defaults.get("fused"):
            options["fused"] = True
    args = TrainingArguments("loop", **arguments)
    trainer = StandInTrainer(model, args=args, optimizer_cls_and_kwargs=(type(optimizer), options))
    call(trainer)
    return trainer.optimizer_cls_and_kwargs
