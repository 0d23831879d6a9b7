"""The gate and the story behind it: made once, executed anywhere, and always ended in a record."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import dill
import pytest
import transformers

from workbench.base.errors import ConfigurationError
from workbench.export.script import script
from workbench.gpus.catalogue import GPUS
from workbench.journal.record import Status, read_all
from workbench.models import load
from workbench.prediction.rows import blocks_for, job_for, material_for
from workbench.prediction.worker import predict_in_shadow
from workbench.techniques import REGISTRY
from workbench.training.arguments import check_arguments
from workbench.training.execute import execute
from workbench.training.job import prepare
from workbench.training.ongoing import OngoingRun
from workbench.training.run import run
from workbench.training.world import World


@pytest.fixture
def built(monkeypatch):
    """The `TrainingArguments` that were made, in their order."""
    made = []
    whole = transformers.TrainingArguments.__post_init__

    def counted(arguments):
        made.append(arguments)
        whole(arguments)

    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", counted)
    return made


@pytest.fixture
def one_step(recipe):
    return replace(recipe, steps=1)


def test_training_arguments_are_built_once(one_step, built, subtests):
    ways = {
        "run": lambda: run(one_step, device="cpu"),
        "prediction": lambda: predict_in_shadow(one_step, ["t4"], False),
        "script": lambda: script(one_step),
    }
    for name, way in ways.items():
        with subtests.test(name):
            built.clear()
            way()
            assert len(built) == 1


def test_the_gate_builds_none_and_loads_nothing(one_step, built, monkeypatch, runs_folder):
    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    prepare(one_step, World.find("cpu"))
    assert built == []
    assert not runs_folder.exists()


def test_a_job_is_executed_by_whoever_has_it_under_the_id_that_it_was_given(one_step, fine_tuned, runs_folder):
    known = fine_tuned(one_step)
    job = prepare(one_step, World.find("cpu"), folder=runs_folder)
    record = execute(OngoingRun(dill.loads(dill.dumps(job, recurse=True))))
    assert record.id == job.record.id
    assert record.losses == known.losses
    assert record.by_category == known.by_category


def test_what_an_error_was_is_on_record_and_with_the_run(one_step, monkeypatch, runs_folder):
    def failing(*_, **__):
        raise KeyError("x")

    monkeypatch.setattr(load, "load_model", failing)
    ongoing = OngoingRun(prepare(one_step, World.find("cpu"), folder=runs_folder))
    record = execute(ongoing)
    assert (record.status, record.error) == (Status.FAILED, "KeyError: 'x'")
    assert isinstance(ongoing.error, KeyError)
    assert ongoing.error.__traceback__ is not None
    assert read_all(runs_folder) == [record]


def test_what_transformers_refuses_leaves_no_record(one_step, runs_folder):
    refused = replace(one_step, arguments={"lr_scheduler_type": "nope"})
    with pytest.raises(ConfigurationError, match="arguments: transformers refuses them"):
        run(refused, device="cpu", folder=runs_folder)
    assert read_all(runs_folder) == []


def test_a_device_that_is_not_here_has_the_same_gate(one_step, monkeypatch):
    """A prediction's: the text is not read, nor the tokenizer."""
    monkeypatch.setattr(load, "load_tokenizer", lambda *_: pytest.fail("the tokenizer was read"))
    bf16 = replace(one_step, corpus="nope.txt") | REGISTRY["pure_bf16"]()
    jobs = {
        name: job_for(bf16, GPUS[name].device, material_for(bf16, blocks_for(bf16))) for name in ("t4", "a100-40gb")
    }
    assert "compute capability 8.0" in jobs["t4"].missing
    assert jobs["a100-40gb"].missing == ""
    assert jobs["t4"].arguments == jobs["a100-40gb"].arguments


@pytest.mark.parametrize(("write_s", "pause_s"), [(0.05, 2.5), (3.0, 5.0)])
def test_a_record_is_written_as_often_as_its_share_of_the_time_allows_but_soon_after_a_busy_disk(
    write_s, pause_s, one_step, monkeypatch, runs_folder
):
    from workbench.training import watch

    clock = SimpleNamespace(now_s=0.0)
    written_at_s = []
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    def slow_write(_):
        written_at_s.append(clock.now_s)
        clock.now_s += write_s

    monkeypatch.setattr(OngoingRun, "write_progress", slow_write)
    looking_on = watch.Watch(OngoingRun(prepare(one_step, World.find("cpu"), folder=runs_folder)), meter=MagicMock())
    while clock.now_s < 40:
        clock.now_s += 0.25
        looking_on.on_step_end(None, SimpleNamespace(global_step=1, max_steps=2), SimpleNamespace())
    assert written_at_s[0] == 0.5
    waits = [later - earlier for earlier, later in itertools.pairwise(written_at_s)]
    assert waits
    assert all(pause_s - 0.01 <= wait - write_s < pause_s + 0.5 for wait in waits)


def test_arguments_are_checked_by_their_own_types_after_a_parser_of_hugging_face(one_step):
    """HfArgumentParser rewrites the types of the fields, for the whole process."""
    transformers.HfArgumentParser(transformers.TrainingArguments)
    check_arguments(replace(one_step, arguments={"lr_scheduler_type": "cosine", "weight_decay": 0.1}))
    with pytest.raises(ConfigurationError, match="weight_decay cannot be 'x'"):
        check_arguments(replace(one_step, arguments={"weight_decay": "x"}))
