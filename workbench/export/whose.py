"""Whose settings a text has: decided by those that only one program knows."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.paths import beside
from workbench.export.owners import adapters, owner
from workbench.export.pasted import CURE, INSTEAD, Section

FOREIGN = beside(__file__, "foreign.toml")
PROGRAMS = FOREIGN["program"]
LAUNCHERS = ("accelerate", "deepspeed")
CALLED = {*FOREIGN["call"].values()} - {"transformers", "trl"}  # in a script alone
CLEARLY = 4  # times as many settings that only one program has as those of the next


def belonging(sections: list[Section]) -> Iterator[tuple[str, Section]]:
    """Each section with the name of its program. Raises ConfigurationError: that is not clear, or it is not read."""
    if len(sections) == 1 and not sections[0].owner:
        yield program_of(sections[0]), sections[0]
        return
    seen: set[str] = set()
    for section in sections:
        path, _, name = section.owner.rpartition(".")
        for title, signs in FOREIGN["refused"].items():
            if any(like(part, signs) for part in section.owner.split(".")):
                raise refusal_of(title, section.owner)
        section = section._replace(owner=name)
        program = FOREIGN["call"].get(name, "")
        if not program and name.endswith("Config"):
            program = "peft"
            section = of_an_adapter(section)
        if not program or (name == "from_pretrained" and "Model" not in path):
            continue
        called = "a class of PEFT's" if program == "peft" else name
        if called in seen:
            raise ConfigurationError(f"recipe: {called} is called twice. Paste the call that counts.")
        seen.add(called)
        yield program, section
    if not seen:
        raise ConfigurationError(f"recipe: no call of a class of settings is known there. {CURE}")


def of_an_adapter(section: Section) -> Section:
    """With what the class alone says. Raises ConfigurationError: it is none of PEFT's."""
    if section.owner not in adapters():
        raise ConfigurationError(f"recipe: no settings of the class {section.owner} are read. {CURE}")
    return section._replace(settings={"peft_type": adapters()[section.owner], **section.settings})


def program_of(section: Section) -> str:
    """Of a file or a command. Raises ConfigurationError: it is not clear, or of a program that is not read."""
    names = {*flattened(section.settings), *section.settings, *(section.before_options or ())}
    settings_of: dict[str, set[str]] = {}
    for program in PROGRAMS:
        # a launcher's options start what comes after them
        if program not in CALLED and (section.before_options is None or program not in LAUNCHERS):
            settings_of[program] = names & known_names(program)
    for program, patterns in FOREIGN["refused"].items():
        settings_of[program] = {name for name in names if like(name, patterns)}
    programs_with = Counter(chain.from_iterable(settings_of.values()))
    if not programs_with:
        raise ConfigurationError(f"recipe: no setting is known, of {', '.join(section.settings)[:90]!r}. {CURE}")
    votes: dict[str, set[str]] = {}
    for program, its_names in settings_of.items():
        votes[program] = {name for name in its_names if programs_with[name] == 1}

    def order(program: str) -> tuple[int, bool, int]:
        """Of equally many votes those that are not read come first, of no vote last."""
        return -len(votes[program]), (program in PROGRAMS) == bool(votes[program]), -len(settings_of[program])

    first, second = sorted(settings_of, key=order)[:2]
    if first in FOREIGN["refused"] and votes[first]:
        raise refusal_of(first, ", ".join(sorted(votes[first])))
    is_clear = len(votes[first]) >= max(1, CLEARLY * len(votes[second]))
    # all of Hugging Face's other programs have these, too
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
    """The settings of a program."""
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
    return ConfigurationError(f"recipe: these are settings of {title} ({signs:.90}), which are not read. {INSTEAD}.")


def flattened(settings: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Each value by its name, `outer.inner` for what is inside of another."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{outer}{name}.")
        else:
            flat[f"{outer}{name}"] = value
    return flat


def like(text: str, patterns: str) -> bool:
    """Whether it is one of the patterns, as in file names, with spaces between them."""
    return any(fnmatchcase(text, pattern) for pattern in patterns.split())
