import pytest

from workbench.gpus.emulator import call, place


@pytest.fixture(scope="module")
def emulator():
    """The emulated GPU, whose processes end with the file; where it is not set up, its tests are skipped."""
    if not place.is_set_up():
        pytest.skip("the emulated GPU is not set up: make emulator")
    yield
    call.PROCESSES.end()
    call.TRUNK.end()
