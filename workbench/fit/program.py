"""A trial of somebody's Python program: a process that runs it on a card, changed or as it is, and ends after a few
steps.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from workbench.base.device import current_emulated_gpu
from workbench.base.errors import DISTRIBUTION, ConfigurationError, UnavailableError
from workbench.base.settings import normalize_name
from workbench.export.classes import RENAMED as RENAMED_SETTINGS
from workbench.fit import any_training
from workbench.fit.any_training import Changes, Facts, TrialJob
from workbench.fit.card import Card, Use
from workbench.fit.places import Techniques, arguments_of, places_of
from workbench.gpus.emulator.inside import _emulated_imports
from workbench.gpus.emulator.padding import VARIABLE as PADDING
from workbench.techniques import Technique

PACKAGE = Path(__file__).parents[1]
INSIDE = Path(__file__).with_name("inside.py")
PYTHON = re.compile(r"python(\d(\.\d+)?)?")
LAUNCHERS = ("accelerate", "deepspeed", "torchrun", "mpirun", "srun", "horovodrun")
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python that take the next word
DONE = ("steps", "the end of training")  # values of `Facts.ended_by` for a training that came to its end
UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")
# For each older name of an argument, its current name, and the release that renamed it.
RENAMED = {"tokenizer": ("processing_class", "transformers 4.46"), **RENAMED_SETTINGS}
LOWER_BOUND = re.compile(r"([\w-]+)>=([\d.]+)")
# This runs in an interpreter in which nothing of the workbench need be installed.
PRINT_PACKAGES = """
import importlib.metadata, json, platform
packages = {entry.metadata["Name"]: entry.version for entry in importlib.metadata.distributions()}
print(json.dumps([platform.python_version(), packages]))
"""
# SEVERAL is in the error of a program for several processes, NETWORK in that of one that wants the network or a login.
SEVERAL = re.compile(r"distributed training|env:// rendezvous")
NETWORK = re.compile(
    r"huggingface\.co|\b(connection|offline|gated|401|access token|hf_token|login|resolve)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Program:
    """A command line of Python.

    Attributes:
        python: the interpreter.
        options: the interpreter's own.
        script: a script or `-m`, `module`, and their arguments.
    """

    python: str
    options: tuple[str, ...]
    script: tuple[str, ...]

    @classmethod
    def parse(cls, command: Sequence[str]) -> "Program":
        """Parse the words of a command.

        Raises ConfigurationError: it is another program, may start several processes, or names no script that exists.
        """
        if not command:
            raise ConfigurationError("plan: name a program after --, as in: plan --gpu t4 -- python train.py")
        name = Path(command[0]).name
        if name in LAUNCHERS or "torch.distributed.run" in command or "accelerate.commands.launch" in command:
            raise ConfigurationError(
                f"plan: {name} may start several processes, and one is planned for. "
                "Give the script itself, as in: plan --gpu t4 -- python train.py"
            )
        if not PYTHON.fullmatch(name):
            raise ConfigurationError(
                f"plan: {command[0]!r} is not Python. Write the program as: plan --gpu t4 -- python train.py"
            )
        options = []
        rest = list(command[1:])
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
            options.append(rest.pop(0))
            if options[-1] in WITH_VALUE and rest:
                options.append(rest.pop(0))
        if not rest or rest[0] in ("-c", "-") or rest == ["-m"]:
            raise ConfigurationError("plan: Python is given no script. Name a file, as in: plan -- python train.py")
        if rest[0] != "-m" and not Path(rest[0]).is_file():
            raise ConfigurationError(f"plan: there is no file {rest[0]!r}. Name the script, from where you stand.")
        python = sys.executable if command[0] in ("python", "python3") else command[0]
        return cls(python, tuple(options), tuple(rest))

    @property
    def file(self) -> Path | None:
        """The script; None for a module."""
        return None if self.script[0] == "-m" else Path(self.script[0])

    @property
    def command(self) -> list[str]:
        """The words of the command, as a person types them."""
        python = "python" if self.python == sys.executable else self.python
        return [python, *self.options, *self.script]

    def replace_script(self, file: Path | None, flags: Sequence[str]) -> "Program":
        """Return the command with another script, unless `file` is None, and with more arguments at its end."""
        first = self.script[0] if file is None else str(file)
        return replace(self, script=(first, *self.script[1:], *flags))


def numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, which compare as releases do: (2, 10) of `2.10`."""
    return tuple(map(int, re.findall(r"\d+", release)))


