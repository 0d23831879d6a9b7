import sys

import pytest

from workbench.base.errors import UnavailableError
from workbench.gpus.emulator import place
from workbench.gpus.emulator.launch import emulate


@pytest.fixture(scope="session")
def stubs():
    """The folder of the stubs; a test that needs them is skipped, with the reason, where they cannot be had."""
    try:
        return place.stub_folder()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def program(stubs, tmp_path, capfd):
    """Runs the text of a program on an emulated card; its findings, and what it printed."""

    def run(source, card, **options):
        path = tmp_path / "program.py"
        path.write_text(source)
        found = emulate([sys.executable, str(path)], card, **options)
        return found, capfd.readouterr()

    return run
