"""A run that was stopped, at any point and by any means, goes on from its last whole checkpoint as if nothing was."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.base.errors import ConfigurationError
from workbench.journal import checkpoints
from workbench.journal.record import Status, read_all
from workbench.journal.store import checkpoint_folder
from workbench.models import load
from workbench.techniques import GradientAccumulation, GradientCheckpointing, Lora, OptimizerOffloading
from workbench.training.run import run
from workbench.training.watch import Watch

STEPS, EVERY = 7, 2


@pytest.fixture(scope="module")
def dropping(recipe):
    """Dropout makes the state of the random numbers matter."""
    return replace(recipe, steps=STEPS, dropout=0.1)


@pytest.fixture
def stopped_after(monkeypatch):
    """Interrupt a run after one of its steps, as Ctrl-C does."""

    def stop(recipe, step, error=KeyboardInterrupt, **options):
        whole = Watch.on_step_end

        def on_step_end(self, args, state, control, **rest):
            whole(self, args, state, control, **rest)
            if state.global_step == step:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(Watch, "on_step_end", on_step_end)
            with pytest.raises(error):
                run(recipe, device="cpu", **{"checkpoint_every": EVERY, **options})

    return stop


def assert_same(resumed, uninterrupted):
    assert resumed.status is Status.OK
    assert resumed.losses == uninterrupted.losses
    assert resumed.held_out_loss == uninterrupted.held_out_loss
    assert resumed.held_out_loss_before == uninterrupted.held_out_loss_before
    assert resumed.tokens_seen == uninterrupted.tokens_seen
    assert resumed.steps_done == uninterrupted.steps_done


@pytest.mark.parametrize(("step", "begins_at"), [(2, []), (3, [2]), (5, [4]), (6, [4]), (7, [6])])
def test_after_an_interrupt_the_losses_are_those_of_a_whole_run(dropping, fine_tuned, stopped_after, step, begins_at):
    """The interrupt comes before the checkpoint of the same step."""
    stopped_after(dropping, step)
    (stopped,) = read_all()
    assert stopped.status is Status.INTERRUPTED
    resumed = run(dropping, device="cpu", resume=True)
    assert resumed.resumed_at_steps == begins_at
    assert (resumed.id == stopped.id) == bool(begins_at)
    assert_same(resumed, fine_tuned(dropping))


@pytest.mark.parametrize(
    "technique", [GradientAccumulation(steps=2), GradientCheckpointing(), Lora(rank=2)], ids=lambda t: t.name
)
def test_with_techniques_too(dropping, fine_tuned, stopped_after, technique):
    stopped_after(dropping | technique, 5)
    resumed = run(dropping | technique, device="cpu", resume=True)
    assert resumed.resumed_at_steps == [4]
    assert_same(resumed, fine_tuned(dropping | technique))


def test_twice_and_over_an_epochs_end(dropping, fine_tuned, stopped_after, text_file, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(text_file.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    recipe = replace(dropping, corpus=str(short), steps=9)
    stopped_after(recipe, 4)
    stopped_after(recipe, 7, resume=True)
    resumed = run(recipe, device="cpu", resume=True)
    assert resumed.resumed_at_steps == [2, 6]
    assert_same(resumed, run(recipe, device="cpu"))


def test_a_failure_can_be_resumed_too(dropping, fine_tuned, stopped_after):
    stopped_after(dropping, 5, error=ZeroDivisionError)
    assert_same(run(dropping, device="cpu", resume=True), fine_tuned(dropping))


def test_nothing_is_left_of_the_checkpoints_of_a_run_that_ended_well(dropping, runs_folder):
    record = run(dropping, device="cpu", checkpoint_every=EVERY)
    assert [path.name for path in runs_folder.iterdir()] == [f"{record.id}.json"]


def test_another_recipe_is_refused_before_the_model_loads(dropping, stopped_after, monkeypatch):
    stopped_after(dropping, 5)
    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigurationError, match="seed was 0 and is now 1"):
        run(replace(dropping, seed=1), device="cpu", resume=True)


def test_an_impossible_interval_is_refused(dropping):
    for every in (0, -1):
        with pytest.raises(ConfigurationError, match="checkpoint_every must be at least 1 step"):
            run(dropping, device="cpu", checkpoint_every=every)


def test_states_that_a_checkpoint_does_not_reach_are_refused_before_the_model_loads(dropping, monkeypatch, subtests):
    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    message = "optimizer_offloading keeps what training needs where a checkpoint"
    for options in ({"resume": True}, {"checkpoint_every": EVERY}):
        with subtests.test(**options):
            with pytest.raises(ConfigurationError, match=message):
                run(dropping | OptimizerOffloading(to="disk"), device="cpu", **options)
            assert read_all() == []


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before(dropping, fine_tuned, stopped_after, runs_folder):
    stopped_after(dropping, 7)
    (record,) = read_all()
    for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt", "model.safetensors", "trainer_state.json"):
        assert (checkpoint_folder(record, runs_folder) / "checkpoint-6" / name).exists()
    os.truncate(checkpoint_folder(record, runs_folder) / "checkpoint-6" / "optimizer.pt", 100)
    resumed = run(dropping, device="cpu", resume=True)
    assert resumed.resumed_at_steps == [4]
    assert_same(resumed, fine_tuned(dropping))


def rewritten(checkpoint, name, content):
    """Another content, and a manifest that vouches for it."""
    torch.save(content, checkpoint / name)
    manifest = json.loads((checkpoint / checkpoints.MANIFEST).read_text())
    manifest["files"][name] = checkpoints._describe(checkpoint / name)
    (checkpoint / checkpoints.MANIFEST).write_text(json.dumps(manifest))


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_code_in_a_hostile_pickle_is_run(dropping, stopped_after, runs_folder, tmp_path):
    stopped_after(dropping, 3)
    (record,) = read_all()
    checkpoint = checkpoint_folder(record, runs_folder) / "checkpoint-2"
    rewritten(checkpoint, "rng_state.pth", Trap(tmp_path / "trapped"))
    with pytest.raises(ConfigurationError, match=f"{checkpoint} cannot be used .*Weights only load failed"):
        run(dropping, device="cpu", resume=True)
    assert not (tmp_path / "trapped").exists()


OTHER_STATES = {
    "no states": ("optimizer.pt", {}),
    "no groups": ("optimizer.pt", {"state": {}, "param_groups": []}),
    "no scheduler": ("scheduler.pt", []),
    "no generator": ("rng_state.pth", 7),
}


def test_a_state_that_is_not_this_runs_is_named_and_nothing_is_lost(
    dropping, stopped_after, runs_folder, tmp_path, subtests
):
    """It can be read, and only the optimizer finds that it is not its own."""
    stopped_after(dropping, 3)
    (stopped,) = read_all()
    for name, (file, content) in OTHER_STATES.items():
        with subtests.test(name):
            folder = shutil.copytree(runs_folder, tmp_path / name)
            checkpoint = checkpoint_folder(stopped, folder) / "checkpoint-2"
            rewritten(checkpoint, file, content)
            message = f"resume: {checkpoint} cannot be used .* Remove the folder of this"
            with pytest.raises(ConfigurationError, match=message):
                run(dropping, device="cpu", resume=True, folder=folder)
            (after,) = read_all(folder)
            assert (after.id, after.status) == (stopped.id, Status.FAILED)


def test_a_checkpoint_that_cannot_be_written_costs_the_checkpoint_alone(dropping, fine_tuned, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    record = run(dropping, device="cpu", checkpoint_every=3)
    assert_same(record, fine_tuned(dropping))
    for step, warning in zip((3, 6), record.warnings, strict=True):
        assert warning.startswith(f"no checkpoint-{step}: nothing can be written into ")
        assert "(the disk took only a part of a file). Free some space, or set WORKBENCH_RUNS" in warning


# ---- SIGKILL, in processes of their own ----


def train_and_die(recipe, folder, event):
    """Train with checkpoints; at the n-th time that a file is opened, renamed or removed in the folder, be killed."""
    seen = [0]

    def count(*_):
        seen[0] += 1
        if seen[0] == event:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(name, arguments):
        if name in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(folder) in str(arguments[0]):
            count()

    write = torch.save

    def save(what, path, *args, **kwargs):
        write(what, path, *args, **kwargs)
        if seen[0] + 1 == event:
            os.truncate(path, os.path.getsize(path) // 2)  # as if it had come in the middle
        count()

    torch.save = save
    sys.addaudithook(audit)
    run(recipe, device="cpu", checkpoint_every=EVERY, folder=folder)
    (folder / "events").write_text(str(seen[0]))


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workbench.training.run"])
    return context


@pytest.fixture(scope="module")
def events(dropping, processes, tmp_path_factory):
    """How many there are in a whole run."""
    folder = tmp_path_factory.mktemp("counted")
    process = processes.Process(target=train_and_die, args=(dropping, folder, 0))
    process.start()
    process.join()
    return int((folder / "events").read_text())


def killed_and_resumed(recipe, whole, processes, folder, event):
    process = processes.Process(target=train_and_die, args=(recipe, folder, event))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resumed = run(recipe, device="cpu", resume=True, folder=folder)
    assert_same(resumed, whole)
    for record in read_all(folder):
        if record.status is Status.OK:  # the resumed one, or one that was killed after its last word
            assert_same(record, whole)
        else:
            assert record.status is Status.KILLED
    assert checkpoints.newest_checkpoint(checkpoint_folder(resumed, folder)) is None
    return resumed.resumed_at_steps


@pytest.mark.dear
@pytest.mark.parametrize("share", [0.2, 0.45, 0.7, 0.95])
def test_killed_while_it_writes_it_resumes(dropping, fine_tuned, processes, events, tmp_path, share):
    assert events > 20
    event = int(events * share)
    begun = killed_and_resumed(dropping, fine_tuned(dropping), processes, tmp_path, event)
    assert begun in ([], [2], [4], [6])


@pytest.mark.long
def test_killed_at_every_point_of_every_save_it_resumes(dropping, fine_tuned, processes, events, tmp_path):
    whole, begun = fine_tuned(dropping), []
    for event in range(1, events + 1):
        begun.append(killed_and_resumed(dropping, whole, processes, tmp_path / str(event), event))
    print(f"\n{events} kills at writes, every one resumed with equal losses; begun at {sorted(map(str, begun))}")


def train(recipe, folder):
    run(recipe, device="cpu", checkpoint_every=1, folder=folder)


@pytest.mark.long
def test_killed_at_random_moments_it_resumes(dropping, fine_tuned, processes, tmp_path):
    whole, chance = fine_tuned(dropping), random.Random(0)
    died = 0
    for attempt in range(30):
        folder = tmp_path / str(attempt)
        process = processes.Process(target=train, args=(dropping, folder))
        process.start()
        process.join(chance.uniform(0.2, 3.0))
        died += process.is_alive()
        process.kill()
        process.join()
        assert_same(run(dropping, device="cpu", resume=True, folder=folder), whole)
    print(f"\n30 runs, {died} of them killed at a random moment: every one ended with equal losses")
