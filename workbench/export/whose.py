"""The program whose settings a text has: a vote of the settings that only one program knows."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.paths import read_beside
from workbench.export.owners import adapters, owner
from workbench.export.pasted import CURE, INSTEAD, Section

FOREIGN = read_beside(__file__, "foreign.toml")
PROGRAMS = FOREIGN["program"]
LAUNCHERS = ("accelerate", "deepspeed")  # programs whose options start another program
CALLED = {*FOREIGN["call"].values()} - {"transformers", "trl"}  # programs whose settings only a script's calls have
CLEARLY = 4  # The first program is clear if it has at least so many times the votes of the second.


def assign_programs(sections: list[Section]) -> Iterator[tuple[str, Section]]:
    """Yield (program, section) for each section. Raises ConfigurationError: a program is not clear, or is not read."""
    if len(sections) == 1 and not sections[0].owner:
        yield program_of(sections[0]), sections[0]
        return
    seen: set[str] = set()
    for section in sections:
        path, _, name = section.owner.rpartition(".")
        for title, signs in FOREIGN["refused"].items():
            if any(matches_any(part, signs) for part in section.owner.split(".")):
                raise refusal_of(title, section.owner)
        section = section._replace(owner=name)
        program = FOREIGN["call"].get(name, "")
        if not program and name.endswith("Config"):
            program = "peft"
            section = add_peft_type(section)
        if not program or (name == "from_pretrained" and "Model" not in path):
            continue
        called = "a class of PEFT's" if program == "peft" else name
        if called in seen:
            raise ConfigurationError(f"recipe: {called} is called twice. Paste the call that counts.")
        seen.add(called)
        yield program, section
    if not seen:
        raise ConfigurationError(f"recipe: no call of a class of settings is known there. {CURE}")


def add_peft_type(section: Section) -> Section:
    """Add the kind of adapter, which the class alone says. Raises ConfigurationError: it is none of PEFT's classes."""
    if section.owner not in adapters():
        raise ConfigurationError(f"recipe: no settings of the class {section.owner} are read. {CURE}")
    return section._replace(settings={"peft_type": adapters()[section.owner], **section.settings})


def program_of(section: Section) -> str:
    """Find the program of a file or a command. Raises ConfigurationError: it is not clear, or is not read."""
    names = {*flatten(section.settings), *section.settings, *(section.before_options or ())}
    settings_of: dict[str, set[str]] = {}
    for program in PROGRAMS:
        # A launcher's options in a command say nothing of the program that it starts.
        if program not in CALLED and (section.before_options is None or program not in LAUNCHERS):
            settings_of[program] = names & known_names(program)
    for program, patterns in FOREIGN["refused"].items():
        settings_of[program] = {name for name in names if matches_any(name, patterns)}
    programs_with = Counter(chain.from_iterable(settings_of.values()))
    if not programs_with:
        raise ConfigurationError(f"recipe: no setting is known, of {', '.join(section.settings)[:90]!r}. {CURE}")
    votes: dict[str, set[str]] = {}
    for program, known_settings in settings_of.items():
        votes[program] = {name for name in known_settings if programs_with[name] == 1}

    def order(program: str) -> tuple[int, bool, int]:
        """Return a key that sorts by votes. Among programs with equally many, those that are not read come first; among
        those without a vote they come last."""
        return -len(votes[program]), (program in PROGRAMS) == bool(votes[program]), -len(settings_of[program])

    first, second = sorted(settings_of, key=order)[:2]
    if first in FOREIGN["refused"] and votes[first]:
        raise refusal_of(first, ", ".join(sorted(votes[first])))
    is_clear = len(votes[first]) >= max(1, CLEARLY * len(votes[second]))
    # Hugging Face's other programs have all of transformers' settings, too, so that it may get no vote.
    if settings_of["transformers"] == set(programs_with):
        first = "transformers"
        is_clear = True
    understood = settings_of[first].intersection(section.settings)
    if not is_clear or 2 * len(understood) < len(section.settings):
        reasons = []
        for program in (first, second):
            signs = ", ".join(sorted(votes[program] or settings_of[program])) or "nothing"
            title = PROGRAMS[program]["title"] if program in PROGRAMS else program
            reasons.append(f"{title} ({signs:.90})")
        raise ConfigurationError(f"recipe: it is not clear whose settings these are: {', or '.join(reasons)}. {CURE}")
    return first


@cache
def known_names(program: str) -> set[str]:
    """Return the names of a program's settings, as far as they are known here."""
    table = PROGRAMS[program]
    names = {*table.get("signs", "").split(), *table.get("names", {})}
    for conditions in table.get("values", {}):
        names.update(re.findall(r"(\w+)=", conditions))
    package = table.get("package", "transformers")
    if find_spec(package):
        for cls in table.get("classes", ()):
            names.update(owner(package, cls).types, FOREIGN["renamed"])
    return names


def refusal_of(title: str, signs: str) -> ConfigurationError:
    """Make the refusal of a program's settings, with the signs by which it was known."""
    return ConfigurationError(f"recipe: these are settings of {title} ({signs:.90}), which are not read. {INSTEAD}.")


def flatten(settings: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Return the values of nested settings by name, `outer.inner` for one that is inside of another."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{outer}{name}.")
        else:
            flat[f"{outer}{name}"] = value
    return flat


def matches_any(text: str, patterns: str) -> bool:
    """Whether a text matches one of the patterns, which are those of file names, with spaces between them."""
    return any(fnmatchcase(text, pattern) for pattern in patterns.split())
