"""A fixture that pytest finds by itself where the workbench is installed.

    def test_fits(memory_budget):
        memory_budget(Recipe(model="gpt2") | Lora(rank=8), "6.5GiB", gpu="t4")
        memory_budget("python train.py --epochs 1", "13GiB", gpu="t4")

It fails as `workbench check` does. What was found is stored beside the file of the test, as `NAME.memory.json`;
`pytest --update-memory` stores it anew.
"""

from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-memory", action="store_true", help="store what memory_budget finds (workbench)")


@pytest.fixture
def memory_budget(request: pytest.FixtureRequest) -> Callable[[Any, str, str], None]:
    """`memory_budget(what, limit, gpu)`; growth within the limit is a warning."""

    number = 0

    def check(what: Any, limit: str, gpu: str) -> None:
        from workbench.advise.budget import Budget, judge  # not earlier: everybody's pytest loads this file

        nonlocal number
        number += 1
        budget = Budget(f"{request.node.name}, {number}", what, limit, gpu)
        lock = request.path.with_suffix(".memory.json")
        (verdict,) = judge([budget], lock, request.config.getoption("--update-memory"))
        if verdict.over:
            pytest.fail(str(verdict), pytrace=False)
        if verdict.grown_bytes > 0:
            request.node.warn(pytest.PytestWarning(str(verdict)))

    return check
