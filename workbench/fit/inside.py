"""Runs somebody's program, changed or as it is, for a few steps, and reports what was seen: a script by itself.

    python inside.py JOB.json train.py --its --arguments

The program is changed where it calls transformers: `TrainingArguments` in what it was called with, before it decides
anything by that; a Trainer, or the model of a loop, as soon as it is made. After the steps the process ends in the
middle of the program, so that nothing is saved, nor told to others.

The interpreter may be another than that of the workbench, from Python 3.9, PyTorch 2.0 and transformers 4.41 on. Where
it lacks what the workbench needs, the job names arguments alone, and nothing of the workbench is imported.
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
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

# by itself, in whatever Python: what the workbench shares with it lies beside it
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    any_training = importlib.import_module("any_training")
    imports = importlib.import_module("_emulated_imports")
    del sys.path[0]
else:
    from workbench.fit import any_training
    from workbench.gpus.emulator.inside import _emulated_imports as imports

LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
PARSER = "hf_argparser.py"  # of transformers: arguments that come from the command line
SILENT = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "HF_HUB_DISABLE_TELEMETRY": "1"}
MAKING = ("__init__", "__post_init__")
Frame = Any


class Run:
    """One run of the program.

    Attributes:
        job: the `arguments` that are changed, by name, and of techniques the settings, by name: `on_model` before the
            Trainer is made, `on_trainer` on it or on the model of a loop. The number of `steps`, whether they are
            followed by what the Trainer does beside training (`life`), and the file of the `report`. The `kind` that an
            earlier run has seen: a script may make an optimizer first, and then a Trainer that takes it. `here`: the
            card is that of this machine, and PyTorch may have a `share` of its memory. `timed`: it computes.
        seen: what is reported.
        peak: the most that PyTorch had reserved when the program counted its peaks anew.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.seen: dict[str, Any] = {"ended_by": "", "kind": "", "steps": 0, "tokens": 0, "rows": 0, "also": []}
        self.trained: tuple[Any, Any] | None = None  # the model, and whoever has its optimizer
        self.peak = 0
        self.step_ended = 0.0

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

    def end_if_out_of_memory(self, error: BaseException) -> None:
        # torch.cuda.OutOfMemoryError until PyTorch 2.5
        if type(error).__name__ == "OutOfMemoryError":
            self.seen["message"] = str(error)
            self.end("out of memory")

    def applied(self, target: Any, techniques: dict[str, dict[str, Any]]) -> Any:
        """The target with the workbench's techniques on it. They may not suit it: then the program ends here."""
        if not techniques:
            return target
        from workbench.base.errors import WorkbenchError
        from workbench.fit.apply import apply
        from workbench.techniques import technique

        try:
            return apply(target, *(technique(name, **settings) for name, settings in techniques.items()))
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

    def on_step(self, steps: int) -> None:
        """So many are done. How long the last one took, on a card that computes; and the end, after the last of all."""
        self.seen["steps"] = steps
        if self.job["timed"]:
            sys.modules["torch"].cuda.synchronize()
            now = time.monotonic()
            if self.step_ended:
                self.seen["step_time_s"] = round(now - self.step_ended, 3)
            self.step_ended = now
        if steps >= self.job["steps"] and not self.job["life"]:
            self.end("steps")

    def on_more(self, work: str) -> None:
        """What is done beside training."""
        self.seen["also"] = sorted({*self.seen["also"], work})

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
        changed = self.job["arguments"]
        arguments.output_dir = self.job["scratch"]  # nothing comes among the user's checkpoints
        arguments.report_to = "none"
        arguments.push_to_hub = False
        if changed and all(before[name] == value for name, value in changed.items()):
            return  # a copy of some that are changed already
        for name, value in changed.items():
            setattr(arguments, name, value)
        call = call_of(arguments)
        if call["indirect"] and not call["parsed"] and "arguments_call" in self.seen:
            return  # a library made others for itself
        self.seen |= {"arguments_call": call, "arguments_class": type(arguments).__name__}
        self.seen["arguments"] = json.loads(json.dumps(before, default=str))

    def change_trainer(self, module: Any) -> None:
        import inspect

        make = module.Trainer.__init__
        train = module.Trainer.train
        signature = inspect.signature(make)

        @wraps(make)
        def changed_make(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.on_trainer(trainer, make, signature.bind(trainer, *args, **kwargs))

        @wraps(train)
        def changed_train(trainer: Any, *_: Any, **__: Any) -> None:
            self.on_train(trainer)
            try:
                train(trainer)  # does not resume: there is nothing in its folder
            except RuntimeError as error:
                self.end_if_out_of_memory(error)
                raise
            self.end("the end of training")

        module.Trainer.__init__ = changed_make
        module.Trainer.train = changed_train

    def on_trainer(self, trainer: Any, make: Callable[..., None], bound: Any) -> None:
        self.seen |= {"kind": "trainer", "trainer_call": call_of(trainer), "trainer_class": type(trainer).__name__}
        if self.job["on_model"]:
            bound.arguments["model"] = self.applied(bound.arguments.get("model"), self.job["on_model"])
        make(*bound.args, **bound.kwargs)
        self.applied(trainer, self.job["on_trainer"])

    def on_train(self, trainer: Any) -> None:
        """The longest rows come first; the card is told of padding; the Trainer ends after the steps."""
        from transformers import TrainerCallback

        run = self

        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                run.on_step(state.global_step)
                is_last = state.global_step >= run.job["steps"]
                control.should_evaluate = is_last and args.eval_strategy != "no"
                control.should_save = is_last and args.save_strategy != "no"
                control.should_training_stop |= is_last

            def on_evaluate(self, *_: Any, **__: Any) -> None:
                run.on_more("evaluation")

            def on_save(self, *_: Any, **__: Any) -> None:
                run.on_more("saving")

        ranks = any_training.several(trainer.args)
        if ranks:
            self.refuse(ranks)
        self.trained = (trainer.model, trainer)
        self.watch(trainer.model)
        is_of_transformers = type(trainer).compute_loss.__module__.startswith("transformers.")
        if getattr(trainer, "compute_loss_func", None) or not is_of_transformers:
            self.seen["own_loss"] = type(trainer).__name__
        self.seen["own_optimizer"] = any_training.optimizer_of_its_own(trainer)
        trainer.add_callback(Stop)
        trainer.data_collator = any_training.Collator(trainer.data_collator, self.job["padding"])
        order, self.seen["longest_row"] = any_training.longest_first(trainer, self.job["steps"])
        if order:
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
        module.register_optimizer_step_post_hook(self.after_step)

    def on_optimizer(self, optimizer: Any) -> None:
        self.seen |= {"kind": "loop", "optimizer_call": call_of(optimizer)}
        model = any_training.model_of(optimizer)
        self.applied(model, self.job["on_trainer"])
        if model is not None:
            self.seen["model_name"] = variable_of(model, optimizer)
            self.trained = (model, optimizer)
            self.watch(model)

    def after_step(self, *_: Any) -> None:
        if self.seen["kind"] == "loop":
            self.on_step(self.seen["steps"] + 1)

    # ---- of both ----

    def refuse(self, ranks: str) -> None:
        self.seen["several"] = ranks
        self.end("several ranks")

    def refuse_several(self, module: Any) -> None:
        """Processes that the program starts itself."""
        module.start_processes = lambda *_, **__: self.refuse("torch.multiprocessing.spawn")

    def watch(self, model: Any) -> None:
        """Note what kind of model it is, what it has already, and the shapes of batches."""
        self.seen |= any_training.about(model)
        if "model" in self.seen:
            any_training.watch_batches(model, self.seen)


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
    """Where the program makes it: `file`, `line`, the `name` of its class, what lies between, and from Python 3.11 on
    `positions`, as bytecode has them."""
    frame, between = program_frame(product)
    if frame is None:
        return {"file": "", "line": 0, **between}
    code = frame.f_code
    place = {"file": os.path.abspath(code.co_filename), "line": frame.f_lineno, "name": type(product).__name__}
    if hasattr(code, "co_positions"):
        place["positions"] = list(code.co_positions())[frame.f_lasti // 2]
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


class OnlyThisPackage(importlib.abc.MetaPathFinder):
    """Finds the workbench, and nothing of what is installed beside it: that may be for another Python."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "workbench":
            return None
        file = os.path.join(self.folder, "__init__.py")
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[self.folder])


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
    if not job["shown"]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
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
    sys.meta_path.insert(0, imports.WatchImports(changes))
    is_module = program[0] == "-m"
    sys.argv = program[1:] if is_module else program
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        run.seen["exit"] = str(error.code)
        run.end("its own exit" if error.code else "its own end")
    except BaseException as error:
        run.end_if_out_of_memory(error)
        place = error.__traceback__  # from the program's own line on
        while place is not None and place.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            place = place.tb_next
        traceback.print_exception(type(error), error, place)
        run.seen["message"] = f"{type(error).__name__}: {error}"
        run.end("an error")
    run.end("its own end")


if __name__ == "__main__":
    run_program(sys.argv[1], sys.argv[2:])
