"""What the garbage collector is told around a run. The allocators' own counters: test_meter.py."""

import gc

import pytest

from workbench.measure.garbage import freeze_living_objects


@pytest.fixture
def unfrozen():
    """The tests freeze the libraries' objects; here they are thawed meanwhile."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


def test_what_lives_is_left_out_and_comes_back(unfrozen):
    with freeze_living_objects():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_it_comes_back_after_a_failure_too(unfrozen):
    with pytest.raises(ValueError, match="on purpose"), freeze_living_objects():
        raise ValueError("on purpose")
    assert gc.get_freeze_count() == 0


def test_what_the_caller_has_frozen_stays_frozen(unfrozen):
    gc.freeze()
    with freeze_living_objects():
        pass
    assert gc.get_freeze_count() > 0
