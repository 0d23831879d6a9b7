import sys

import pytest

from workbench.gpus.emulator.launch import emulate


@pytest.fixture
def program(emulator, tmp_path, capfd):
    """Runs the text of a program on an emulated card; its findings, and what it printed."""

    def run(source, card, **options):
        path = tmp_path / "program.py"
        path.write_text(source)
        found = emulate([sys.executable, str(path)], card, **options)
        return found, capfd.readouterr()

    return run
