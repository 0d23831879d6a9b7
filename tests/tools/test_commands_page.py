"""The page of the command line is what the parser says."""

import commands_page

from workbench.base.command_line import COMMANDS
from workbench.gpus.catalogue import GPUS


def test_the_committed_page_is_what_the_tool_writes():
    written = commands_page.PAGE.read_text(encoding="utf-8")
    assert written == commands_page.page(), "run tools/commands_page.py"


def test_every_command_has_its_section_and_every_name_is_listed_once():
    page = commands_page.page()
    for name, command in COMMANDS.items():
        assert page.count(f"\n## {name}\n") == 1
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for option in command["takes"]:
            assert option.split()[-1] in section or not option.startswith("-"), (name, option)
    for gpu in GPUS:
        assert page.count(f"`{gpu}`") == 1
    assert page.count("| `--learning-rate` ") == 1
