"""What the garbage collector is told around a run and around imports."""

import ast
import gc
import re
from pathlib import Path

import pytest

import workbench
from workbench.base.garbage import freeze_living_objects
from workbench.base.imports import pause_collector


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


def test_the_collector_is_as_it_was_after_a_pause_and_after_a_failure_in_it():
    with pause_collector():
        assert not gc.isenabled()
        with pytest.raises(ValueError, match="on purpose"), pause_collector():
            raise ValueError("on purpose")
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_made_in_a_pause_is_old_so_that_no_collection_of_the_young_walks_it(unfrozen):
    with pause_collector():
        made = [[] for _ in range(2)]
    young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
    assert not young & {id(one) for one in made}
    assert gc.get_freeze_count() == 0


def test_a_pause_thaws_nothing(unfrozen):
    gc.freeze()
    with pause_collector():
        pass
    assert gc.get_freeze_count() > 0


def test_nobody_else_touches_the_collector():
    """Looking at objects is allowed: `gc.get_objects` and `gc.get_referents`."""
    files = Path(workbench.__file__).parent.rglob("*.py")
    assert {path.name for path in files if collector_calls(path)} == {
        "garbage.py", "imports.py",  # around imports
    }  # fmt: skip


def collector_calls(path):
    """The calls in a file, not the words in its texts: a switch of the clinic is called `gc.collect()`."""
    calls = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]
    return [call for call in calls if re.match(r"gc\.(?!get_objects|get_referents)\w+\(", call)]
