"""ZeRO-3 whose parts wait on a disk: what is said before it begins, and that it trains as one process does."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.errors import UnavailableError
from workbench.models.family import on_meta
from workbench.models.load import load_config
from workbench.models.source import locate
from workbench.paths import no_disk
from workbench.ranks import zero
from workbench.ranks.launch import run_on_ranks
from workbench.run.run import run

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed here")
SHARD = "zero3_nvme"
LARGEST = 8192 * 192  # numbers, in the embedded model's embedding


@pytest.fixture
def builder(monkeypatch, tmp_path):
    """DeepSpeed's, which compiles nothing here; of a compilation that was ended a lock is left."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    loaded = []
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self: True)
    monkeypatch.setattr(AsyncIOBuilder, "load", lambda self, verbose: loaded.append(self))
    monkeypatch.setattr(zero, "no_disk", lambda: "")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "async_io").mkdir()
    (tmp_path / "async_io" / "lock").touch()
    return AsyncIOBuilder, loaded


def test_each_process_has_a_folder_for_its_parts_until_they_are_forgotten():
    model = on_meta(load_config(locate("gpt2-tiny")))
    first, second = (zero.settings_of(SHARD, model)["zero_optimization"] for _ in range(2))
    (folder,) = {Path(first[part]["nvme_path"]) for part in ("offload_optimizer", "offload_param")}
    assert folder.is_dir()
    assert first == second
    assert LARGEST < first["offload_param"]["buffer_size"] < 2 * LARGEST
    zero.forget()
    assert not folder.exists()
    named = zero.configuration(SHARD, False, model, "there")["zero_optimization"]
    assert named["offload_param"]["nvme_path"] == "there"
    zero.settings_of("zero3_offload", model)
    assert not zero.SCRATCH


def test_a_lock_that_a_compilation_left_is_not_waited_for(builder, tmp_path, capsys):
    zero.open_disk("zero3_offload")
    assert not builder[1]
    zero.open_disk(SHARD)
    assert "minutes, once" in capsys.readouterr().err
    assert len(builder[1]) == 1
    assert not (tmp_path / "async_io" / "lock").exists()


def test_where_it_cannot_be_it_says_what_is_missing(builder, monkeypatch):
    monkeypatch.setattr(zero, "no_disk", no_disk)
    mounts = [SimpleNamespace(mountpoint="/", fstype="tmpfs")]
    monkeypatch.setattr("workbench.paths.disk_partitions", lambda **_: mounts)
    with pytest.raises(UnavailableError, match=r"is itself held in memory .* TMPDIR name a folder on a disk"):
        zero.open_disk(SHARD)
    monkeypatch.setattr(builder[0], "is_compatible", lambda self: False)
    with pytest.raises(UnavailableError, match="zero3_nvme needs libaio .* apt install libaio-dev"):
        zero.open_disk(SHARD)
    monkeypatch.setattr(zero, "emulated", lambda: "h100")
    with pytest.raises(UnavailableError, match="was never tried on an emulated GPU. Take zero3_offload"):
        zero.open_disk(SHARD)


@pytest.mark.long
@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="needs libaio-dev; compiled once, for minutes")
def test_it_trains_as_one_process_and_goes_on_with_what_that_began(recipe, runs_folder):
    recipe = replace(recipe, steps=5)

    def stop(so_far):
        if so_far().steps_done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, device="cpu", checkpoint_every=2, observe=stop)
    resumed = run_on_ranks(recipe, ranks=2, shard=SHARD, device="cpu", checkpoint_every=2, resume=True)
    anew = run_on_ranks(recipe, ranks=2, shard=SHARD, device="cpu", checkpoint_every=2)
    whole = run(recipe, device="cpu")
    assert resumed.resumed_at_steps == [2]
    for record in (resumed, anew):
        assert record.losses == pytest.approx(whole.losses, abs=2e-5)
        assert record.held_out_loss == pytest.approx(whole.held_out_loss, abs=2e-5)
