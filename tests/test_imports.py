"""What is not imported before it is needed, and that nothing of it is noticed afterwards."""

import json
import os
import subprocess
import sys

import pytest

from workbench.base.imports import quick_imports
from workbench.base.launch import Child

LATER = ("torch._inductor.compile_fx",)
PROGRAM = f"""
import gc, json, sys
import torch
before = torch.compile, gc.isenabled()
from workbench import run
import bitsandbytes, transformers
loaded = [name for name in {LATER} if name in sys.modules]
print(json.dumps({{
    "loaded": loaded,
    "as before": before == (torch.compile, gc.isenabled()),
    "finders": [str(finder) for finder in sys.meta_path if type(finder).__module__.startswith("workbench")],
}}))
"""


@pytest.mark.dear
@pytest.mark.smoke
def test_a_process_imports_what_it_needs_and_is_as_before():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen == {"loaded": [], "as before": True, "finders": []}


def test_a_worker_imports_no_more():
    worker = Child(dict(os.environ), ("bitsandbytes", "transformers.trainer"), name="prediction worker")
    try:
        assert worker.call(eval, f"[m for m in {LATER} if m in __import__('sys').modules]") == []
    finally:
        worker.close()


MODULE = """
import torch

@torch.compile(dynamic=True)
def with_options(number): return number

@torch.compile
def bare(number): return number
"""


@pytest.fixture
def imported_quickly(tmp_path, monkeypatch):
    """A module of this name, and what it asked `torch.compile` for so far."""

    def import_as(name):
        (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        compiled = []
        monkeypatch.setattr("torch.compile", lambda function=None, **options: compiled.append(options) or (lambda f: f))
        with quick_imports():
            module = __import__(name)
        del sys.modules[name]  # `monkeypatch` would put it back
        return module, compiled

    return import_as


def test_others_decorators_do_what_they_did(imported_quickly):
    _, compiled = imported_quickly("somebodys")
    assert compiled == [{"dynamic": True}, {}]


def test_functions_of_bitsandbytes_are_compiled_when_one_is_called(imported_quickly):
    module, compiled = imported_quickly("bitsandbytes")
    assert compiled == [{"dynamic": True}]  # without a function nobody knows whose it is
    assert module.bare.__name__ == "bare"
    module.bare(len)
    module.bare(len)
    assert compiled == [{"dynamic": True}, {}]
