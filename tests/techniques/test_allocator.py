import os
import subprocess
import sys

import pytest
import torch
from every_step import EveryStep

from workbench.base.device import Device
from workbench.base.errors import UnavailableError
from workbench.export.script import script
from workbench.journal.record import Status, read_all
from workbench.techniques import Allocator
from workbench.techniques.allocator import VARIABLES
from workbench.training.run import run


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def settings():
    return torch._C._accelerator_getAllocatorSettings()


def test_without_cuda_it_is_refused_and_recorded(recipe, runs_folder):
    with pytest.raises(UnavailableError, match=r"allocator: .* On this device \(cpu\) there is none to set\. Run it"):
        run(recipe | Allocator(), device="cpu")
    (record,) = read_all(runs_folder)
    assert record.status is Status.UNAVAILABLE
    assert record.peak_allocated_bytes is None


def test_the_setting_holds_during_the_run_and_not_after_it():
    with Allocator().run_context():
        assert settings() == "expandable_segments:True"
    assert settings() == "expandable_segments:False"


def test_what_the_environment_says_is_kept(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8")
    with Allocator().run_context():
        assert settings() == "garbage_collection_threshold:0.8,expandable_segments:True"
    assert settings() == "expandable_segments:False,garbage_collection_threshold:0.8"


def test_what_the_baseline_has_too_is_refused(monkeypatch, subtests):
    assert Allocator().missing(Device("cuda")) is None
    for variable in VARIABLES:
        with subtests.test(variable), monkeypatch.context() as patch:
            patch.setenv(variable, "expandable_segments:True")
            assert "so the baseline would have it too. Unset PYTORCH_CUDA_ALLOC_CONF" in Allocator().missing(
                Device("cuda")
            )


def test_the_script_sets_the_variable_before_it_imports_torch(recipe):
    source = script(recipe | Allocator())
    line = 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"'
    assert source.index(line) < source.index("import torch")
    code = f"import os\n{line}\nimport torch; print(os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "expandable_segments:True"


@pytest.mark.gpu
def test_segments_can_be_expanded_in_that_run_alone(recipe):
    kinds = []

    def look():
        kinds.append({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})

    plain, expanded, after = (
        run(chosen, device="cuda", callbacks=[EveryStep(look)]) for chosen in (recipe, recipe | Allocator(), recipe)
    )
    assert kinds == [{False}] * recipe.steps + [{True}] * recipe.steps + [{False}] * recipe.steps
    assert expanded.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.02)
    assert after.peak_reserved_bytes == plain.peak_reserved_bytes


@pytest.mark.gpu
@pytest.mark.values
def test_the_loss_does_not_change(recipe):
    assert run(recipe, device="cuda").losses == run(recipe | Allocator(), device="cuda").losses
