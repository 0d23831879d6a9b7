"""One real Jupyter kernel stays usable whatever happens in it, and gets its memory back."""

import os

import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.dear  # starts a Jupyter kernel
SETUP = """
import gc, torch
from dataclasses import replace
from workbench import Recipe, holders, release
from workbench.measure.allocators import live_tensor_bytes
from workbench.training.run import run
from workbench.training.watch import Watch
from pathlib import Path
recipe = Recipe(model={model!r}, corpus={corpus!r}, steps=3, effective_batch_size=4, sequence_length=32)
whole = Watch.on_step_end
def live():
    gc.collect()
    return live_tensor_bytes("cpu")
def ending(error):
    def on_step_end(self, args, state, control, **rest):
        whole(self, args, state, control, **rest)
        if state.global_step == 2 and error is not None:
            raise error
    return on_step_end
def go(error=None):
    Watch.on_step_end = ending(error)
    return run(recipe, device="cpu").status
"""
CELLS = {
    "success": "go()",
    "error": "go(ValueError('on purpose'))",
    "interrupt": "go(KeyboardInterrupt())",
    "out of memory": "go(torch.OutOfMemoryError('on purpose'))",
}


@pytest.fixture(scope="module")
def kernel(model_name, text_file, tmp_path_factory):
    environment = {**os.environ, "WORKBENCH_RUNS": str(tmp_path_factory.mktemp("runs")), "OMP_NUM_THREADS": "1"}
    manager, client = start_new_kernel(env=environment)

    def execute(code):
        """What the cell printed or showed, and the name of the exception that ended it."""
        shown, messages = [], []
        reply = client.execute_interactive(code, timeout=120, output_hook=messages.append)
        for message in messages:
            content = message["content"]
            shown.append(content.get("text") or content.get("data", {}).get("text/plain", ""))
        return "".join(shown), reply["content"].get("ename", "")

    execute(SETUP.format(model=model_name, corpus=str(text_file)))
    yield execute
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.long)])
def test_runs_of_every_kind_one_after_another_leave_no_tensor(kernel, rounds):
    kernel(CELLS["success"])
    start = int(kernel("print(live())")[0])
    endings = []
    for kind in [*list(CELLS) * rounds, "success"]:
        endings.append(kernel(CELLS[kind])[1])
        assert int(kernel("print(live())")[0]) == start, kind
    assert endings == ["", "ValueError", "KeyboardInterrupt", "OutOfMemoryError"] * rounds + [""]
    statuses = kernel("from workbench import records\nprint(records()['status'].value_counts().to_dict())")[0]
    counts = {"ok": rounds + 2, "failed": rounds, "interrupted": rounds, "oom": rounds}
    assert statuses == f"{counts}\n"


def test_release_frees_what_a_failed_cell_keeps(kernel):
    """Code of the user's own, without `run`: its frames live on in the traceback, and `del` does not help."""
    start = int(kernel("print(live())")[0])
    kernel("def train():\n    model = torch.nn.Linear(1000, 1000, bias=False)\n    raise RuntimeError('no memory')")
    assert kernel("train()")[1] == "RuntimeError"
    assert int(kernel("print(live())")[0]) == start + 4_000_000
    assert "local variables of train(), in the last exception', 4000000" in kernel("print(holders())")[0]
    assert int(kernel("print(release())")[0]) >= 4_000_000
    assert int(kernel("print(live())")[0]) == start


def test_release_frees_the_results_of_cells_and_holders_names_variables(kernel):
    start = int(kernel("print(live())")[0])
    kernel("torch.zeros(500, 500)")
    kernel("mine = [torch.zeros(100, 100)]")
    found = kernel("print(holders())")[0]
    assert "Out[" in found
    assert "('mine', 40000)" in found
    kernel("print(release())")
    assert int(kernel("print(live())")[0]) == start + 40_000
    kernel("del mine")
    assert int(kernel("print(live())")[0]) == start
    assert kernel("print(holders())")[0] == "[]\n"