@cache
def find_missing_packages(python: str) -> tuple[str, ...]:
    """List, in words, the packages that the workbench needs and an interpreter has not, or has too old. If there are
    none, the workbench can be imported there.

    Raises:
        ConfigurationError: it is no Python of 3.9 or newer.
    """
    if python == sys.executable:
        return ()
    command = [python, "-c", PRINT_PACKAGES]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        version, packages = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(
            f"plan: {python} does not answer as a Python of 3.9 or newer ({error}). Name the one that runs your script."
        ) from None
    releases = {normalize_name(name): release for name, release in {**packages, "Python": version}.items()}
    needed = [f"Python{metadata.metadata(DISTRIBUTION)['Requires-Python']}", *(metadata.requires(DISTRIBUTION) or ())]
    faults = []
    for line in needed:
        lower_bound = LOWER_BOUND.fullmatch(line)
        if lower_bound is None:  # The package belongs to an extra, whose name follows.
            continue
        name, least = lower_bound.groups()
        release = releases.get(normalize_name(name))
        if release is None:
            faults.append(f"no {name}")
        elif numbers(release) < numbers(least):
            faults.append(f"{name} {release} ({least} or newer is needed)")
    return tuple(faults)


@dataclass(frozen=True)
class Trial:
    """The result of running a program with techniques.

    Attributes:
        techniques: those that were put on it; none for the program as it is.
        facts: the report of `inside.py`; empty if the process was ended from outside.
        use: what it took of the card.
        fits: whether it came to the last step, and was refused no memory. The program as it is fits too if it was
            refused some and went on.
        seconds: the duration of the whole run.
        recovered: whether it was refused memory, and went on with less.
    """

    techniques: Techniques
    facts: Facts
    use: Use
    fits: bool
    seconds: float
    recovered: bool = False

    @property
    def reserved_bytes(self) -> int:
        """The most that PyTorch's allocator had reserved."""
        return self.use.reserved_bytes

    @property
    def needed_bytes(self) -> int:
        """All that a card must give: the reserved bytes, and those that the program takes beside."""
        return self.reserved_bytes + self.use.beside_bytes

    @property
    def step_time_s(self) -> float | None:
        """The duration of the last step; None if no step was timed, as on an emulated card, which computes nothing."""
        return self.facts.get("step_time_s")

    @property
    def ended_by(self) -> str:
        return self.facts.get("ended_by", "")

    @property
    def ended_well(self) -> bool:
        """Whether it came to the end of its steps, or to its own end after some."""
        return self.ended_by in DONE or (self.ended_by == "its own end" and self.facts["steps"] > 0)

    @property
    def ran(self) -> bool:
        """Whether its memory is known: it ended well, or was refused memory."""
        return self.ended_well or self.ended_by == "out of memory"


