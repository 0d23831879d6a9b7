"""What a test may need that a fresh clone lacks. Each need is a fixture, which skips the test and says what is missing.

A test that uses one of these fixtures is dear: `make test` hides all of them (`tests/newcomer.py`), so that everybody
who runs it sees what a newcomer sees.
"""

import os
import shutil
from pathlib import Path

import pytest

from workbench.base.errors import UnavailableError
from workbench.gpus.emulator import place


@pytest.fixture(scope="session")
def emulator() -> Path:
    """Return the folder of the emulated GPU's stubs."""
    try:
        return place.stub_folder()
    except UnavailableError as error:
        pytest.skip(f"needs the emulated GPU: make emulator ({error})")


@pytest.fixture(scope="session")
def compiler() -> str:
    """Return the path of a C compiler."""
    return _program("cc", "gcc", "clang")


@pytest.fixture(scope="session")
def cpp_compiler() -> str:
    """Return the path of the C++ compiler that PyTorch takes to compile for a CPU."""
    return _program(os.environ.get("CXX", "g++"))


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of a browser."""
    return _program("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def nm() -> str:
    """Return the path of binutils' `nm`, which lists the symbols of a library."""
    return _program("nm")


NEEDS = frozenset({"emulator", "compiler", "cpp_compiler", "chromium", "nm"})


def _program(*names: str) -> str:
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    pytest.skip(f"needs one of these programs, and none is on the PATH: {', '.join(names)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if NEEDS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.dear)
