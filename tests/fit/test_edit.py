"""What is to be changed in somebody's script, and the script with it: run by itself, it has the same losses."""

import runpy

import pytest
from scripts import LOOP_SCRIPT, TRAINER_SCRIPT

from workbench.base.errors import ConfigurationError
from workbench.fit.edit import changed_script, edits_of
from workbench.fit.places import by_arguments, changed_arguments
from workbench.techniques import (
    ChunkedCrossEntropy,
    FusedGelu,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Optimizer,
    StepInBackward,
)


def run_by_itself(text, folder, name):
    """The names of a script, when it has run."""
    file = folder / name
    file.write_text(text)
    return runpy.run_path(str(file))


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_written_script_has_the_same_losses(tried, tmp_path):
    """Its own words where there are such, `apply` for the rest; the effective batch stays."""
    techniques = [GradientAccumulation(4), GradientCheckpointing(), ChunkedCrossEntropy(chunk=7), FusedGelu()]
    program, trial = tried(TRAINER_SCRIPT, *techniques)
    assert trial.seen["steps"] == 3
    text = changed_script(program, edits_of(trial))
    assert "per_device_train_batch_size=2,  # as the paper has it" in text
    assert "disable_tqdm=True, gradient_accumulation_steps=4, activation_checkpointing=True" in text
    assert "trainer = apply(Trainer(" in text
    plain = run_by_itself(TRAINER_SCRIPT, tmp_path, "plain.py")["trainer"]
    changed = run_by_itself(text, tmp_path, "changed.py")["trainer"]
    assert losses_of(changed) == pytest.approx(losses_of(plain), rel=1e-4)
    assert changed.args.per_device_train_batch_size == 2
    assert changed.model.transformer.h[0].gradient_checkpointing
    assert "chunk_loss" in changed.compute_loss.__qualname__
    for trainer in (plain, changed):
        assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 8


def test_what_makes_another_model_comes_before_the_trainer(tried, tmp_path):
    program, trial = tried(TRAINER_SCRIPT, Lora(rank=2), Optimizer("adafactor"))
    text = changed_script(program, edits_of(trial))
    assert "Trainer(model=apply(model, Lora(rank=2)), args" in text
    assert "optim='adafactor'" in text
    trainer = run_by_itself(text, tmp_path, "changed.py")["trainer"]
    assert trainer.model.peft_config
    assert type(trainer.optimizer.optimizer).__name__ == "Adafactor"


def test_what_an_argument_and_a_function_do_together(tried):
    """`step_in_backward` leaves out the Trainer's clipping: `apply` sets that, and no argument is written."""
    _, trial = tried(TRAINER_SCRIPT.replace("max_grad_norm=0.0,", ""), StepInBackward())
    assert [str(edit).partition("  ")[2] for edit in edits_of(trial)] == ["apply(Trainer(…), StepInBackward())"]


def test_a_loop_gets_a_line_before_its_optimizer(tried, tmp_path):
    program, trial = tried(LOOP_SCRIPT, GradientCheckpointing(), ChunkedCrossEntropy(chunk=7))
    assert trial.seen["steps"] == 3
    text = changed_script(program, edits_of(trial))
    assert "    apply(net, GradientCheckpointing(), ChunkedCrossEntropy(chunk=7))\n    optimizer = torch" in text
    plain = run_by_itself(LOOP_SCRIPT, tmp_path, "plain.py")["losses"]
    assert run_by_itself(text, tmp_path, "changed.py")["losses"] == pytest.approx(plain, rel=1e-5)


PARSED = TRAINER_SCRIPT.replace("TrainingArguments, set_seed", "HfArgumentParser, TrainingArguments, set_seed")
PARSED = PARSED[: PARSED.index("arguments =")] + (
    "(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    + PARSED[PARSED.index("trainer =") :]
)


def test_arguments_of_a_command_line_are_changed_there(tried):
    flags = ("--use_cpu", "--max_steps", "4", "--per_device_train_batch_size", "8", "--save_strategy", "no")
    program, trial = tried(PARSED, GradientAccumulation(2), MixedPrecision("bf16"), arguments=flags)
    (edit,) = edits_of(trial)
    assert program.changed(flags=edit.flags).script[-6:] == (
        "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4", "--bf16", "True",
    )  # fmt: skip
    assert str(edit).startswith("add to the command: --gradient")


BY_HAND = {
    "no literal": (TRAINER_SCRIPT.replace("=8,", "=int('8'),"), r"no literal there.*train\.py:9  TrainingArguments"),
    "a dictionary": (TRAINER_SCRIPT.replace("=8,", "=8, **dict(tf32=None),"), "from a dictionary"),
    "a name of ours": (f"{TRAINER_SCRIPT}\n\ndef apply():\n    pass\n", "something else called apply"),
}


@pytest.mark.parametrize(("source", "reason"), BY_HAND.values(), ids=BY_HAND)
def test_what_cannot_be_written_is_said_with_its_line(source, reason, tried):
    program, trial = tried(source, GradientAccumulation(2), FusedGelu())
    with pytest.raises(ConfigurationError, match=reason):
        changed_script(program, edits_of(trial))


def test_a_set_that_does_not_suit_is_refused(tried):
    _, trial = tried(TRAINER_SCRIPT.replace("use_cpu", "label_smoothing_factor=0.1, use_cpu"), ChunkedCrossEntropy())
    assert trial.ended_by == "refusal"
    assert "label smoothing" in trial.seen["refusal"]


def test_another_kind_of_model_is_looked_at_and_not_changed(tried):
    source = TRAINER_SCRIPT.replace("GPT2LMHeadModel", "GPT2ForSequenceClassification")
    source = source.replace('"labels": ids}', '"labels": [0] * 48}').replace("**rates", "pad_token_id=0, **rates")
    _, trial = tried(source)
    assert trial.seen["steps"] == 3
    assert "model" not in trial.seen
    assert "GPT2ForSequenceClassification is no causal" in trial.seen["no_model"]


def test_the_longest_rows_come_first(tried):
    source = TRAINER_SCRIPT.replace("range(16)] for row", "range(1 + row % 16)] for row").replace('"labels"', '"other"')
    source = source.replace("Trainer(model", "Trainer(data_collator=collate, model")
    source = source.replace("import Dataset", "import Dataset\nimport torch", 1).replace(
        "trainer = ",
        """def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "labels": ids}


trainer = """,
    )
    _, trial = tried(source)
    assert (trial.seen["longest_row"], trial.seen["tokens"], trial.seen["rows"]) == (16, 16, 8)


def test_an_older_transformers_has_another_name():
    older = {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}
    changed = changed_arguments(GradientCheckpointing(), older)
    assert changed["gradient_checkpointing"] is True
    assert changed["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert not by_arguments(GradientCheckpointing(every_n_layers=2), {**older, "gradient_accumulation_steps": 1})
