"""A Python program on a card, changed or as it is: one trial is a process that ends after a few steps."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from workbench.base.device import emulated
from workbench.base.errors import DISTRIBUTION, ConfigurationError, UnavailableError
from workbench.base.settings import plain
from workbench.export.whose import FOREIGN
from workbench.fit import any_training
from workbench.fit.card import Card, Use
from workbench.fit.places import arguments_of, places_of
from workbench.gpus.emulator.inside import _emulated_imports
from workbench.gpus.emulator.padding import VARIABLE as PADDING
from workbench.techniques import Technique

PACKAGE = Path(__file__).parents[1]
INSIDE = Path(__file__).with_name("inside.py")
PYTHON = re.compile(r"python(\d(\.\d+)?)?")
LAUNCHERS = ("accelerate", "deepspeed", "torchrun", "mpirun", "srun", "horovodrun")
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")  # options of Python that take the next word
DONE = ("steps", "the end of training")
UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")
RENAMED = {"tokenizer": ["processing_class", "transformers 4.46"], **FOREIGN["renamed"]}
LOWER_BOUND = re.compile(r"([\w-]+)>=([\d.]+)")
# asked of an interpreter in which nothing of the workbench need be installed
WHAT_IS_THERE = """
import importlib.metadata, json, platform
packages = {entry.metadata["Name"]: entry.version for entry in importlib.metadata.distributions()}
print(json.dumps([platform.python_version(), packages]))
"""
SEVERAL = re.compile(r"distributed training|env:// rendezvous")
NETWORK = re.compile(
    r"huggingface\.co|\b(connection|offline|gated|401|access token|hf_token|login|resolve)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Program:
    """A command line of Python: its interpreter, the interpreter's options, and the script or `-m module` and theirs.

    Raises:
        ConfigurationError: it is another program, or one that starts several processes.
    """

    python: str
    options: tuple[str, ...]
    script: tuple[str, ...]

    @classmethod
    def parse(cls, command: Sequence[str]) -> "Program":
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
        """As it is typed."""
        python = "python" if self.python == sys.executable else self.python
        return [python, *self.options, *self.script]

    def changed(self, file: Path | None, flags: Sequence[str]) -> "Program":
        """The same with another script, if there is one, and with more arguments at its end."""
        first = self.script[0] if file is None else str(file)
        return replace(self, script=(first, *self.script[1:], *flags))


def numbers(release: str) -> tuple[int, ...]:
    """Of a release, in their order."""
    return tuple(map(int, re.findall(r"\d+", release)))


@cache
def lacking(python: str) -> tuple[str, ...]:
    """What the workbench needs, and this interpreter has not; empty: the workbench can be imported there.

    Raises:
        ConfigurationError: it is no Python of 3.9 or newer.
    """
    if python == sys.executable:
        return ()
    asking = [python, "-c", WHAT_IS_THERE]
    try:
        answer = subprocess.run(asking, capture_output=True, text=True, timeout=60, check=True)
        version, packages = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(
            f"plan: {python} does not answer as a Python of 3.9 or newer ({error}). Name the one that runs your script."
        ) from None
    there = {plain(name): release for name, release in {**packages, "Python": version}.items()}
    needed = [f"Python{metadata.metadata(DISTRIBUTION)['Requires-Python']}", *(metadata.requires(DISTRIBUTION) or ())]
    faults = []
    for line in needed:
        lower_bound = LOWER_BOUND.fullmatch(line)  # an extra's are followed by its name
        if lower_bound is None:
            continue
        name, least = lower_bound.groups()
        release = there.get(plain(name))
        if release is None:
            faults.append(f"no {name}")
        elif numbers(release) < numbers(least):
            faults.append(f"{name} {release} ({least} or newer is needed)")
    return tuple(faults)


@dataclass(frozen=True)
class Trial:
    """What became of a program with these techniques on it.

    Attributes:
        seen: what `inside.py` reports.
        use: what it took of the card.
        fits: it came to the last step, and was refused no memory.
        recovered: it was refused memory, and went on with less.
    """

    techniques: tuple[Technique, ...]
    seen: Mapping[str, Any]
    use: Use
    fits: bool
    seconds: float
    recovered: bool = False

    @property
    def reserved_bytes(self) -> int:
        """The most that PyTorch's allocator held."""
        return self.use.reserved_bytes

    @property
    def needed_bytes(self) -> int:
        """The same, and what it takes beside."""
        return self.use.reserved_bytes + self.use.beside_bytes

    @property
    def step_time_s(self) -> float | None:
        """Of the last step, where it was computed."""
        return self.seen.get("step_time_s")

    @property
    def ended_by(self) -> str:
        return str(self.seen.get("ended_by", ""))

    @property
    def ended_well(self) -> bool:
        """It came to the end of its steps, or to its own end after some."""
        return self.ended_by in DONE or (self.ended_by == "its own end" and self.seen["steps"] > 0)

    @property
    def ran(self) -> bool:
        """It reached its steps, or was refused memory."""
        return self.ended_well or self.ended_by == "out of memory"


