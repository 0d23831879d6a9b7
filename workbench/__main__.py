"""Fine-tune GPT-2 with memory-saving techniques and see what each one really saves.

examples:
  python -m workbench run gpt2-tiny
  python -m workbench run gpt2-tiny --technique lora=rank:8,alpha:16 --technique gradient_checkpointing
  python -m workbench run gpt2 --corpus my.txt --batch-size 4 --sequence-length 512 --steps 200 --save merged
  python -m workbench run random:gpt2 --batch-size 2 --sequence-length 256 --steps 5   (124 M, no download)
  python -m workbench run recipe.toml --set technique.lora.rank=16 --set arguments.weight_decay=0.1
  python -m workbench predict gpt2-xl --batch-size 8 --sequence-length 1024 --technique gradient_checkpointing
  python -m workbench plan gpt2 --budget 8GiB --batch-size 8 --sequence-length 1024
  python -m workbench doctor
  python -m workbench compare

exit codes:
  0  done
  1  the run failed, diverged, a notebook's cell raised, a file or the output could not be written, no plan fits, or a
     memory budget is exceeded
  2  something in the command cannot be used; nothing was run
  3  this machine cannot run it (device, package, network)
  4  out of memory
  130  interrupted
"""

# The command line is `workbench COMMAND` or `python -m workbench COMMAND`, one thin function per command.

import argparse
import dataclasses
import inspect
import io
import json
import os
import platform
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from workbench import __version__
from workbench.errors import DISTRIBUTION, ConfigurationError, WorkbenchError, needed_extra, visible
from workbench.export.written import FILE, parse_recipe, recipe_options
from workbench.gpus.catalogue import GPUS
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator.card import emulated_card
from workbench.imports import imported
from workbench.measure.categories import format_bytes, parse_bytes
from workbench.models.source import locate, locate_config
from workbench.paths import beside, check_writable, runs_folder
from workbench.predict.phases import Habits
from workbench.ranks import launched
from workbench.ranks.report import ranks_text
from workbench.recipe import Recipe
from workbench.settings import described, unknown
from workbench.techniques import REGISTRY, technique
from workbench.texts import corpus
from workbench.texts.readers import split_name

