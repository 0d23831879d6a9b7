"""A script that runs somebody's program for a few steps, changed or as it is, and reports what was seen of it.

    python inside.py JOB.json train.py --its --arguments

JOB.json is a `TrialJob`, the report a `Facts`; both are described in `any_training.py`.

The program is changed where it calls transformers. `TrainingArguments` get other values before their `__post_init__`
derives anything from them; a Trainer, or the model of a loop, is changed as soon as it is made. After the steps the
process ends in the middle of the program, so that nothing is saved or sent to others.

The interpreter may be another than that of the workbench, from Python 3.9, PyTorch 2.0 and transformers 4.41 on. Where
it lacks what the workbench needs, the job changes arguments alone, and nothing of the workbench is imported.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.fit.any_training import CallSite, CardUse, Facts, TrialJob

# Run as a script, in whatever Python, it imports the two modules that `try_out` has copied beside it.
if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    any_training = importlib.import_module("any_training")
    imports = importlib.import_module("_emulated_imports")
    del sys.path[0]
else:
    from workbench.fit import any_training
    from workbench.gpus.emulator.inside import _emulated_imports as imports

LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
PARSER = "hf_argparser.py"  # transformers' file that makes TrainingArguments from the command line
SILENT = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "HF_HUB_DISABLE_TELEMETRY": "1"}
CONSTRUCTORS = ("__init__", "__post_init__")
Frame = Any


class Run:
    """One run of the program.

    Methods that take a `module` replace functions in it, as soon as the program imports it. Methods called `on_…` are
    called by these functions.

    Attributes:
        facts: the report.
        trained: the model, and the Trainer or optimizer that trains it; None before the training begins.
        peak: the most bytes that PyTorch had reserved before the program last reset its peaks.
        step_ended: seconds on the clock `time.monotonic`; 0 before the first step.
    """

    def __init__(self, job: TrialJob) -> None:
        self.job = job
        self.facts: Facts = {"ended_by": "", "kind": "", "steps": 0, "tokens": 0, "rows": 0, "also": []}
        self.trained: tuple[Any, Any] | None = None
        self.peak = 0
        self.step_ended = 0.0

    def end(self, reason: str) -> None:
        """Write the report and end the process here. Nothing that the program would do next is done."""
        self.facts["ended_by"] = reason
        if self.trained is not None:
            self.facts["sizes"] = any_training.sizes(*self.trained)
        if self.job["here"]:
            self.facts["card"] = self.measure_card()
        Path(self.job["report"]).write_text(json.dumps(self.facts), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
        os._exit(0)

    def end_if_out_of_memory(self, error: BaseException) -> None:
        """End the process if an error says that the card had no more memory."""
        # The class is torch.cuda's until PyTorch 2.5, and torch's since: its name is the same.
        if type(error).__name__ == "OutOfMemoryError":
            self.facts["message"] = str(error)
            self.end("out of memory")

    def apply_techniques(self, target: Any, techniques: dict[str, dict[str, Any]]) -> Any:
        """Return the target with the workbench's techniques on it; end the program if they do not suit it."""
        if not techniques:
            return target
        from workbench.base.errors import WorkbenchError
        from workbench.fit.apply import apply
        from workbench.techniques import technique

        try:
            return apply(target, *(technique(name, **settings) for name, settings in techniques.items()))
        except WorkbenchError as error:
            self.facts["refusal"] = str(error)
            self.end("refusal")

    # ---- this machine's own card ----

    def limit_memory(self, module: Any) -> None:
        """Limit PyTorch's allocator to its share of the card's memory, as soon as CUDA is initialized."""
        if self.job["share"] < 1:
            module._lazy_call(lambda: module.set_per_process_memory_fraction(self.job["share"]))

    def keep_peaks(self, module: Any) -> None:
        """Keep the peak of reserved memory when the program resets its peaks, which it may do at any time."""
        reset = module.reset_peak_memory_stats

        @wraps(reset)
        def keep_and_reset(*args: Any, **kwargs: Any) -> None:
            self.peak = max(self.peak, module.max_memory_reserved())
            reset(*args, **kwargs)

        module.reset_peak_memory_stats = keep_and_reset

    def measure_card(self) -> CardUse:
        """Return what is taken of the card; an empty dictionary if the program did not use it."""
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
        """Note that so many optimizer steps are done, and the last one's duration on a card that computes. End the
        process after the last step, unless evaluation and saving are to follow."""
        self.facts["steps"] = steps
        if self.job["timed"]:
            sys.modules["torch"].cuda.synchronize()
            now = time.monotonic()
            if self.step_ended:
                self.facts["step_time_s"] = round(now - self.step_ended, 3)
            self.step_ended = now
        if steps >= self.job["steps"] and not self.job["life"]:
            self.end("steps")

    def on_more(self, work: str) -> None:
        """Note that the Trainer evaluates or saves."""
        self.facts["also"] = sorted({*self.facts["also"], work})

    # ---- transformers' Trainer ----

    def change_arguments(self, module: Any) -> None:
        """Change every TrainingArguments that the program makes, those of subclasses too."""
        derive = module.TrainingArguments.__post_init__

        def change_and_derive(arguments: Any) -> None:
            self.on_arguments(arguments)
            derive(arguments)

        module.TrainingArguments.__post_init__ = change_and_derive

    def on_arguments(self, arguments: Any) -> None:
        """Keep the program's checkpoints, reports and uploads away, change its arguments, and note what they were."""
        before = dict(vars(arguments))
        changed = self.job["arguments"]
        arguments.output_dir = self.job["scratch"]  # Nothing may come among the user's checkpoints.
        arguments.report_to = "none"
        arguments.push_to_hub = False
        if changed and all(before[name] == value for name, value in changed.items()):
            return  # They are a copy of arguments that are changed already.
        for name, value in changed.items():
            setattr(arguments, name, value)
        call = call_of(arguments)
        if call["indirect"] and not call["parsed"] and "arguments_call" in self.facts:
            return  # A library has made other arguments for itself.
        self.facts |= {"arguments_call": call, "arguments_class": type(arguments).__name__}
        self.facts["arguments"] = json.loads(json.dumps(before, default=str))

    def change_trainer(self, module: Any) -> None:
        import inspect

        make = module.Trainer.__init__
        train = module.Trainer.train
        signature = inspect.signature(make)

        @wraps(make)
        def make_and_change(trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.on_trainer(trainer, make, signature.bind(trainer, *args, **kwargs))

        @wraps(train)
        def train_and_end(trainer: Any, *_: Any, **__: Any) -> None:
            self.on_train(trainer)
            try:
                train(trainer)  # without the program's resume_from_checkpoint: output_dir has no checkpoint here
            except RuntimeError as error:
                self.end_if_out_of_memory(error)
                raise
            self.end("the end of training")

        module.Trainer.__init__ = make_and_change
        module.Trainer.train = train_and_end

    def on_trainer(self, trainer: Any, make: Callable[..., None], bound: Any) -> None:
        """Make a Trainer with the techniques on its model and on itself, and note where the program makes it."""
        self.facts |= {"kind": "trainer", "trainer_call": call_of(trainer), "trainer_class": type(trainer).__name__}
        if self.job["on_model"]:
            bound.arguments["model"] = self.apply_techniques(bound.arguments.get("model"), self.job["on_model"])
        make(*bound.args, **bound.kwargs)
        self.apply_techniques(trainer, self.job["on_trainer"])

    def on_train(self, trainer: Any) -> None:
        """Give the Trainer its longest rows first, have the card told of padding, and stop after the steps."""
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
            self.facts["own_loss"] = type(trainer).__name__
        self.facts["own_optimizer"] = any_training.optimizer_of_its_own(trainer)
        trainer.add_callback(Stop)
        trainer.data_collator = any_training.Collator(trainer.data_collator, self.job["padding"])
        order, self.facts["longest_row"] = any_training.longest_first(trainer, self.job["steps"])
        if order:
            trainer._get_train_sampler = lambda *_, **__: order

    # ---- a loop of the program's own ----

    def change_optimizers(self, module: Any) -> None:
        """Watch every optimizer that the program makes: a loop's tells which model is trained."""
        make = module.Optimizer.__init__

        @wraps(make)
        def make_and_note(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            if not self.facts["kind"] and self.job["kind"] != "trainer":
                self.on_optimizer(optimizer)

        module.Optimizer.__init__ = make_and_note
        module.register_optimizer_step_post_hook(self.after_step)

    def on_optimizer(self, optimizer: Any) -> None:
        """Find the model that a loop's optimizer trains, and put the techniques on it."""
        self.facts |= {"kind": "loop", "optimizer_call": call_of(optimizer)}
        model = any_training.model_of(optimizer)
        self.apply_techniques(model, self.job["on_trainer"])
        if model is not None:
            self.facts["model_name"] = variable_of(model, optimizer)
            self.trained = (model, optimizer)
            self.watch(model)

    def after_step(self, *_: Any) -> None:
        """Count a step of a loop; a Trainer's are counted by its callback."""
        if self.facts["kind"] == "loop":
            self.on_step(self.facts["steps"] + 1)

    # ---- a Trainer or a loop ----

    def refuse(self, ranks: str) -> None:
        """End a program that uses several processes or cards, which are not planned for."""
        self.facts["several"] = ranks
        self.end("several ranks")

    def refuse_several(self, module: Any) -> None:
        """Refuse to start several processes, where the program does it by itself."""
        module.start_processes = lambda *_, **__: self.refuse("torch.multiprocessing.spawn")

    def watch(self, model: Any) -> None:
        """Note the facts about the model and, if the techniques were written for its kind, the shapes of batches."""
        self.facts |= any_training.about(model)
        if "model" in self.facts:
            any_training.watch_batches(model, self.facts)


# ---- where in the program ----


def program_frame(product: Any) -> tuple[Frame, CallSite]:
    """Find the program's own frame that makes an object now, and note in a `CallSite` what lies between them.

    Returns:
        The innermost frame that is neither the object's constructor nor in a library, None if there is none; and
        whether a library makes the object (`indirect`), or transformers' parser of command lines (`parsed`).
    """
    frame: Frame = sys._getframe()
    between: CallSite = {"parsed": False, "indirect": False}
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = any(part in file for part in LIBRARIES) or file.startswith("<") or file == __file__
        is_constructor = _is_constructor(frame, product)
        if not is_library and not is_constructor:
            break
        between["parsed"] |= file.endswith(PARSER)
        between["indirect"] |= not is_constructor and file != __file__
        frame = frame.f_back
    return frame, between


def _is_constructor(frame: Frame, product: Any) -> bool:
    """Whether a frame is the object's constructor, or a function that a library has wrapped around it."""
    args = frame.f_locals.get("args")
    if isinstance(args, tuple) and args and args[0] is product:
        return True
    return frame.f_code.co_name in CONSTRUCTORS and frame.f_locals.get("self") is product


def call_of(product: Any) -> CallSite:
    """Return the place in the program of the call that makes an object now."""
    frame, place = program_frame(product)
    if frame is None:
        return {"file": "", "line": 0, **place}
    code = frame.f_code
    place |= {"file": os.path.abspath(code.co_filename), "line": frame.f_lineno, "name": type(product).__name__}
    if hasattr(code, "co_positions"):
        place["positions"] = list(list(code.co_positions())[frame.f_lasti // 2])
    return place


def variable_of(thing: Any, product: Any) -> str:
    """Return the name that the program has for a thing where it makes another object now; "" if it has none there."""
    frame, _ = program_frame(product)
    for names in (frame.f_locals, frame.f_globals) if frame is not None else ():
        for name, value in names.items():
            if value is thing:
                return str(name)
    return ""


# ---- the program ----


class OnlyThisPackage(importlib.abc.MetaPathFinder):
    """A finder of modules that finds the workbench, and nothing of what is installed beside it, which may be for
    another Python."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "workbench":
            return None
        file = os.path.join(self.folder, "__init__.py")
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=[self.folder])


def nobody_answers(*_: Any, **__: Any) -> str:
    """Stand in for getpass.getpass."""
    raise EOFError("nobody answers")


def run_program(job_file: str, program: list[str]) -> None:
    """Run a program by its job, and end the process with a report."""
    job: TrialJob = json.loads(Path(job_file).read_text(encoding="utf-8"))
    run = Run(job)
    os.environ.update(SILENT)
    os.environ.update(job["environment"])
    # Standard input is empty: a program that asks for a login, or for anything else, gets no answer.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    getpass.getpass = nobody_answers  # It would read from the terminal, not from standard input.
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
        changes.update({"torch.cuda": run.limit_memory, "torch.cuda.memory": run.keep_peaks})
    sys.meta_path.insert(0, imports.WatchImports(changes))
    is_module = program[0] == "-m"
    sys.argv = program[1:] if is_module else program
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        run.facts["exit"] = str(error.code)
        run.end("its own exit" if error.code else "its own end")
    except BaseException as error:
        run.end_if_out_of_memory(error)
        place = error.__traceback__
        # The traceback that is shown begins with the program's own line.
        while place is not None and place.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            place = place.tb_next
        traceback.print_exception(type(error), error, place)
        run.facts["message"] = f"{type(error).__name__}: {error}"
        run.end("an error")
    run.end("its own end")


if __name__ == "__main__":
    run_program(sys.argv[1], sys.argv[2:])
