"""What the tests of techniques share beside what all tests do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from every_step import EveryStep

from workbench.journal.record import Record
from workbench.recipe import Recipe

# they look at trainings of their own, or hardly train: another process may have them
OWN_PROCESS = (
    "test_allocator",
    "test_bf16_optimizers",
    "test_offloading",
    "test_order",
    "test_registry",
    "test_together",
    "test_torch_compile",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The others look at the trainings of `test_contract.py`: it comes first, and one process has them all."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem not in OWN_PROCESS:
            item.add_marker(pytest.mark.xdist_group("techniques"))
    items.sort(key=lambda item: item.path.stem != "test_contract")


@pytest.fixture(scope="session")
def repeated(recipe: Recipe, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Of 18 blocks, more than two times: batches of 8 leave 2 over, which must not become a smaller step."""
    text = tmp_path_factory.mktemp("texts") / "short.txt"
    text.write_text(text_file.read_text(encoding="utf-8")[:1800], encoding="utf-8")
    return replace(recipe, corpus=str(text), steps=5)


@pytest.fixture
def interrupted(tmp_path: Path) -> Callable[[Recipe], tuple[Record, Record]]:
    """Four steps of a recipe, whole; and the same, interrupted in the third one and resumed."""
    from workbench.training.run import run

    def twice(recipe: Recipe) -> tuple[Record, Record]:
        recipe = replace(recipe, steps=4)
        whole = run(recipe, device="cpu", folder=tmp_path / "whole")
        steps = iter((1, 2))

        def stop_in_the_third_step() -> None:
            if next(steps, None) is None:
                raise KeyboardInterrupt

        stopping = [EveryStep(stop_in_the_third_step)]
        with pytest.raises(KeyboardInterrupt):
            run(recipe, device="cpu", folder=tmp_path, checkpoint_every=2, callbacks=stopping)
        resumed = run(recipe, device="cpu", folder=tmp_path, checkpoint_every=2, resume=True, callbacks=[EveryStep()])
        assert resumed.resumed_at_steps
        return whole, resumed

    return twice
