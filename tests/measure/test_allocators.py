"""What the garbage collector is told around a run. The allocators' own counters: test_meter.py."""

import gc

import pytest

from workbench.measure.allocators import collecting_only_what_is_new


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
    with collecting_only_what_is_new():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_it_comes_back_after_a_failure_too(unfrozen):
    with pytest.raises(ValueError, match="on purpose"), collecting_only_what_is_new():
        raise ValueError("on purpose")
    assert gc.get_freeze_count() == 0


def test_what_the_caller_has_frozen_stays_frozen(unfrozen):
    gc.freeze()
    with collecting_only_what_is_new():
        pass
    assert gc.get_freeze_count() > 0