MODULE = "python -m workbench"
TRAINERS_SEED = "42"  # the default of TrainingArguments
COLUMNS = {  # of a table of records, with their titles
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
START_OF_A_BAR = re.compile(r"(?:\r|\x1b\[A)*")  # a progress bar returns to the start of its line, or to one above


class _Shown:
    """A stream of the terminal: nothing written to it colours, moves or reverses what is shown, but for progress bars,
    which begin with a return to the start of the line. Once nobody reads it, as after `| head -1`, it goes nowhere."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        match = START_OF_A_BAR.match(text)
        start = match.group() if match else ""
        self._attempt(self._stream.write, start + visible(text.removeprefix(start)))

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, function: Callable[..., Any], *arguments: str) -> None:
        try:
            function(*arguments)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # or Python complains at its end
            if not isinstance(error, BrokenPipeError):
                raise


def main(arguments: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # Windows consoles may not know an arrow
    out: Any = sys.stdout and _Shown(sys.stdout)  # None where it is closed
    err: Any = sys.stderr and _Shown(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            return _command(arguments)
        finally:
            print(end="", flush=True)


def _command(arguments: Sequence[str] | None) -> int:
    try:
        args, others = _parser().parse_known_args(arguments)
        if others:
            args.parser.refuse(others[0])
        with suppress(ValueError):  # in another thread than the main one
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: no temporary files stay
        code = int(args.function(args) or 0)
        print(end="", flush=True)  # what goes wrong here has a code, too
        return code
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        unavailable = needed_extra(error)
        if unavailable is None:
            raise
        print(f"error: {unavailable}", file=sys.stderr)
        return unavailable.exit_code
    except OSError as error:
        place = error.filename or "a file or the output"
        print(f"error: {place}: {error.strerror or error}. Make room, or name another place.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


# commands of version 0.3, and what does the same
RETIRED = {
    "frontier": "Use plan --frontier, with the same options.",
    "env": "Use --version.",
    "try": "Call workbench.side_by_side(recipe, recipe | technique) from Python.",
    "headline": "In a checkout, run tools/headline.py.",
    "pairs": "In a checkout, run tools/pairs.py.",
    "verify": "In a checkout, run tools/verify.py.",
}


class _Parser(argparse.ArgumentParser):
    """Its errors name the nearest that is known."""

    def error(self, message: str) -> NoReturn:
        match = re.search(r"(.*): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if match and match[2] in RETIRED:
            raise ConfigurationError(f"{match[2]} is no command since version 0.4. {RETIRED[match[2]]}")
        if match:
            raise unknown(f"{self.prog}: {match[1]} takes no", match[2], re.findall(r"[\w-]+", match[3]))
        super().error(message)

    def refuse(self, argument: str) -> NoReturn:
        """What it does not know. Raises ConfigurationError."""
        name = argument.partition("=")[0]
        options = [option for option in self._option_string_actions if option.startswith("--")]
        message = str(unknown(f"{self.prog} takes no", name, options))
        if "--set" in options and name.startswith("--") and "Did you mean" not in message:
            message += f" A field of TrainingArguments is --set arguments.{name.strip('-').replace('-', '_')}=VALUE."
        raise ConfigurationError(message)


class _Version(argparse.Action):
    """`--version`: which workbench this is, and what an issue should tell beside that."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"{DISTRIBUTION} {__version__}", flush=True)  # at once: the device is torch's to tell, after seconds
        print(_environment())
        parser.exit()


def _environment() -> str:
    """Versions, the device, whether the emulator is set up, and where records lie; not the user's name."""
    from workbench.gpus.emulator.place import is_set_up
    from workbench.measure.device import Device
    from workbench.paths import git_commit, versions

    facts = {
        **versions(),
        "commit": git_commit() or "none",
        "system": platform.platform(),
        "device": Device.find(),
        "emulator": "set up" if is_set_up() else "not set up",
        "records": runs_folder(),
    }
    lines = [f"{name:14}{value}" for name, value in facts.items()]
    return "\n".join(lines).replace(str(Path.home()), "~")


def _at_least(least: int, kind: type = int) -> Callable[[str], Any]:
    """A number of at least this, from a text."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if kind(text) >= least:
                return kind(text)
        raise argparse.ArgumentTypeError(f"{text!r:.90} is not a number of at least {least}.")

    return read


TYPES: dict[str, Callable[[str], Any]] = {
    "count": _at_least(1),
    "number": _at_least(0),
    "seconds": _at_least(0, float),
    "path": Path,
}
COMMANDS = beside(__file__, "commands.toml")
RECIPE = COMMANDS.pop("recipe")  # what commands take with a recipe, beside its own settings


def _parser() -> _Parser:
    functions: dict[str, Callable[[argparse.Namespace], int | None]] = {
        "run": run_recipe,
        "predict": predict_recipe,
        "plan": show_plan,
        "scan": scan_rows,
        "doctor": show_diagnosis,
        "check": check_budgets,
        "script": write_script,
        "emulate": emulate_program,
        "sweep": sweep_recipes,
        "notebooks": run_notebooks,
        "lessons": take_lessons,
        "list": list_techniques,
        "records": show_records,
        "compare": show_comparison,
    }
    program = "workbench" if Path(sys.argv[0]).stem == "workbench" else MODULE
    title, examples, exit_codes = str(__doc__).replace(MODULE, program).split("\n\n")
    parser = _Parser(
        prog=program,
        description=title,
        epilog=f"{examples}\n\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    help_text = "show versions, the device and where records lie, as an issue should tell them, and exit"
    parser.add_argument("--version", action=_Version, nargs=0, help=help_text)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, row in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=row["help"],
            usage=row.get("usage"),
            description=inspect.getdoc(functions[name]),
            epilog=f"example: {program} {row['example']}",
        )
        command.set_defaults(function=functions[name], parser=command)
        if "recipe" in row:
            _add_recipe(command)
        for option, fields in row.get("takes", {}).items():
            _add(command, option, **fields)
    return parser


def _add(parser: argparse.ArgumentParser, option: str, short: str = "", **fields: Any) -> None:
    fields = {**fields, "help": fields["help"].format(gpus=", ".join(GPUS), techniques=", ".join(REGISTRY))}
    if "type" in fields:
        fields["type"] = TYPES[fields["type"]]
    if isinstance(fields.get("metavar"), list):
        fields["metavar"] = tuple(fields["metavar"])
    parser.add_argument(*filter(None, (short, option)), **fields)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    for name, (option, help_text) in recipe_options().items():
        if name == "model":
            parser.add_argument("model", nargs="?", default="auto", help=f"{help_text}; or a recipe file, RECIPE.toml")
        else:
            both = dict.fromkeys((option, f"--{name.replace('_', '-')}"))  # a field's own name is taken, too
            parser.add_argument(*both, dest=name, metavar="X", help=help_text)
    for option, fields in RECIPE["takes"].items():
        _add(parser, option, **fields)


def _recipe(args: argparse.Namespace, *, config_only: bool = False) -> Recipe:
    values = {name: getattr(args, name) for name in recipe_options() if getattr(args, name) is not None}
    recipe = parse_recipe(values, args.technique, args.set)
    corpus.load_corpus(recipe.corpus)  # these two say what is wrong before torch is imported, which takes seconds
    if recipe.model != "auto":
        (locate_config if config_only else locate)(recipe.model)
    if not config_only:
        imported()
    return recipe


def _print(result: Any, as_json: bool) -> None:
    """A result as people read it, or as one JSON object."""
    print(json.dumps(result.to_dict()) if as_json else result)


def run_recipe(args: argparse.Namespace) -> int:
    """Fine-tune one recipe. Without --technique it is the baseline that others are compared with."""

    from workbench.measure.device import check_device
    from workbench.run.world import refuse_several_ranks

    several = launched() or args.ranks is not None or args.shard is not None
    if not several:
        refuse_several_ranks()
    if emulated_card(args.device or "") is None:
        check_device(args.device)
    if not args.reuse:
        check_writable(runs_folder())
    memory_cap = parse_bytes(args.memory_cap, "memory_cap") if args.memory_cap is not None else None
    recipe = _recipe(args)
    from workbench.records.record import Status
    from workbench.run.run import run

    options: dict[str, Any] = {
        "device": args.device,
        "reuse": args.reuse,
        "save": args.save,
        "sample_tokens": args.sample_tokens,
        "checkpoint_every": args.checkpoint_every,
        "resume": args.resume,
        "memory_cap": memory_cap,
        "longest_first": args.longest_first,
    }
    with redirect_stdout(sys.stderr):  # standard output is for the result alone
        if several:
            from workbench.ranks.launch import on_ranks

            record = on_ranks(recipe, ranks=args.ranks, shard=args.shard or "none", **options)
        else:
            record = run(recipe, **options)
    if record.rank:
        return 0  # the first rank tells
    print(json.dumps(json.loads(record.to_json())) if args.json else _summary(record))
    return 0 if record.status is Status.OK and bool(record.model_path) == bool(args.save) else 1


def _summary(record: Any) -> str:
    sizes = {name.replace("_", " "): size for name, size in record.by_category.items() if size}
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    phase = record.peak_phase.replace("_", " ")
    speed = "not timed"
    if record.timed_steps:
        speed = f"{record.tokens_per_s:,.0f} tokens/s over {record.timed_steps} steps"
    lines = [
        f"{record.label} on {record.model}, {record.device}: {record.status} {record.error}".rstrip(),
        f"  peak    {format_bytes(record.peak_allocated_bytes)} in the {phase} ({record.memory_source}): {parts}",
        f"  loss    {_from_to(record.losses[:1], record.losses[-1:])} in training; held out "
        f"{_from_to([record.held_out_loss_before], [record.held_out_loss])}",
    ]
    if record.ranks:
        lines.append(f"  ranks   {ranks_text(record)}")
    lines += [
        f"  speed   {speed}; {record.trainable_parameters:,} of {record.parameters:,} parameters trained",
        f"  record  {record.path()}",
    ]
    if record.model_path:
        lines.append(f"  model   {record.model_path}")
    lines += [f"  warning {warning}" for warning in record.warnings]
    if record.text_after:
        lines += [f"\nbefore: {record.text_before}", f"\nafter:  {record.text_after}"]
    return "\n".join(lines)


def _from_to(first: list[float | None], last: list[float | None]) -> str:
    return " → ".join("none" if not value or value[0] is None else f"{value[0]:.3f}" for value in (first, last))


def predict_recipe(args: argparse.Namespace) -> None:
    """Predict the peak of a recipe's training step on a GPU. Needs neither the GPU nor weights: gpt2 … gpt2-xl
    are known by their configs, a folder or a hub model by its config.json.
    """

    if args.life:
        return _show_life(args)
    if args.settings or args.measure or args.save:
        raise ConfigurationError(
            "predict: --settings, --measure and --save belong to --life. Add it, or leave them out."
        )
    from workbench.predict.predict import CPU, GPU_NAMES, SHADOW, Prediction, predict, predict_all
    from workbench.predict.report import fitting
    from workbench.predict.worker import SHADOWS, warm_predictions

    table = not args.json and args.gpu != CPU
    warm_predictions(args.gpu)  # meanwhile
    with redirect_stdout(sys.stderr):  # standard output is for the result alone
        recipe = _recipe(args, config_only=True)
        world = {"padding": args.padding, "ranks": args.ranks, "shard": args.shard}
        if table:  # of all cards, meanwhile, by the shadow: one process, where the emulator needs 21
            others = ThreadPoolExecutor(1).submit(predict_all, recipe, engine=SHADOW, **world)
        try:
            prediction = predict(recipe, args.gpu, engine=args.engine, **world)
        except WorkbenchError:
            SHADOWS.end()  # nobody will look at the table
            raise
    _print(prediction, args.json)
    if table and any(isinstance(other, Prediction) for other in others.result()):  # the shadow offloads no shards
        print()
        print(fitting(dict(zip(GPU_NAMES, others.result(), strict=True)) | {prediction.gpu: prediction}))
    return None


def _show_life(args: argparse.Namespace) -> None:
    """Every phase of a run: predicted, and measured on a device of this machine where that is asked for."""
    if args.padding or args.engine or args.ranks:
        raise ConfigurationError(
            "predict: --life has one engine and one process, and pads as the recipe does. Drop --padding, --engine, "
            "--ranks."
        )
    from workbench.advise.doctor import cures_text, evaluation_cures
    from workbench.predict.life import predict_life
    from workbench.predict.phases import life_table, life_text

    habits = Habits.parse(args.settings)
    lives = {}
    cures = {}
    with redirect_stdout(sys.stderr):
        recipe = _recipe(args, config_only=not args.measure)
        try:
            lives["predicted"] = predict_life(recipe, args.gpu, habits)
            cures = evaluation_cures(args.gpu, lives["predicted"])
        except WorkbenchError as error:
            if not args.measure:
                raise
            print(f"not predicted: {error}")
        if args.measure:
            from workbench.predict.walk import measure_life

            lives["measured"] = measure_life(recipe, args.measure, habits)
    if args.json:
        by_name = {name: life.to_dict() for name, life in lives.items()}
        print(json.dumps({**by_name, "cures": {change: life.to_dict() for change, life in cures.items()}}))
    else:
        print(life_text(*lives.values()) + cures_text(cures))
    if args.save:
        from workbench.lessons.plots import life_bars

        life_table(*lives.values()).to_csv(_folder(args.save) / "life.csv")
        life_bars(*lives.values()).savefig(args.save / "life.png", dpi=130)


def show_plan(args: argparse.Namespace) -> int:
    """The smallest sets of techniques with which a recipe fits into a budget, found by predictions: exact ones
    first, then those that take less time. Techniques that you switch on here stay on in all of them. With --frontier:
    which batches and lengths fit on a GPU, the recipe as it is and with the planner's best change.
    """
    if args.frontier:
        return _show_frontier(args)
    if args.engine or args.output:
        raise ConfigurationError("plan: --engine and --output belong to --frontier. Add it, or leave them out.")
    budget = parse_bytes(args.budget, "budget") if args.budget is not None else None
    recipe = _recipe(args, config_only=True)
    from workbench.advise.plan import plan
    from workbench.predict.life import predict_with_life

    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe)}
    if args.life:
        fields["predict"] = partial(predict_with_life, habits=Habits.parse(args.settings))
    if args.most_changes:
        fields["most_changes"] = args.most_changes
    with redirect_stdout(sys.stderr):
        planned = plan(budget=budget, gpu=args.gpu, **fields)
    _print(planned, args.json)
    return 0 if planned.candidates else 1


def _show_frontier(args: argparse.Namespace) -> int:
    """Which batches and lengths fit on a GPU: the recipe as it is, and with the planner's best change."""
    if args.budget or args.most_changes or args.life or args.settings:
        raise ConfigurationError(
            "plan: --frontier is about a step within all that a GPU has. Drop --budget, --most-changes, --life, "
            "--settings."
        )
    recipe = _recipe(args, config_only=True)
    from workbench.advise.frontier import PICTURES, frontier, save_picture

    if args.output and args.output.suffix not in PICTURES:
        raise ConfigurationError(f"plan: --output {str(args.output)!r} must end in {', '.join(PICTURES)}.")
    with redirect_stdout(sys.stderr):
        cells = frontier(recipe, args.gpu, engine=args.engine)
    _print(cells, args.json)
    if args.output:
        save_picture(cells, args.output)
    return 0


def scan_rows(args: argparse.Namespace) -> None:
    """Which row of a file will be the longest, in which step it comes under the order that the Trainer's own
    sampler gives, whether its batch fits on a GPU, and which cap or packing makes it fit.
    """
    seed = args.seed or (None if args.model.endswith(FILE) else TRAINERS_SEED)
    values = {"model": args.model, "corpus": args.rows, "effective_batch_size": args.batch_size, "seed": seed}
    recipe = parse_recipe({name: text for name, text in values.items() if text is not None}, args.technique, args.set)
    from workbench.advise.scan import scan

    with redirect_stdout(sys.stderr):
        scanned = scan(recipe, args.gpu, longest=args.longest, engine=args.engine)
    _print(scanned, args.json)


def show_diagnosis(args: argparse.Namespace) -> None:
    """Why a run ran out of memory: phase, operation, the largest category. Then the single changes that are
    predicted to fit, each with its command, and what to look at if it should have fitted.
    """

    from workbench.advise.doctor import diagnose, newest_out_of_memory

    record = newest_out_of_memory(args.record)
    with redirect_stdout(sys.stderr):
        diagnosis = diagnose(record)
    _print(diagnosis, args.json)


def check_budgets(args: argparse.Namespace) -> int:
    """Memory as a test: fail when the predicted peak of a recipe, or that of a program on an emulated GPU, is over its
    limit in budget.toml, and say by category and operation what has moved since it was stored beside that file.
    """

    from workbench.advise.budget import judge, read_budgets

    with redirect_stdout(sys.stderr):
        verdicts = judge(read_budgets(args.file), args.file.with_suffix(".lock.json"), args.update)
    if args.json:
        print(json.dumps([verdict.to_dict() for verdict in verdicts]))
    else:
        print("\n".join(map(str, verdicts)))
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
    with redirect_stdout(sys.stderr):
        recipe = _recipe(args)

        from workbench.export.script import script
        from workbench.export.several import save_script
        from workbench.ranks.shards import Ranks

        ranks = Ranks(args.ranks, args.shard or "none") if args.ranks else None
        text = save_script(recipe, args.save, args.flavour, ranks) if args.save else script(recipe, args.flavour)
    print(text, end="\n" if args.save else "")


def emulate_program(args: argparse.Namespace) -> int:
    """Run a PyTorch program, unchanged, on an emulated GPU: PyTorch's own CUDA allocator and choice of kernels
    on libraries that keep the books of memory and compute nothing. It says the exact peak, who holds it, and
    where it fits; out of memory comes as on the card. Values are not computed. The program's exit status is
    kept.
    """

    from workbench.gpus.emulator.card import with_memory
    from workbench.gpus.emulator.launch import emulate
    from workbench.gpus.emulator.place import set_up
    from workbench.gpus.emulator.report import banner, emulation_json, emulation_text

    if args.set_up:
        print(f"The emulated GPU is set up: {set_up()}")
        return 0
    gpu = find_gpu(args.gpu)
    gpu = with_memory(gpu, parse_bytes(args.memory, "memory")) if args.memory is not None else gpu
    print(banner(gpu), file=sys.stderr, flush=True)
    emulation = emulate(
        args.program[args.program[:1] == ["--"] :],
        gpu,
        ranks=args.ranks,
        padding=args.padding,
        timeout_s=args.timeout or None,
        history=not args.no_history,
        snapshot=args.snapshot,
        output=sys.stderr if args.json else None,
    )
    print(json.dumps(emulation_json(emulation)) if args.json else emulation_text(emulation))
    return emulation.exit_status


def sweep_recipes(args: argparse.Namespace) -> int:
    """Every recipe of a grid with every seed, as tasks on Ray: on this machine, or on a cluster whose nodes share the
    records' folder. What is on record is not made again.
    """
    from workbench.advise.sweep import read_grid, sweep, sweep_text

    with redirect_stdout(sys.stderr):
        recipes = [
            dataclasses.replace(recipe, corpus=absolute(recipe.corpus), model=absolute(recipe.model))
            for recipe in read_grid(args.grid)
        ]
        outcomes = sweep(recipes, on=args.on, device=args.device, threads=args.threads)
    print(sweep_text(outcomes))
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def run_notebooks(args: argparse.Namespace) -> None:
    """Execute the notebooks with papermill into build/notebooks. Those up to date are skipped."""

    from workbench.lessons.notebooks import build

    parameters: dict[str, Any] = {}
    for name, text in args.parameter:
        if name in parameters:
            raise ConfigurationError(f"notebooks: {name} is given twice. Keep one of the two values.")
        parameters[name] = _value(text)
    executed = build(args.names, parameters, args.force, timeout_s=args.timeout)
    print(f"executed: {executed[0].parent} (to read them in JupyterLab; in a checkout `make site` makes pages of them)")


def absolute(name: str) -> str:
    """The same name from any working directory; unchanged where it names no file, nor a folder written as a path."""
    location, options = split_name(name)
    path = Path(os.path.expanduser(location))
    if os.path.isfile(path) or (os.path.isdir(path) and {os.sep, "/"} & set(location)):
        return f"{path.resolve()}{options}"
    return name


def _value(text: str) -> Any:
    """JSON or text. A file is named from where the caller stands; the notebooks run in a folder of their own."""
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

    copies = copy_lessons(args.folder, force=args.force)
    print(
        f"{len(copies)} notebooks copied to {args.folder}. Open them with: jupyter lab {shlex.quote(str(args.folder))}"
    )
    if find_spec("jupyterlab") is None:
        print(f'JupyterLab is not installed yet: pip install "{DISTRIBUTION}[lessons]"')


def list_techniques(args: argparse.Namespace) -> None:
    chosen = {name: type(technique(name)) for name in args.names} or REGISTRY
    for name, cls in sorted(chosen.items()):
        print(f"{name}: {cls.title}")
        print(f"  attacks    {', '.join(category.replace('_', ' ') for category in cls.attacks)}")
        print(f"  costs      {cls.costs}\n  same loss  {cls.numerics}")
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            print(f"  {name}={field.name}:{field.default}  {field.metadata['help']} ({described(field)})")


def show_records(args: argparse.Namespace) -> None:
    from workbench.advise.frame import records
    from workbench.records.store import mark_killed

    mark_killed()
    if args.export:
        _export(records(), args.export)
        return
    shown = records()[list(COLUMNS)].tail(args.last).rename(columns=COLUMNS)
    formats = {
        "peak": format_bytes,
        "begun": "{:%d %b %H:%M}".format,
        "loss": "{:.4g}".format,
        "tokens/s": "{:,.0f}".format,
    }
    table = shown.to_string(index=False, na_rep="", formatters=formats)
    print(table if len(shown) else "No runs yet: workbench run gpt2-tiny")


def _export(frame: Any, path: str) -> None:
    from workbench.advise.frame import to_csv

    _folder(Path(path).parent)
    if path.endswith(".parquet"):
        frame.to_parquet(path, index=False)
    elif path.endswith(".csv"):
        to_csv(frame, path)
    else:
        raise ConfigurationError(f"records: {path!r} must end in .parquet or .csv.")
    print(f"{len(frame)} runs written to {path}")


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{path}: it cannot be a folder ({error.strerror}). Name another one.") from None
    return path


def show_comparison(args: argparse.Namespace) -> None:
    from workbench.advise.compare import compare, comparison_text, conclusions, unranked
    from workbench.advise.frame import records
    from workbench.records.store import mark_killed

    mark_killed()
    frame = records()
    table = compare(frame)
    folder = args.save and _folder(Path(args.save))
    print(comparison_text(table))
    for label, row in unranked(frame).iterrows():
        print(f"not ranked: {label}: {row['status']}. {row['reason']}")
    print()
    for sentence in conclusions(table):
        print(f"- {sentence}")
    if folder:
        _save_comparison(table, folder)


def _save_comparison(table: Any, folder: Path) -> None:
    from workbench.advise.frame import to_csv
    from workbench.lessons import plots

    to_csv(table.assign(**table.attrs), folder / "comparison.csv", index=True)
    plots.memory_bars(table).savefig(folder / "memory.png", dpi=130)
    plots.tradeoffs(table).savefig(folder / "tradeoffs.png", dpi=130)
    print(f"\ncomparison.csv, memory.png and tradeoffs.png written to {folder}")


if __name__ == "__main__":
    sys.exit(main())