def try_out(
    program: Program,
    card: Card,
    techniques: Sequence[Technique] = (),
    *,
    steps: int,
    time_limit_s: float,
    before: Facts | None = None,
    life: bool = False,
    shown: bool = False,
) -> Trial:
    """Run a program on a card until it has done so many optimizer steps.

    Args:
        before: `Trial.facts` of a run of the program as it is; None for that run itself.
        life: a Trainer evaluates and saves after the steps, if its arguments say so.
        shown: the program's output goes to standard error; otherwise nowhere.

    Raises:
        UnavailableError: the emulator is not set up, or cannot be on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="fit-") as folder:
        report = Path(folder, "report.json")
        job: TrialJob = {
            **changes_of(program, techniques, before or {}),
            "steps": steps,
            "life": life,
            "report": str(report),
            "shown": shown,
            "scratch": folder,
            "here": card.here,
            "timed": card.here and not current_emulated_gpu(),
            "share": card.share,
        }
        # In a folder of this name inside.py counts as a library: memory that is allocated through it is put down to
        # the program's own lines.
        inside = Path(folder, "site-packages", INSIDE.name)
        inside.parent.mkdir()
        shutil.copy(INSIDE, inside)
        for module in (any_training, _emulated_imports):
            shutil.copy(str(module.__file__), inside.parent)
        job_file = Path(folder, "job.json")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        began = time.monotonic()
        command = [program.python, *program.options, str(inside), str(job_file), *program.script]
        # A run that begins after the end of the time gets a second, and so times out as others do.
        use = card.run(command, report, max(time_limit_s, 1.0), history=shown)
        seconds = round(time.monotonic() - began, 1)
        facts: Facts = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    trial = Trial(tuple(techniques), facts, use, False, seconds)
    if not trial.ended_well:
        return trial
    return replace(trial, fits=use.refusals == 0 or shown, recovered=use.refusals > 0)


def changes_of(program: Program, techniques: Sequence[Technique], before: Facts) -> Changes:
    """Return the changes that put the techniques on a program, as `inside.py` makes them."""
    places = places_of(techniques, arguments_of(before))
    return {
        "arguments": places.arguments,
        "on_model": {technique.name: technique.settings() for technique in places.on_model},
        "on_trainer": {technique.name: technique.settings() for technique in places.on_trainer},
        "environment": places.environment,
        "kind": before.get("kind", ""),
        "path": str((program.file.parent if program.file else Path()).resolve()),
        "package": str(PACKAGE),
        "padding": PADDING,
    }


def check_trial(trial: Trial, time_limit_s: float) -> None:
    """Refuse a program that, as it is, did not come to train.

    Raises:
        ConfigurationError: for reasons of its own; the message has the cure.
        UnavailableError: it was ended from outside.
    """
    trainer_or_loop = trial.facts.get("kind", "")
    message = trial.facts.get("message", "")
    if trial.use.timed_out:
        raise ConfigurationError(
            f"plan: the program did not come to the end of its steps within {time_limit_s:.0f} s. "
            "Let it read less data, ask for fewer --trial-steps, or give a longer --timeout."
        )
    if trial.ended_by == "several ranks":
        raise ConfigurationError(
            f"plan: this training uses {trial.facts['several']}, and one process without it is "
            "planned for. Leave it out, or write the training as a recipe: "
            "workbench predict --ranks."
        )
    if trial.ended_by == "an error":
        cure = "Make it run first."
        if message.startswith("EOFError"):
            cure = (
                "It asks somebody at the keyboard, and nobody answers here. Tell it by an argument, or log in before."
            )
        elif SEVERAL.search(message):
            cure = "It was made for several processes, and one is planned for: workbench predict --ranks."
        elif NETWORK.search(message):
            cure = "It asks for the network or a login: download what it needs first, and set HF_HUB_OFFLINE=1."
        older_name = UNKNOWN_ARGUMENT.search(message)
        if older_name and older_name[1] in RENAMED:
            current_name, since = RENAMED[older_name[1]]
            cure = f"It was written for an older version: {older_name[1]} is {current_name} now ({since})."
        raise ConfigurationError(f"plan: the program failed by itself, as stands above ({message:.300}). {cure}")
    if trial.ended_by == "its own exit":
        raise ConfigurationError(
            f"plan: the program ended by itself with {trial.facts['exit']!r:.90}, before it "
            "trained. Give it the arguments that it needs, behind its name."
        )
    if not trial.facts:
        raise UnavailableError("plan: the program was ended from outside, before it could report. Give it more room.")
    # Memory may run out before a Trainer or an optimizer is made: the model alone can be too large.
    if not trainer_or_loop and trial.ended_by != "out of memory":
        raise ConfigurationError(
            "plan: the program ended without a Trainer of transformers and without an optimizer of "
            "PyTorch. Name the script that trains."
        )
    if not trial.ran:
        product = "an optimizer, and never took a step"
        if trainer_or_loop == "trainer":
            product = "a Trainer, and never called train()"
        raise ConfigurationError(f"plan: the program made {product}. Give it what makes it train, such as --do_train.")
    if not trial.use.used_a_gpu:
        raise ConfigurationError("plan: the program trains on the CPU. Let it use the GPU that it is shown.")
