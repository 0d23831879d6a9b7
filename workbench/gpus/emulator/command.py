"""The command `emulate`, in the workbench's command line and by itself."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from workbench.base.categories import parse_bytes
from workbench.base.command_line import COMMANDS, add_option, exit_code_of
from workbench.base.paths import versions
from workbench.gpus.catalogue import GPUS
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator.card import with_memory
from workbench.gpus.emulator.interpreter import ask_python
from workbench.gpus.emulator.launch import emulate
from workbench.gpus.emulator.place import set_up
from workbench.gpus.emulator.report import Emulation, banner

BY_ITSELF = "gpt2-memory-workbench-emulator"  # the distribution beside this file


def emulate_as_asked(args: argparse.Namespace) -> tuple[Emulation | str, int]:
    """Execute a parsed command, and return its answer and exit status. Raises as `emulate` and `set_up` do."""
    if args.set_up:
        python = ask_python(os.path.abspath(args.python)) if args.python else None
        return f"The emulated GPU is set up: {set_up(python)}", 0
    gpu = find_gpu(args.gpu)
    if args.memory is not None:
        gpu = with_memory(gpu, parse_bytes(args.memory, "memory"))
    print(banner(gpu), file=sys.stderr, flush=True)
    emulation = emulate(
        args.program[args.program[:1] == ["--"] :],
        gpu,
        python=args.python,
        ranks=args.ranks,
        gpus=args.gpus,
        padding=args.padding,
        masks=args.masks,
        timeout_s=args.timeout or None,
        history=not args.no_history,
        snapshot=args.snapshot,
        output=sys.stderr if args.json else None,
    )
    return emulation, emulation.exit_status


def emulate_by_itself(arguments: Sequence[str] | None = None) -> int:
    """Execute the command line of the emulator alone, and return its exit code."""
    row = COMMANDS["emulate"]
    parser = argparse.ArgumentParser(prog="emulate-gpu", description=row["help"], usage=row["usage"])
    parser.add_argument("--version", action="version", version=_version())
    for option, fields in row["takes"].items():
        settings: dict[str, Any] = {**fields, "help": fields["help"].format(gpus=", ".join(GPUS))}
        add_option(parser, option, **settings)
    args = parser.parse_args(arguments)
    typed = sys.argv[1:] if arguments is None else list(arguments)
    return exit_code_of(lambda: _print_answer(args), ["emulate", *typed])


def _print_answer(args: argparse.Namespace) -> int:
    answer, exit_status = emulate_as_asked(args)
    print(json.dumps(answer.to_dict()) if args.json and isinstance(answer, Emulation) else answer)
    return exit_status


def _version() -> str:
    try:
        return version(BY_ITSELF)
    except PackageNotFoundError:
        return versions()["workbench"]
