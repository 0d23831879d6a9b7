"""The command line, `workbench COMMAND` or `python -m workbench COMMAND`: one function per command.

The options of each command, and the text of `--help`, are in `base/commands.toml`. Standard output is for results
alone. Everything else that is printed meanwhile goes to standard error.
"""

import argparse
import io
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import workbench
from workbench.base.categories import format_bytes
from workbench.base.command_line import Parser, build_parser, exit_code_of, print_visibly, split_off_program
from workbench.base.device import check_device, list_real_gpus, processor_name
from workbench.base.errors import DISTRIBUTION, ConfigurationError
from workbench.base.paths import check_writable, git_commit, runs_folder, versions
from workbench.export.settings import is_settings_file, read_settings_file
from workbench.gpus.catalogue import GPUS, device_name
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator.card import find_emulated_gpu
from workbench.models.source import locate, locate_config
from workbench.prediction.phases import Habits
from workbench.recipe import parse_recipe, recipe_options
from workbench.techniques import REGISTRY, technique
from workbench.texts import corpus
from workbench.texts.readers import split_name
from workbench.training.world import refuse_several_ranks

PLANNED_FOR = "h100"
NO_DATASET_NEEDED = (
    "For a prediction a dataset is only lengths: leave --corpus out, and give the length, as in --sequence-length 1024."
)
TRAINERS_SEED = "42"  # the default of TrainingArguments
# The columns of the table of records that `records` prints, and their titles.
COLUMNS = {
    "id": "id",
    "created_at": "begun",
    "status": "status",
    "label": "recipe",
    "model": "model",
    "seed": "seed",
    "peak_allocated_bytes": "peak",
    "held_out_loss": "loss",
    "tokens_per_s": "tokens/s",
}
FORMATS: dict[str, Callable[[Any], str]] = {
    "peak": format_bytes,
    "begun": "{:%d %b %H:%M}".format,
    "loss": "{:.4g}".format,
    "tokens/s": "{:,.0f}".format,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the command line. Returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # Windows consoles may not know an arrow
    typed = sys.argv[1:] if arguments is None else list(arguments)
    return exit_code_of(lambda: _run_command(typed), typed)


def _run_command(typed: list[str]) -> int:
    """Run the command that was typed, and return its exit code."""
    ours, program = split_off_program(typed)
    args, others = _parser().parse_known_args(ours)
    if others:
        args.parser.refuse(others[0])
    with suppress(ValueError):  # in another thread than the main one
        # it ends as by Ctrl-C: no temporary files stay
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    args.stdout = sys.stdout
    args.program_to_plan = program
    with redirect_stdout(sys.stderr):
        return int(args.function(args) or 0)


def _parser() -> Parser:
    names = {"gpus": ", ".join(GPUS), "techniques": ", ".join(REGISTRY)}
    return build_parser(COMMAND_FUNCTIONS, recipe_options(), names, show_versions)


def show_versions() -> None:
    """Print which workbench this is; then versions, the processor, the GPUs, whether the emulated GPU is set up, and
    where records are stored, as an issue should tell them: without the user's name. torch, which takes seconds to
    import, is not asked."""
    from workbench.gpus.emulator.place import is_set_up

    print_visibly(f"{DISTRIBUTION} {workbench.__version__}", sys.stdout)
    facts = {
        **versions(),
        "commit": git_commit() or "none",
        "system": platform.platform(),
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "gpus": "; ".join(list_real_gpus()) or "none that nvidia-smi lists",
        "emulator": "set up" if is_set_up() else "not set up",
        "records": runs_folder(),
    }
    lines = [f"{name:14}{value}" for name, value in facts.items()]
    print_visibly("\n".join(lines).replace(str(Path.home()), "~"), sys.stdout)


def _show(args: argparse.Namespace, result: Any) -> None:
    """Print a result as people read it, or with --json as one JSON object; a text as it is."""
    if args.json and not isinstance(result, str):
        result = json.dumps(result.to_dict())
    print_visibly(str(result), args.stdout)


def _parse_recipe(args: argparse.Namespace) -> "workbench.Recipe":
    """Return the recipe that the options name; nothing of it is looked up."""
    values = {}
    for name in recipe_options():
        if vars(args).get(name) is not None:
            values[name] = vars(args)[name]
    file = None
    if is_settings_file(values.get("model", "")):
        imported = read_settings_file(values.pop("model"))
        file = imported.recipe
        if imported.classes:
            print_visibly(str(imported), sys.stderr)
    return parse_recipe(values, args.technique, args.set, file)


def _find_recipe(args: argparse.Namespace, find: Callable[[str], Any] = locate_config) -> "workbench.Recipe":
    """Return the recipe that the options name, if its text and its model can be found.

    Args:
        find: `locate` if the weights are needed, `locate_config` if the config is enough.
    """
    recipe = _parse_recipe(args)
    # These two refuse before torch is imported, which takes seconds.
    try:
        corpus.load_corpus(recipe.corpus)
    except ConfigurationError as error:
        if args.function not in (predict_recipe, show_plan):
            raise
        raise ConfigurationError(f"{error} {NO_DATASET_NEEDED}") from None
    if recipe.model != "auto":
        find(recipe.model)
    return recipe


# ---- commands ----


def run_recipe(args: argparse.Namespace) -> int:
    """Fine-tune one recipe. Without --technique it is the baseline that others are compared with."""
    # The gate asks all this too, but not before torch is imported and a model fetched.
    refuse_several_ranks()
    if find_emulated_gpu(args.device or "") is None:
        check_device(args.device)
    if not args.reuse:
        check_writable(runs_folder())
    recipe = _find_recipe(args, locate)
    run: Callable[..., Any] = workbench.run
    if args.ranks or args.shard:
        run = partial(workbench.run_on_ranks, ranks=args.ranks, shard=args.shard or "none")
    record = run(
        recipe,
        device=args.device,
        reuse=args.reuse,
        save=args.save,
        sample_tokens=args.sample_tokens,
        checkpoint_every=args.checkpoint_every,
        resume=args.resume,
        memory_cap=args.memory_cap,
        longest_first=args.longest_first,
    )
    _show(args, record)
    from workbench.journal.record import Status

    save_failed = bool(args.save) and not record.model_path
    return int(record.status is not Status.OK or save_failed)


def predict_recipe(args: argparse.Namespace) -> None:
    """Predict the peak of a recipe's training step on a GPU. Needs neither the GPU nor weights: gpt2 … gpt2-xl
    are known by their configs, a folder or a hub model by its config.json.
    """

    if args.life:
        return _show_life(args)
    if args.settings:
        raise ConfigurationError("predict: --settings belong to --life. Add it, or leave them out.")
    from workbench.prediction.predict import CPU, GPU_NAMES, SHADOW, Prediction, predict_all, warm_predictions
    from workbench.prediction.prediction import list_fitting

    gpu = device_name(args.gpu)
    warm_predictions(gpu)  # a child process imports the libraries meanwhile
    recipe = _find_recipe(args)
    world = {"padding": args.padding, "ranks": args.ranks, "shard": args.shard}
    prediction = workbench.predict(recipe, gpu, engine=args.engine, **world)
    _show(args, prediction)
    if not args.json and gpu != CPU:
        # All cards are predicted by the shadow, in one process; the emulator would need one each.
        others = predict_all(recipe, engine=SHADOW, **world)
        if any(isinstance(other, Prediction) for other in others):  # the shadow offloads no shards
            answers = dict(zip(GPU_NAMES, others, strict=True))
            answers[prediction.gpu] = prediction
            _show(args, f"\n{list_fitting(answers)}")
    return None


def _show_life(args: argparse.Namespace) -> None:
    """Print the predicted memory of every phase of a run, and what to change in an evaluation that does not fit."""
    if args.padding or args.engine or args.ranks:
        raise ConfigurationError(
            "predict: --life has one engine and one process, and pads as the recipe does. "
            "Drop --padding, --engine, --ranks."
        )
    from workbench.prediction.life import predict_life

    _show(args, predict_life(_find_recipe(args), args.gpu, Habits.parse(args.settings)))


def show_plan(args: argparse.Namespace) -> int:
    """Find by predictions the smallest sets of techniques with which a recipe fits into a budget: exact ones first,
    then those that take less time. Techniques that you switch on here stay on in all of them.

    A program behind `--`, a script of your own with a Trainer or a loop, is run on an emulated GPU, or with `--here` on
    that of this machine. If it does not fit, the smallest sets of changes with which it does are searched,
    run again, and said in its own words.
    """
    if args.program_to_plan:
        return _show_fit(args)
    if args.apply or args.here or args.timeout is not None or args.trial_steps:
        raise ConfigurationError(
            "plan: --apply, --here, --timeout and --trial-steps belong to a program. "
            "Write it behind --, or leave them out."
        )
    recipe = _find_recipe(args)
    options = dict(vars(recipe))
    if args.life:
        from workbench.prediction.life import predict_with_life

        options["predict"] = partial(predict_with_life, habits=Habits.parse(args.settings))
    if args.most_changes:
        options["most_changes"] = args.most_changes
    planned = workbench.plan(budget=args.budget, gpu=args.gpu or PLANNED_FOR, **options)
    _show(args, planned)
    return int(not planned.candidates)


def _show_fit(args: argparse.Namespace) -> int:
    """Print what to change in a program of the user's own, so that it fits."""
    for name in ("most_changes", *recipe_options(), "technique", "set", "settings"):
        if getattr(args, name) != args.parser.get_default(name):
            raise ConfigurationError(
                f"plan: {name.replace('_', '-')} belongs to a recipe, and behind -- stands a "
                "program, which has its own. Leave one of the two out."
            )
    if args.here and args.gpu:
        raise ConfigurationError("plan: --here is the card of this machine, and --gpu another. Leave one of them out.")
    from workbench.fit.search import STEPS, TIME_LIMIT_S, fit

    planned = fit(
        args.program_to_plan,
        args.gpu or PLANNED_FOR,
        here=args.here,
        budget=args.budget,
        steps=args.trial_steps or STEPS,
        life=args.life,
        time_limit_s=TIME_LIMIT_S if args.timeout is None else args.timeout,
        write=args.apply,
    )
    _show(args, planned)
    return 0 if planned.fits or planned.candidates else 1


def show_text(args: argparse.Namespace) -> None:
    """Show what a model will see of a text, before anything is trained: the first examples, with the tokens that count
    marked; how long they are, and what is cut at the chosen length; what is left out or does not count.
    """
    preview = workbench.show(args.corpus, args.model, sequence_length=args.sequence_length, examples=args.examples)
    _show(args, preview)


def scan_rows(args: argparse.Namespace) -> None:
    """Find which row of a file will be the longest, in which step it comes under the order that the Trainer's own
    sampler gives, whether its batch fits on a GPU, and which cap or packing makes it fit.
    """
    if args.seed is None and not is_settings_file(args.model):
        args.seed = TRAINERS_SEED
    recipe = _parse_recipe(args)
    from workbench.advise.scan import scan

    _show(args, scan(recipe, args.gpu, longest=args.longest))


def show_diagnosis(args: argparse.Namespace) -> None:
    """Say why a run ran out of memory: phase, operation, the largest category. Then the single changes that are
    predicted to fit, each with its command, and what to look at if it should have fitted. For a program of your
    own, give what it printed, its notebook or a memory snapshot: it names the causes that these allow.
    """

    if args.record and (args.record == "-" or os.path.isfile(args.record)):
        from workbench.advise.crash import read_crash

        return _show(args, read_crash(args.record))
    from workbench.advise.doctor import newest_out_of_memory

    return _show(args, workbench.diagnose(newest_out_of_memory(args.record)))


def check_budgets(args: argparse.Namespace) -> int:
    """Test memory: fail when the predicted peak of a recipe, or that of a program on an emulated GPU, is over its
    limit in budget.toml, and say by category and operation what has moved since it was stored beside that file.
    """

    from workbench.advise.budget import judge, read_budgets

    verdicts = judge(read_budgets(args.file), args.file.with_suffix(".lock.json"), args.update)
    text = "\n".join(map(str, verdicts))
    if args.json:
        text = json.dumps([verdict.to_dict() for verdict in verdicts])
    _show(args, text)
    return int(any(verdict.over for verdict in verdicts))


def write_script(args: argparse.Namespace) -> None:
    """Write the recipe as a Python script that needs no workbench; redirect it into a file. With --ranks it shares the
    batch, and --save writes accelerate's configuration beside it: DDP, DeepSpeed, or FSDP2, which needs GPUs. On a CPU
    accelerate takes FSDP2 for DDP without a word; `run --shard` cuts there too.
    """

    if args.ranks and not args.save:
        raise ConfigurationError("script: accelerate's configuration stands beside it. Add --save FOLDER.")
    if args.shard and not args.ranks:
        raise ConfigurationError("shard: among how many ranks? Add --ranks 2.")
    recipe = _find_recipe(args)
    if not args.save:
        return _show(args, workbench.script(recipe, args.flavour).rstrip())
    from workbench.export.several import save_script

    return _show(args, save_script(recipe, args.save, args.flavour, args.ranks, args.shard or "none"))


def emulate_program(args: argparse.Namespace) -> int:
    """Run a PyTorch program, unchanged, on an emulated GPU: PyTorch's own CUDA allocator and choice of kernels
    on libraries that keep the books of memory and compute nothing. It says the exact peak, who holds it, and
    where it fits; out of memory comes as on the card. Values are not computed. The program's exit status is
    kept.
    """
    from workbench.gpus.emulator.command import emulate_as_asked

    answer, exit_status = emulate_as_asked(args)
    _show(args, answer)
    return exit_status


def show_snapshot(args: argparse.Namespace) -> None:
    """Read a memory snapshot that PyTorch has written, on a real card or an emulated one: who held the peak, by line
    and by kind, and what is reserved beside what is in use. Of two files it says what differs. A file is read, not
    executed.
    """
    from workbench.gpus.snapshot import SnapshotDifference, read_snapshot

    snapshot = read_snapshot(args.file)
    if args.other:
        return _show(args, SnapshotDifference(snapshot, read_snapshot(args.other)))
    return _show(args, snapshot)


def run_notebooks(args: argparse.Namespace) -> None:
    """Execute the notebooks with papermill into build/notebooks. Those up to date are skipped."""

    from workbench.lessons.notebooks import build

    refuse_several_ranks()
    parameters: dict[str, Any] = {}
    for name, text in args.parameter:
        if name in parameters:
            raise ConfigurationError(f"notebooks: {name} is given twice. Keep one of the two values.")
        parameters[name] = _read_value(text)
    executed = build(args.names, parameters, args.force, at_once=args.at_once)
    folder = executed[0].parent
    _show(args, f"executed: {folder} (to read them in JupyterLab; in a checkout `make site` makes pages of them)")


def absolute(name: str) -> str:
    """Return the name of a file or folder so that it holds from any working directory. What names no file, nor a folder
    written as a path, is returned unchanged."""
    location, options = split_name(name)
    path = Path(os.path.expanduser(location))
    if os.path.isfile(path) or (os.path.isdir(path) and {os.sep, "/"} & set(location)):
        return f"{path.resolve()}{options}"
    return name


def _read_value(text: str) -> Any:
    """Read a parameter's value: JSON, or a text as it is. The notebooks run in a folder of their own, so the path of a
    file becomes absolute."""
    path = absolute(text)
    if path != text:
        return path
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def take_lessons(args: argparse.Namespace) -> None:
    """Copy the notebooks into a folder of yours. A notebook there that differs is not overwritten."""

    from workbench.lessons.copies import copy_lessons

    count = copy_lessons(_make_folder(args.folder), force=args.force)
    command = f"jupyter lab {shlex.quote(str(args.folder))}"
    _show(args, f"{count} notebooks copied to {args.folder}. Open them with: {command}")
    if find_spec("jupyterlab") is None:
        _show(args, f'JupyterLab is not installed yet: pip install "{DISTRIBUTION}[lessons]"')


def list_techniques(args: argparse.Namespace) -> None:
    """List techniques, or with --gpus the GPUs that the workbench knows without having one."""
    if args.gpus:
        for name in args.names or GPUS:
            _show(args, find_gpu(name).describe())
        return
    for name in sorted(args.names or REGISTRY):
        _show(args, technique(name).card())


def show_records(args: argparse.Namespace) -> None:
    from workbench.advise.frame import to_frame
    from workbench.journal.record import read_all
    from workbench.journal.store import mark_killed

    mark_killed()
    if args.export:
        return _export(workbench.records(), args)
    shown = to_frame(read_all(newest=args.last))[list(COLUMNS)].rename(columns=COLUMNS)
    if shown.empty:
        return _show(args, "No runs yet: workbench run gpt2-tiny")
    return _show(args, shown.to_string(index=False, na_rep="", formatters=FORMATS))


def _export(frame: Any, args: argparse.Namespace) -> None:
    from workbench.advise.frame import to_csv

    _make_folder(args.export.parent)
    if args.export.suffix == ".parquet":
        frame.to_parquet(args.export, index=False)
    elif args.export.suffix == ".csv":
        to_csv(frame, args.export)
    else:
        raise ConfigurationError(f"records: {str(args.export)!r} must end in .parquet or .csv.")
    _show(args, f"{len(frame)} runs written to {args.export}")


def _make_folder(path: Path) -> Path:
    """Make a folder, if there is none yet, and return its path. Raises ConfigurationError: it cannot be one."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{path}: it cannot be a folder ({error.strerror}). Name another one.") from None
    return path


def show_comparison(args: argparse.Namespace) -> None:
    from workbench.advise.compare import compare, comparison_text, list_unranked
    from workbench.advise.frame import to_csv
    from workbench.journal.store import mark_killed

    mark_killed()
    frame = workbench.records()
    table = compare(frame)
    _show(args, comparison_text(table, list_unranked(frame)))
    if args.save:
        folder = _make_folder(args.save)
        to_csv(table.assign(**table.attrs), folder / "comparison.csv", index=True)
        workbench.plots.memory_bars(table).savefig(folder / "memory.png", dpi=130)
        _show(args, f"\ncomparison.csv and memory.png written to {folder}")


COMMAND_FUNCTIONS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "run": run_recipe,
    "predict": predict_recipe,
    "plan": show_plan,
    "text": show_text,
    "scan": scan_rows,
    "doctor": show_diagnosis,
    "check": check_budgets,
    "script": write_script,
    "emulate": emulate_program,
    "snapshot": show_snapshot,
    "notebooks": run_notebooks,
    "lessons": take_lessons,
    "list": list_techniques,
    "records": show_records,
    "compare": show_comparison,
}


if __name__ == "__main__":
    sys.exit(main())
