"""What is not imported before it is needed, and that nothing of it is noticed afterwards."""

import functools
import json
import os
import subprocess
import sys

import pytest

from workbench.base.imports import quick_imports
from workbench.base.launch import Child
from workbench.base.patches.torchao import Postponed

LATER = ("torch._inductor.compile_fx", "torchao")
PROGRAM = f"""
import collections, functools, gc, json, os, sys
import torch
folders = collections.Counter()
sys.addaudithook(lambda event, arguments: folders.update([str(arguments[0])] if event == "os.scandir" else []))
before = torch.compile, functools.lru_cache, gc.isenabled()
from workbench import run
import bitsandbytes, transformers, transformers.models, transformers.quantizers.quantizer_torchao as quantizer
loaded = [name for name in {LATER} if name in sys.modules]
models = [count for folder, count in folders.items() if os.path.join("transformers", "models") in folder]
print(json.dumps({{
    "loaded": loaded,
    "as before": before == (torch.compile, functools.lru_cache, gc.isenabled()),
    "finders": [str(finder) for finder in sys.meta_path if type(finder).__module__.startswith("workbench")],
    "folders of models": len(models),
    "read again": sum(count > 1 for count in models),
    "then": [quantizer.flatten_tensor_state_dict({{}})[0], "torchao" in sys.modules],
}}))
"""


@pytest.mark.dear
@pytest.mark.smoke
def test_a_process_imports_what_it_needs_and_is_as_before():
    """What transformers knows of its models it reads for itself, and again for `transformers.models`: here once."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen.pop("folders of models") > 400
    assert seen.pop("read again") < 10
    assert seen == {"loaded": [], "as before": True, "finders": [], "then": [{}, True]}


def test_a_worker_imports_no_more():
    worker = Child(dict(os.environ), ("bitsandbytes", "transformers.trainer"), name="prediction worker")
    try:
        assert worker.call(eval, f"[m for m in {LATER} if m in __import__('sys').modules]") == []
    finally:
        worker.close()


MODULE = """
import functools
import torch

@functools.lru_cache
def remembered(number): return number

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
        assert module.remembered.cache_info().maxsize == 128
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


def test_what_is_loaded_stays_and_imports_may_be_within_imports(monkeypatch):
    name = "torchao.prototype.safetensors.safetensors_support"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with quick_imports():
        with quick_imports():
            assert isinstance(sys.modules[name], Postponed)
        assert isinstance(sys.modules[name], Postponed)
    assert name not in sys.modules
    monkeypatch.setitem(sys.modules, name, functools)
    with quick_imports():
        pass
    assert sys.modules[name] is functools
