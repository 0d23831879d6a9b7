"""What is not imported before it is needed, and that nothing of it is noticed afterwards."""

import functools
import json
import os
import subprocess
import sys

import pytest

from workbench.gpus.process import Worker
from workbench.imports import Postponed, quick_imports

LATER = ("torch._inductor.compile_fx", "torchao")
PROGRAM = """
import functools, gc, json, sys
import torch
before = torch.compile, functools.lru_cache, gc.isenabled()
{how}
import bitsandbytes, transformers, transformers.models, transformers.quantizers.quantizer_torchao as quantizer
reader = transformers.utils.import_utils.create_import_structure_from_path
print(json.dumps({{
    "loaded": [name for name in {later} if name in sys.modules],
    "as before": before == (torch.compile, functools.lru_cache, gc.isenabled()),
    "finders": [str(one) for one in sys.meta_path if "_compile_later" in str(one)],
    "folders": tuple(reader.cache_info()),
    "read": quantizer.flatten_tensor_state_dict({{}})[0],
    "then": "torchao" in sys.modules,
}}))
"""


@pytest.mark.parametrize("how", ["from workbench import run", "from workbench.imports import imported; imported()"])
def test_a_process_imports_what_it_needs_and_is_as_before(how):
    program = PROGRAM.format(how=how, later=LATER)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    hits, folders, _, remembered = found.pop("folders")
    assert folders == remembered > 400
    assert hits > 400  # read for `transformers`, and again for `transformers.models`
    assert found == {"loaded": [], "as before": True, "finders": [], "read": {}, "then": True}


def test_a_worker_imports_no_more():
    worker = Worker(dict(os.environ), ("bitsandbytes", "transformers.trainer"), name="prediction worker")
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


@pytest.mark.parametrize("name", ["bitsandbytes", "somebodys"])
def test_others_decorators_do_what_they_did(name, tmp_path, monkeypatch):
    (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    compiled = []
    monkeypatch.setattr("torch.compile", lambda function=None, **options: compiled.append(options) or (lambda f: f))
    with quick_imports():
        made = __import__(name)
    monkeypatch.delitem(sys.modules, name)
    assert made.remembered.cache_info().maxsize == 128
    if name == "somebodys":
        assert compiled == [{"dynamic": True}, {}]
        return
    assert compiled == [{"dynamic": True}]  # without a function nobody knows whose it is
    assert made.bare.__name__ == "bare"
    made.bare(len)
    made.bare(len)
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
