"""Runs somebody's program, changed or as it is, for a few steps, and reports what was seen: a script by itself.

    python inside.py JOB.json train.py --its --arguments

The program is changed where it calls transformers: `TrainingArguments` in what it was called with, before it decides
anything by that; a Trainer, or the model of a loop, as soon as it is made. After the steps the process ends in the
middle of the program, so that nothing is saved, nor told to others.

The interpreter may be another than that of the workbench, from Python 3.9, PyTorch 2.0 and transformers 4.41 on. Where
it lacks what the workbench needs (the job says so: `alone`), nothing of that is imported, and arguments are all that is
changed. `python inside.py` without a job says which card there is.
"""

from __future__ import annotations

import atexit
import getpass
import importlib
import importlib.abc
import importlib.util
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by itself, in whatever Python: what the workbench shares with it lies beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    any_training = importlib.import_module("any_training")
    del sys.path[0]
else:
    from workbench.fit import any_training

LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
PARSER = "hf_argparser.py"  # of transformers: arguments that come from the command line
SILENT = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "HF_HUB_DISABLE_TELEMETRY": "1"}
MAKING = ("__init__", "__post_init__")
Frame = Any


class Run:
    """One run of the program.

    Attributes:
        job: `techniques` by name with their settings, the number of `steps`, whether they are followed by what the
            Trainer does beside training (`life`), and the file of the `report`. And the `kind` that an earlier run has
            seen: a script may make an optimizer first, and then a Trainer that takes it. `alone`: see above;
            `arguments` by name are then the changed ones. `here`: the card is that of this machine, and PyTorch may
            have a `share` of its memory. `timed`: it computes.
        seen: what is reported.
        peak: the most that PyTorch had reserved when the program counted its peaks anew.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.seen: dict[str, Any] = {"ended_by": "", "kind": "", "steps": 0, "tokens": 0, "rows": 0, "also": []}
        self.seen["alone"] = job["alone"]
        self.by_argument: set[str] = set()
        self.trained: tuple[Any, Any] | None = None  # the model, and whoever has its optimizer
        self.peak = 0
        self.step_ended = 0.0

    def techniques(self) -> list[Any]:
        if not self.job["techniques"]:
            return []
        from workbench.techniques import technique

        return [technique(name, **settings) for name, settings in self.job["techniques"].items()]

    def end(self, reason: str) -> None:
        """End the process here, with its reports: whatever the program would do next is not done."""
        self.seen["ended_by"] = reason
        if self.trained is not None:
            self.seen["sizes"] = any_training.sizes(*self.trained)
        if self.job["here"]:
            self.seen["card"] = self.used_of_the_card()
        Path(self.job["report"]).write_text(json.dumps(self.seen), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(0)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """The techniques may not suit the program: then it ends here."""
        if self.job["alone"]:
            yield
            return
        from workbench.base.errors import WorkbenchError

        try:
            yield
        except WorkbenchError as error:
            self.seen["refusal"] = str(error)
            self.end("refusal")

    # ---- a card of this machine ----

    def watch_the_card(self, module: Any) -> None:
        """The allocator has its share of the memory, as soon as there is one."""
        if self.job["share"] < 1:
            module._lazy_call(lambda: module.set_per_process_memory_fraction(self.job["share"]))

    def note_resets(self, module: Any) -> None:
        """The program may count its peaks anew, as often as it likes."""
        reset = module.reset_peak_memory_stats

        @wraps(reset)
        def note_and_reset(*args: Any, **kwargs: Any) -> None:
            self.peak = max(self.peak, module.max_memory_reserved())
            reset(*args, **kwargs)

        module.reset_peak_memory_stats = note_and_reset

    def used_of_the_card(self) -> dict[str, int]:
        """What PyTorch had `reserved` at most, how often it was refused memory, and what is taken `beside` it: CUDA's
        context, and other programs. Empty if the card was not used."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return {}
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return {
            "reserved": max(self.peak, torch.cuda.max_memory_reserved()),
            "refusals": torch.cuda.memory_stats().get("num_ooms", 0),
            "beside": total_bytes - free_bytes - torch.cuda.memory_reserved(),
        }

    def note_step(self) -> None:
        """How long the step took, on a card that computes."""
        if not self.job["timed"]:
            return
        import torch

        torch.cuda.synchronize()
        now = time.monotonic()
        if self.step_ended:
            self.seen["step_time_s"] = round(now - self.step_ended, 3)
        self.step_ended = now

    # ---- transformers' Trainer ----

    def change_arguments(self, module: Any) -> None:
        """Every TrainingArguments that is made, of subclasses too."""
        decide = module.TrainingArguments.__post_init__

        def changed(arguments: Any) -> None:
            self.on_arguments(arguments)
            decide(arguments)

        module.TrainingArguments.__post_init__ = changed

    def on_arguments(self, arguments: Any) -> None:
        before = dict(vars(arguments))
        changed = dict(self.job["arguments"])
        with self.refusing():
            for technique in self.techniques() if self.job["kind"] != "loop" else ():
                from workbench.fit.places import by_arguments, changed_arguments

                if by_arguments(technique, before):
                    self.by_argument.add(technique.name)
                    changed |= changed_arguments(technique, {**before, **changed})
        arguments.output_dir = self.job["scratch"]  # nothing comes among the user's checkpoints
        arguments.report_to = "none"
        arguments.push_to_hub = False
        earlier = self.seen.get("changed")
        if earlier and all(before[name] == value for name, value in earlier.items()):
            return  # a copy of some that are changed already
        for name, value in changed.items():
            setattr(arguments, name, value)
        call = call_of(arguments)
        if call["indirect"] and not call["parsed"] and "arguments_call" in self.seen:
            return  # a library made others for itself
        self.seen |= {"changed": changed, "arguments_call": call}
        self.seen["arguments_class"] = type(arguments).__name__
        self.seen["arguments"] = json.loads(json.dumps(before, default=str))

    def change_trainer(self, module: Any) -> None:
        import inspect

        make = module.Trainer.__init__
        train = module.Trainer.train
        signature = inspect.signature(make)

        @wraps(make)
        def changed_make(trainer: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(trainer, *args, **kwargs)
            self.on_trainer(trainer, bound.arguments, lambda: make(*bound.args, **bound.kwargs))

        @wraps(train)
        def changed_train(trainer: Any, *_: Any, **__: Any) -> None:
            self.on_train(trainer)
            try:
                train(trainer)  # does not resume: there is nothing in its folder
            except RuntimeError as error:
                if not any_training.is_out_of_memory(error):
                    raise
                self.seen["message"] = str(error)
                self.end("out of memory")
            self.end("the end of training")

        module.Trainer.__init__ = changed_make
        module.Trainer.train = changed_train

    def on_trainer(self, trainer: Any, arguments: dict[str, Any], make: Callable[[], None]) -> None:
        self.seen |= {"kind": "trainer", "trainer_call": call_of(trainer), "trainer_class": type(trainer).__name__}
        self.seen |= {"on_model": [], "put": []}
        techniques = [technique for technique in self.techniques() if not technique.environment()]
        if not techniques:
            make()
            return
        from workbench.fit.apply import apply
        from workbench.fit.places import Site, site_of
        from workbench.models.family import family_of
        from workbench.techniques import Capability

        with self.refusing():
            for technique in techniques:
                model = arguments.get("model")
                if model is None or Capability.ADAPTER not in technique.brings:
                    continue
                if site_of(technique, family_of(model.config)) is Site.MODEL:
                    self.seen["on_model"].append(technique.name)
                    arguments["model"] = apply(model, technique)
            make()  # which may make the arguments too
            done = {*self.by_argument, *self.seen["on_model"]}
            later = [technique for technique in techniques if technique.name not in done]
            self.seen["put"] = [*self.seen["on_model"], *(technique.name for technique in later)]
            if later:
                apply(trainer, *later)

    def on_train(self, trainer: Any) -> None:
        """The longest rows come first; the card is told of padding; the Trainer ends after the steps."""
        from transformers import TrainerCallback

        run = self

        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                run.seen["steps"] = state.global_step
                run.note_step()
                is_last = state.global_step >= run.job["steps"]
                if is_last and not run.job["life"]:
                    run.end("steps")
                control.should_evaluate = is_last and args.eval_strategy != "no"
                control.should_save = is_last and args.save_strategy != "no"
                control.should_training_stop |= is_last

            def on_evaluate(self, *_: Any, **__: Any) -> None:
                run.seen["also"] = sorted({*run.seen["also"], "evaluation"})

            def on_save(self, *_: Any, **__: Any) -> None:
                run.seen["also"] = sorted({*run.seen["also"], "saving"})

        args = trainer.args
        ranks = any_training.several(args)
        if ranks:
            self.seen["several"] = ranks
            self.end("several ranks")
        self.trained = (trainer.model, trainer)
        self.watch(trainer.model, vars(args))
        is_of_transformers = type(trainer).compute_loss.__module__.startswith("transformers.")
        if getattr(trainer, "compute_loss_func", None) or not is_of_transformers:
            self.seen["own_loss"] = type(trainer).__name__
        self.seen["own_optimizer"] = any_training.optimizer_of_its_own(trainer)
        trainer.add_callback(Stop)
        trainer.data_collator = any_training.Collator(trainer.data_collator, self.job["padding"])
        lengths = any_training.lengths_of(trainer.train_dataset)
        # micro-batches of about equal cost, and of unequal numbers of rows
        has_own_batches = getattr(args, "train_sampling_strategy", "") == "batch_rebalance"
        if lengths and not has_own_batches:
            self.seen["longest_row"] = max(lengths)
            count = args.per_device_train_batch_size * args.gradient_accumulation_steps
            order = any_training.longest_first(lengths, count, self.job["steps"])
            trainer._get_train_sampler = lambda *_, **__: order

    # ---- a loop of the program's own ----

    def change_optimizers(self, module: Any) -> None:
        """The optimizer of a loop tells which model is trained."""
        make = module.Optimizer.__init__

        @wraps(make)
        def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            if not self.seen["kind"] and self.job["kind"] != "trainer":
                self.on_optimizer(optimizer)

        module.Optimizer.__init__ = noted
        module.register_optimizer_step_post_hook(self.on_step)

    def on_optimizer(self, optimizer: Any) -> None:
        self.seen |= {"kind": "loop", "optimizer_call": call_of(optimizer)}
        model = any_training.model_of(optimizer)
        techniques = [technique for technique in self.techniques() if not technique.environment()]
        if techniques:
            from workbench.base.errors import ConfigurationError
            from workbench.fit.apply import apply

            with self.refusing():
                if model is None:
                    raise ConfigurationError("its optimizer has no parameters of a causal language model.")
                apply(model, *techniques)
                self.seen["put"] = [technique.name for technique in techniques]
        if model is not None:
            self.seen["model_name"] = variable_of(model, optimizer)
            self.trained = (model, optimizer)
            self.watch(model, {})

    def on_step(self, optimizer: Any, *_: Any) -> None:
        if self.seen["kind"] == "loop":
            self.seen["steps"] += 1
            self.note_step()
            if self.seen["steps"] >= self.job["steps"]:
                self.end("steps")

    # ---- of both ----

    def refuse_several(self, module: Any) -> None:
        """Processes that the program starts itself."""

        def refused(*_: Any, **__: Any) -> None:
            self.seen["several"] = "torch.multiprocessing.spawn"
            self.end("several ranks")

        module.start_processes = refused

    def watch(self, model: Any, arguments: dict[str, Any]) -> None:
        """Note what kind of model it is, what it has already, and the shapes of batches."""
        if self.job["alone"]:
            self.seen |= about_alone(model, arguments)
        else:
            from workbench.fit.apply import about

            self.seen |= about(model, arguments)
        if "model" in self.seen:
            any_training.watch_batches(model, self.seen)


def about_alone(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same without the workbench; and the model's config, of which the workbench makes the rest."""
    there = [name for name, _ in any_training.present(model, arguments)]
    if not any_training.is_causal(model):
        return {"there": there}
    vocabulary = getattr(model.config, "vocab_size", 0)
    config = json.loads(model.config.to_json_string(use_diff=False))
    return {"there": there, "model": type(model).__name__, "vocabulary": vocabulary, "config": config}


# ---- where in the program ----


def program_frame(product: Any) -> tuple[Frame, dict[str, bool]]:
    """The innermost frame of the program itself, outside of the object's own making; and what lies between: a library
    that makes it (`indirect`), transformers' parser of command lines (`parsed`)."""
    frame: Frame = sys._getframe()
    between = {"parsed": False, "indirect": False}
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = any(part in file for part in LIBRARIES) or file.startswith("<") or file == __file__
        is_making = _is_making(frame, product)
        if not is_library and not is_making:
            break
        between["parsed"] |= file.endswith(PARSER)
        between["indirect"] |= not is_making and file != __file__
        frame = frame.f_back
    return frame, between


def _is_making(frame: Frame, product: Any) -> bool:
    """Whether it is its constructor, or what a library has wrapped that in."""
    args = frame.f_locals.get("args")
    if isinstance(args, tuple) and args and args[0] is product:
        return True
    return frame.f_code.co_name in MAKING and frame.f_locals.get("self") is product


def call_of(product: Any) -> dict[str, Any]:
    """Where the program makes it: `file`, and of the call `line`, `column`, `end_line`, `end_column`, of which Python
    before 3.11 knows the first alone; the `name` of its class; and what lies between."""
    frame, between = program_frame(product)
    if frame is None:
        return {"file": "", "line": 0, **between}
    place = {"file": os.path.abspath(frame.f_code.co_filename), "line": frame.f_lineno, "name": type(product).__name__}
    if hasattr(frame.f_code, "co_positions"):
        line, end_line, column, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        place.update({"line": line, "column": column, "end_line": end_line, "end_column": end_column})
    return {**place, **between}


def variable_of(thing: Any, product: Any) -> str:
    """What the program calls it where it makes something else; empty if it has no name there."""
    frame, _ = program_frame(product)
    for names in (frame.f_locals, frame.f_globals) if frame is not None else ():
        for name, value in names.items():
            if value is thing:
                return str(name)
    return ""


# ---- the program ----


class Watcher(importlib.abc.MetaPathFinder):
    """Calls a function with each of some modules, once it has been imported."""

    def __init__(self, functions: dict[str, Callable[[Any], None]]) -> None:
        self.functions = functions
        self.looking_for: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.functions or name in self.looking_for:
            return None
        self.looking_for.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking_for.discard(name)  # who only looks whether it is there may import it later
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: Any) -> None:
                load(module)
                self.functions[name](module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


class OnlyThisPackage(importlib.abc.MetaPathFinder):
    """Finds the workbench, and nothing of what is installed beside it: that may be for another Python."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "workbench":
            return None
        file = os.path.join(self.folder, "__init__.py")
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[self.folder])


def describe_card() -> dict[str, Any]:
    """The cards that PyTorch sees, and of the first what it is and has free; a build for AMD's cards sees none here."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return {"count": 0, "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    return {
        "count": torch.cuda.device_count(),
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
    }


def nobody_answers(*_: Any, **__: Any) -> str:
    raise EOFError("nobody answers")


def run_program(job_file: str, program: list[str]) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    run = Run(job)
    os.environ.update(SILENT)
    os.environ.update(job["environment"])
    # whoever asks for a login is told that nobody answers
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    getpass.getpass = nobody_answers  # it would read from the terminal
    if job["log"]:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    sys.path[0] = job["path"]
    sys.meta_path.insert(0, OnlyThisPackage(job["package"]))
    changes: dict[str, Callable[[Any], None]] = {
        "transformers.training_args": run.change_arguments,
        "transformers.trainer": run.change_trainer,
        "torch.optim.optimizer": run.change_optimizers,
        "torch.multiprocessing.spawn": run.refuse_several,
    }
    if job["here"]:
        changes.update({"torch.cuda": run.watch_the_card, "torch.cuda.memory": run.note_resets})
    sys.meta_path.insert(0, Watcher(changes))
    if program[0] == "-m":
        sys.argv = program[1:]
        start: Any = runpy.run_module
        options = {"alter_sys": True}
    else:
        sys.argv = program
        start = runpy.run_path
        options = {}
    try:
        start(sys.argv[0], run_name="__main__", **options)
    except SystemExit as error:
        run.seen["exit"] = str(error.code)
        run.end("its own exit" if error.code else "its own end")
    except BaseException as error:
        if any_training.is_out_of_memory(error):
            run.seen["message"] = str(error)
            run.end("out of memory")
        place = error.__traceback__  # from the program's own line on
        while place is not None and place.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            place = place.tb_next
        traceback.print_exception(type(error), error, place)
        run.seen["message"] = f"{type(error).__name__}: {error}"
        run.end("an error")
    run.end("its own end")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(describe_card()))
    else:
        run_program(sys.argv[1], sys.argv[2:])
