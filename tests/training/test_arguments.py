"""What a recipe passes on to the Trainer: arguments by their own names, epochs, callbacks, programs to report to."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from every_step import EveryStep
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from workbench.advise.compare import caption, compare
from workbench.advise.frame import records
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.export.script import script
from workbench.journal.record import Record, Status, read_all
from workbench.models import load
from workbench.prediction.predict import predict
from workbench.techniques import BatchSize, Lora, Padding, SequenceLength, Streaming
from workbench.training.run import run

STOPPING = "transformers:EarlyStoppingCallback"
ARGUMENTS = {
    "lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}, "weight_decay": 0.5,
    "max_grad_norm": 0.25, "warmup_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
}  # fmt: skip


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.steps, self.arguments = 0, None

    def on_step_end(self, args, state, control, **_):
        self.steps, self.arguments = self.steps + 1, args


class Late(TrainerCallback):
    def on_train_begin(self, *_, **__):
        raise ValueError("too late")


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.values
def test_arguments_reach_the_trainer_and_act(recipe, fine_tuned):
    seen = Counting()
    record = run(replace(recipe, arguments=ARGUMENTS), device="cpu", callbacks=[seen])
    for name, value in ARGUMENTS.items():
        assert getattr(seen.arguments, name) == value
    assert seen.steps == record.steps_done == recipe.steps
    plain = fine_tuned(recipe)
    assert record.losses[0] == plain.losses[0]
    assert record.losses[-1] != plain.losses[-1]
    assert record.recipe.arguments == ARGUMENTS
    assert record.timed_steps == plain.timed_steps


@pytest.mark.values
def test_losses_are_those_that_are_logged(recipe, fine_tuned):
    some, plain = run(replace(recipe, arguments={"logging_steps": 2}), device="cpu"), fine_tuned(recipe)
    assert some.losses == pytest.approx([sum(plain.losses[i : i + 2]) / 2 for i in (0, 2, 4)], abs=1e-6)


def test_an_argument_may_change_the_memory_and_a_prediction_knows(recipe, fine_tuned):
    smooth = replace(recipe, arguments={"label_smoothing_factor": 0.1})
    measured = run(smooth, device="cpu")
    assert measured.peak_allocated_bytes > fine_tuned(recipe).peak_allocated_bytes
    assert predict(smooth, "cpu").by_category == measured.by_category


def test_noise_on_embeddings_is_predicted_too(recipe):
    """It is there, and gone before the peak."""
    noisy = replace(recipe, arguments={"neftune_noise_alpha": 5})
    plain_step, noisy_step = predict(recipe, "cpu"), predict(noisy, "cpu")
    assert noisy_step.work["memory_bytes"] > plain_step.work["memory_bytes"]
    assert noisy_step.by_category == plain_step.by_category == run(noisy, device="cpu").by_category


REFUSED_ARGUMENTS = (
    ({"wieght_decay": 0.1}, "no field of transformers.Tr.* 'wieght_decay'.* Did you mean weight_decay"),
    ({"weight_decay": "much"}, "arguments: weight_decay cannot be 'much' .Input should be a valid number"),
    ({"eval_steps": [2]}, "arguments: eval_steps cannot be .2. .Input should be a valid number"),
    ({"logging_first_step": 1}, "arguments: logging_first_step cannot be 1 .Input should be a valid boolean"),
    ({"report_to": 5}, "arguments: report_to cannot be 5 .*valid (string|list), or"),
    ({"neftune_noise_alpha": -5}, "neftune_noise_alpha cannot be -5 .Input should be greater than or equal to 0"),
    ({"label_smoothing_factor": 10}, "label_smoothing_factor cannot be 10 .Input should be less than or equal to 1"),
    ({"train_sampling_strategy": "by_length"}, "train_sampling_strategy cannot be 'by_length'. .*group_by_length"),
    ({"lr_scheduler_type": "cosin"}, "transformers refuses them .cosin is not a valid SchedulerType.*'cosine'"),
    ({"warmup_steps": -1}, "Expected value warmup_steps >= 0"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "requires an eval strategy"),
    ({"adam_beta1": 2.0}, "no optimizer can be made with adam_beta1=2.0 .Invalid beta parameter at index 0: 2"),
    ({"optim_args": "momentun"}, "no optimizer can be made with optim_args='momentun'"),
    (
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"cycles": 3}},
        "no scheduler can be made with lr_scheduler_type='cosine', lr_scheduler_kwargs=.'cycles': 3.",
    ),
    ({"report_to": "tensorbord"}, "report_to: there is no 'tensorbord'. Known: .*Did you mean tensorboard"),
    ({"num_train_epochs": 0}, "recipe: steps must be an integer of at least 1, got 0"),
    ({"num_train_epochs": 1e18}, "recipe: steps must be an integer of at least 1 and below 2.63"),
)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_what_cannot_be_passed_on_is_said_before_anything_loads(recipe, subtests):
    for arguments, message in REFUSED_ARGUMENTS:
        with subtests.test(arguments=arguments), pytest.raises(ConfigurationError, match=message):
            run(replace(recipe, arguments=arguments), device="cpu")
    assert read_all() == []


@pytest.mark.usefixtures("nothing_is_loaded")
def test_what_the_trainer_would_only_find_with_the_model_is_said_before(recipe):
    early = "transformers:EarlyStoppingCallback"
    for use in (lambda wrong: run(wrong, device="cpu"), script, lambda wrong: predict(wrong, "cpu")):
        with pytest.raises(ConfigurationError, match="callbacks: EarlyStoppingCallback .*metric_for_best_model"):
            use(replace(recipe, callbacks=(early,)))
    with pytest.raises(UnavailableError, match="arguments: optim='lomo': .*install .*lomo"):
        run(replace(recipe, arguments={"optim": "lomo"}), device="cpu")
    for refuse in (script, lambda wrong: predict(wrong, "cpu")):
        with pytest.raises(ConfigurationError, match="no optimizer can be made with adam_beta1=2.0"):
            refuse(replace(recipe, arguments={"adam_beta1": 2.0}))
    assert read_all() == []


def test_a_prediction_and_a_script_refuse_it_too(recipe):
    wrong = replace(recipe, arguments={"wieght_decay": 0.1})
    with pytest.raises(ConfigurationError, match="Did you mean weight_decay"):
        predict(wrong, "cpu")
    with pytest.raises(ConfigurationError, match="Did you mean weight_decay"):
        script(wrong)


@pytest.mark.parametrize(
    "techniques", [(), (Padding(),), (BatchSize(size=32), SequenceLength(tokens=16))], ids=["plain", "padding", "both"]
)
def test_epochs_become_steps_and_every_row_is_seen(recipe, techniques, text_file, tmp_path, monkeypatch):
    text = tmp_path / "short.txt"
    text.write_text(text_file.read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    batches_of_an_epoch = []
    get_train_dataloader = Trainer.get_train_dataloader

    def counting(trainer):
        loader = get_train_dataloader(trainer)
        batches_of_an_epoch.append(len(loader))
        return loader

    monkeypatch.setattr(Trainer, "get_train_dataloader", counting)
    asked = replace(recipe, corpus=str(text), effective_batch_size=64, techniques=techniques)
    asked = replace(asked, arguments={"num_train_epochs": 2})
    record = run(asked, device="cpu")
    assert record.steps_done == 2 * batches_of_an_epoch[0]
    assert record.recipe.steps == record.steps_done // replace(record.recipe, steps=1).shape.steps
    assert record.recipe.arguments == {"num_train_epochs": 2}
    again = run(record.recipe, device="cpu", reuse=True)
    assert again.id == record.id


def test_a_stream_has_no_epochs(recipe, nothing_is_loaded):
    with pytest.raises(ConfigurationError, match="num_train_epochs needs examples to be counted, not a stream"):
        run(replace(recipe, arguments={"num_train_epochs": 1}) | Streaming(), device="cpu")


@pytest.mark.dear
@pytest.mark.values
def test_a_callback_of_the_recipe_acts_and_the_exported_script_has_it(recipe, tmp_path):
    """The learning rate is so high that the loss rises: both stop early, at the same step with the same loss."""
    asked = replace(
        recipe, learning_rate=1.0, steps=12, callbacks=[STOPPING],
        arguments={"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss"},
    )  # fmt: skip
    record = run(asked, device="cpu")
    assert 0 < record.steps_done < 12
    assert record.recipe.callbacks == (STOPPING,)
    text = script(asked)
    assert "from transformers import" in text
    assert "trainer.add_callback(EarlyStoppingCallback)" in text
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    state = json.loads((tmp_path / "fine-tuned" / "trainer_state.json").read_text())
    assert [entry["loss"] for entry in state["log_history"] if "loss" in entry] == record.losses


def test_a_callback_that_is_given_is_in_the_record_and_its_run_is_not_taken_for_another(recipe):
    short = replace(recipe, steps=1)
    first = run(short, device="cpu", callbacks=[Counting()])
    assert first.recipe.callbacks == (f"{__name__}:Counting",)
    assert run(short, device="cpu", callbacks=[Counting()], reuse=True).id != first.id
    assert run(short, device="cpu", reuse=True).recipe_id == short.id


REFUSED_CALLBACKS = (
    ("no.such.module:Class", "No module named 'no'"),
    ("transformers:NoSuchCallback", "NoSuchCallback"),
    ("os:abort", "issubclass"),
    ("pathlib:Path", "it is no TrainerCallback"),
    ("transformers.trainer_callback:CallbackHandler", "it is no TrainerCallback|required positional"),
)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_callback_that_cannot_be_used_is_said_before_anything_loads(recipe, subtests):
    for name, reason in REFUSED_CALLBACKS:
        message = f"callbacks: {name} cannot be used .*({reason}).*Name a TrainerCallback"
        with subtests.test(name=name), pytest.raises(ConfigurationError, match=message):
            run(replace(recipe, callbacks=[name]), device="cpu")
    assert read_all() == []


def test_a_callback_that_fails_leaves_a_record(recipe):
    with pytest.raises(ValueError, match="too late"):
        run(recipe, device="cpu", callbacks=[Late()])
    assert read_all()[0].status is Status.FAILED


@pytest.mark.values
def test_runs_with_other_arguments_are_not_compared(recipe):
    short = replace(recipe, steps=2)
    for arguments in ({}, {"weight_decay": 0.5}, {"weight_decay": 0.5, "report_to": []}):
        run(replace(short, arguments=arguments), device="cpu")
    run(replace(short, arguments={"weight_decay": 0.5}) | Lora(rank=2), device="cpu")
    table = compare(records())
    assert set(table.index) == {"baseline", "lora(rank=2)"}
    assert 'with {"weight_decay": 0.5}' in caption(table)
    run(short | Lora(rank=2), device="cpu")
    assert compare(records()).attrs["arguments"] == ""


def test_a_run_is_not_resumed_with_other_arguments(recipe):
    steps = []

    def stop():
        steps.append(0)
        if len(steps) == 4:
            raise KeyboardInterrupt

    decaying = replace(recipe, arguments={"weight_decay": 0.5})
    with pytest.raises(KeyboardInterrupt):
        run(decaying, device="cpu", checkpoint_every=2, callbacks=[EveryStep(stop)])
    with pytest.raises(ConfigurationError, match="arguments was .'weight_decay': 0.5. and is now None"):
        run(recipe, device="cpu", resume=True, callbacks=[EveryStep()])


def test_what_was_recorded_before_there_were_arguments_is_read_as_ever(recipe, tmp_path):
    record = Record.start(recipe)
    assert not {"arguments", "callbacks"} & record.recipe_settings.keys()
    record.save(tmp_path)
    assert Record.read(record.path(tmp_path)).recipe.id == record.recipe_id == recipe.id


def test_a_program_that_is_not_installed_is_named_with_its_package(recipe, nothing_is_loaded, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    with pytest.raises(UnavailableError, match="report_to: .*requires wandb to be installed.*pip install wandb"):
        run(replace(recipe, arguments={"report_to": "wandb"}), device="cpu")
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: False)
    with pytest.raises(UnavailableError, match="report_to: .*requires tensorboard.*pip install tensorboard"):
        run(replace(recipe, arguments={"report_to": ["tensorboard"]}), device="cpu")
    assert read_all() == []


def test_nothing_is_reported_unless_it_is_asked_for(recipe):
    seen = Counting()
    run(replace(recipe, steps=1), device="cpu", callbacks=[seen])
    assert seen.arguments.report_to == []


@pytest.mark.values
@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_has_the_losses_of_the_record_beside_it(recipe, runs_folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record = run(replace(recipe, arguments={"report_to": "tensorboard"}), device="cpu")
    (place,) = {path.parent for path in runs_folder.rglob("events.out.*")}
    assert place.is_relative_to(runs_folder / record.id)
    events = EventAccumulator(str(place)).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == np.float32(record.losses).tolist()
    assert [event.value for event in events.Scalars("eval/loss")] == np.float32(
        [record.held_out_loss_before, record.held_out_loss]
    ).tolist()


@pytest.mark.values
@pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio")
def test_trackio_has_the_losses_of_two_runs_of_one_process(recipe, tmp_path):
    """In a process of its own: trackio reads once where its store is."""
    code = (
        "import pickle, sys; from workbench.training.run import run\n"
        "for recipe in pickle.loads(bytes.fromhex(sys.argv[1])): run(recipe, device='cpu')"
    )
    asked = [replace(recipe, seed=seed, arguments={"report_to": ["trackio"], "project": "ours"}) for seed in (0, 1)]
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", code, pickle.dumps(asked).hex()]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    script_of = "import json, sys; from trackio.sqlite_storage import SQLiteStorage as s\n"
    script_of += "print(json.dumps({r: s.get_logs('ours', r) for r in s.get_runs('ours')}))"
    read = subprocess.run(
        [sys.executable, "-c", script_of], env=environment, capture_output=True, text=True, check=True
    )
    logs = json.loads(read.stdout.splitlines()[-1])
    assert sorted(logs) == sorted(record.id for record in read_all())
    for record in read_all():
        assert [entry["train/loss"] for entry in logs[record.id] if "train/loss" in entry] == record.losses
        assert [e["eval/loss"] for e in logs[record.id] if "eval/loss" in e][-1] == record.held_out_loss


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")
def test_wandb_has_two_runs_of_one_process_as_two(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for seed in (0, 1):
        run(replace(recipe, seed=seed, arguments={"report_to": "wandb"}), device="cpu")
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_a_program_hears_of_the_last_evaluation_before_it_is_told_of_the_end(recipe, monkeypatch):
    """A program of transformers' table, in place of one that would have to be installed."""
    heard = []

    class Program(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            heard.extend(set(logs) & {"loss", "eval_loss"})
            assert args.run_name in args.output_dir

        def on_train_end(self, *_, model, **__):
            heard.append("end")

    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "neptune", Program)
    run(replace(recipe, steps=2, arguments={"report_to": ["neptune"]}), device="cpu")
    assert heard == ["eval_loss", "loss", "loss", "eval_loss", "end"]
    run(replace(recipe, steps=2), device="cpu")
    assert len(heard) == 5
    predict(replace(recipe, steps=2, arguments={"report_to": "neptune"}), "cpu")
    assert len(heard) == 5