def try_out(
    program: Program,
    card: Card,
    techniques: Sequence[Technique] = (),
    *,
    steps: int,
    time_limit_s: float,
    before: Mapping[str, Any] | None = None,
    life: bool = False,
    shown: bool = False,
) -> Trial:
    """Run a program on a card until so many optimizer steps are done.

    Args:
        before: what was `seen` in a run of it as it is.
        life: a Trainer evaluates and saves after them, if its arguments say so.
        shown: what it prints goes to standard error; otherwise nowhere.

    Raises:
        UnavailableError: the emulator is not set up, or cannot be on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="fit-") as folder:
        report = Path(folder, "report.json")
        job = job_of(program, techniques, before or {}) | {
            "steps": steps,
            "life": life,
            "report": str(report),
            "shown": shown,
            "scratch": folder,
            "here": card.here,
            "timed": card.here and not emulated(),
            "share": card.share,
        }
        # a library by its path, so that what goes through it is held by the program's own lines
        inside = Path(folder, "site-packages", INSIDE.name)
        inside.parent.mkdir()
        shutil.copy(INSIDE, inside)
        for module in (any_training, _emulated_imports):
            shutil.copy(str(module.__file__), inside.parent)
        job_file = Path(folder, "job.json")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        began = time.monotonic()
        command = [program.python, *program.options, str(inside), str(job_file), *program.script]
        use = card.run(command, report, max(time_limit_s, 1.0), history=shown)
        seconds = round(time.monotonic() - began, 1)
        seen = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    trial = Trial(tuple(techniques), seen, use, False, seconds)
    if not trial.ended_well:
        return trial
    return replace(trial, fits=use.refusals == 0 or shown, recovered=use.refusals > 0)


def job_of(program: Program, techniques: Sequence[Technique], before: Mapping[str, Any]) -> dict[str, Any]:
    """What `inside.py` is told of a program and its changes."""
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
    """Raises ConfigurationError: the program, as it is, did not come to train, for reasons of its own."""
    trainer_or_loop = trial.seen.get("kind", "")
    message = str(trial.seen.get("message", ""))
    if trial.use.timed_out:
        raise ConfigurationError(
            f"plan: the program did not come to the end of its steps within {time_limit_s:.0f} s. "
            "Let it read less data, ask for fewer --trial-steps, or give a longer --timeout."
        )
    if trial.ended_by == "several ranks":
        raise ConfigurationError(
            f"plan: this training uses {trial.seen['several']}, and one process without it is "
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
            f"plan: the program ended by itself with {trial.seen['exit']!r:.90}, before it "
            "trained. Give it the arguments that it needs, behind its name."
        )
    if not trial.seen:
        raise UnavailableError("plan: the program was ended from outside, before it could report. Give it more room.")
    # memory may run out before: the model alone can be too large
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
