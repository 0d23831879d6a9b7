"""What is to be changed in somebody's script, and the script with it: run by itself, it has the same losses."""

import runpy

import pytest
from scripts import LOOP_SCRIPT, TRAINER_SCRIPT

from workbench.base.errors import ConfigurationError
from workbench.fit.candidates import list_choices
from workbench.fit.card import Card
from workbench.fit.edit import edits_of, rewrite_script
from workbench.fit.places import arguments_to_change, by_arguments, detect_names
from workbench.fit.results import Fit
from workbench.fit.search import write_program
from workbench.gpus.catalogue import gpu
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


def names_offered(trial):
    return {family[0].name for family in list_choices(trial.facts, gpu("t4"))}


def test_the_written_script_has_the_same_losses(tried, tmp_path):
    """Its own words where there are such, `apply` for the rest; the effective batch stays."""
    techniques = [GradientAccumulation(4), GradientCheckpointing(), ChunkedCrossEntropy(chunk=7), FusedGelu()]
    program, trial = tried(TRAINER_SCRIPT, *techniques)
    assert trial.facts["steps"] == 3
    text = rewrite_script(program, edits_of(trial.techniques, trial.facts))
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
    text = rewrite_script(program, edits_of(trial.techniques, trial.facts))
    assert "Trainer(model=apply(model, Lora(rank=2)), args" in text
    assert "optim='adafactor'" in text
    trainer = run_by_itself(text, tmp_path, "changed.py")["trainer"]
    assert trainer.model.peft_config
    assert type(trainer.optimizer.optimizer).__name__ == "Adafactor"


def test_what_an_argument_and_a_function_do_together(tried):
    """`step_in_backward` leaves out the Trainer's clipping: `apply` sets that, and no argument is written."""
    _, trial = tried(TRAINER_SCRIPT.replace("max_grad_norm=0.0,", ""), StepInBackward())
    assert [str(edit).partition("  ")[2] for edit in edits_of(trial.techniques, trial.facts)] == [
        "apply(Trainer(…), StepInBackward())"
    ]


def test_a_loop_gets_a_line_before_its_optimizer(tried, tmp_path):
    program, trial = tried(LOOP_SCRIPT, GradientCheckpointing(), ChunkedCrossEntropy(chunk=7))
    assert names_offered(trial) == {"activation_offloading", "allocator", "chunked_cross_entropy", "fused_gelu"}
    assert trial.facts["steps"] == 3
    text = rewrite_script(program, edits_of(trial.techniques, trial.facts))
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
    (edit,) = edits_of(trial.techniques, trial.facts)
    assert program.replace_script(None, edit.flags).script[-6:] == (
        "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4", "--bf16", "True",
    )  # fmt: skip
    assert str(edit).startswith("add to the command: --gradient")


def test_a_batch_that_is_a_variable_stays_one(tried, tmp_path):
    """Its next value is divided too, so that the effective batch is what the user says."""
    source = TRAINER_SCRIPT.replace("=8,", "=batch_size,  gradient_accumulation_steps=batch_size // 8,")
    source = source.replace("set_seed(0)", "set_seed(0)\nbatch_size = 8")
    program, trial = tried(source, GradientAccumulation(4))
    text = rewrite_script(program, edits_of(trial.techniques, trial.facts))
    assert "per_device_train_batch_size=(batch_size) // 4" in text
    args = run_by_itself(text.replace("batch_size = 8", "batch_size = 16"), tmp_path, "changed.py")["trainer"].args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 8)


def test_the_difference_is_shown_as_a_patch(tried):
    program, trial = tried(TRAINER_SCRIPT, FusedGelu())
    planned = Fit(program, Card(gpu("t4")), 3, trial, None)
    changed, lines = write_program(planned, edits_of(trial.techniques, trial.facts))
    assert changed.file.read_text() == rewrite_script(program, edits_of(trial.techniques, trial.facts))
    assert lines[-1] == f"written: {changed.file}"
    added = [line[1:] for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert added[:2] == ["from workbench import apply", "from workbench.techniques import FusedGelu"]
    assert added[2].startswith("trainer = apply(Trainer(model=model")


BY_HAND = {
    "no literal": (
        TRAINER_SCRIPT.replace("logging_steps", "bf16=bool(0), logging_steps"),
        r"bf16 is no literal there.*train\.py:9  TrainingArguments",
    ),
    "a dictionary": (TRAINER_SCRIPT.replace("=8,", "=8, **dict(tf32=None),"), "from a dictionary"),
    "a name of ours": (f"{TRAINER_SCRIPT}\n\ndef apply():\n    pass\n", "something else called apply"),
}


@pytest.mark.parametrize(("source", "reason"), BY_HAND.values(), ids=BY_HAND)
def test_what_cannot_be_written_is_said_with_its_line(source, reason, tried):
    program, trial = tried(source, GradientAccumulation(2), MixedPrecision("bf16"), FusedGelu())
    with pytest.raises(ConfigurationError, match=reason):
        rewrite_script(program, edits_of(trial.techniques, trial.facts))


def test_arguments_that_the_trainer_makes_by_itself_are_not_written_into_another_call(tried):
    source = TRAINER_SCRIPT.replace("args=arguments, ", "")
    source = source[: source.index("arguments = ")] + source[source.index("trainer = ") :]
    program, trial = tried(source, GradientCheckpointing())
    (edit,) = edits_of(trial.techniques, trial.facts)
    assert str(edit).endswith("args=TrainingArguments(…, activation_checkpointing=True)")
    with pytest.raises(ConfigurationError, match="a library makes it, on this line"):
        rewrite_script(program, [edit])


def test_arguments_that_a_library_makes_beside_those_of_the_script_are_not_meant(tried):
    source = TRAINER_SCRIPT.replace("trainer = ", "unused = Trainer(model=model)\ntrainer = ")
    program, trial = tried(source, GradientCheckpointing())
    assert "disable_tqdm=True, activation_checkpointing=True" in rewrite_script(
        program, edits_of(trial.techniques, trial.facts)
    )


def test_a_set_that_does_not_suit_is_refused(tried):
    _, trial = tried(TRAINER_SCRIPT.replace("use_cpu", "label_smoothing_factor=0.1, use_cpu"), ChunkedCrossEntropy())
    assert trial.ended_by == "refusal"
    assert "label smoothing" in trial.facts["refusal"]


def test_another_kind_of_model_is_looked_at_and_not_changed(tried):
    source = TRAINER_SCRIPT.replace("GPT2LMHeadModel", "GPT2ForSequenceClassification")
    source = source.replace('"labels": ids}', '"labels": [0] * 48}').replace("**rates", "pad_token_id=0, **rates")
    _, trial = tried(source)
    assert trial.facts["steps"] == 3
    assert "model" not in trial.facts
    assert names_offered(trial) == {"allocator", "gradient_checkpointing", "mixed_precision", "optimizer"}


def test_an_optimizer_that_is_made_before_the_trainer(tried):
    """It is no loop, gets each technique once, and another optimizer is not offered."""
    source = TRAINER_SCRIPT.replace("trainer = ", "optimizer = AdamW(model.parameters())\ntrainer = ")
    source = source.replace("Trainer(model", "Trainer(optimizers=(optimizer, None), model")
    source = source.replace("from datasets", "from torch.optim import AdamW\nfrom datasets")
    _, trial = tried(source)
    assert trial.facts["kind"] == "trainer"
    assert {"gradient_accumulation", "mixed_precision"} <= names_offered(trial)
    assert not {"optimizer", "optimizer_offloading", "step_in_backward"} & names_offered(trial)
    _, trial = tried(source, ChunkedCrossEntropy(), GradientAccumulation(2), before=trial.facts)
    assert trial.facts["steps"] == 3
    assert [str(edit).partition("  ")[2] for edit in edits_of(trial.techniques, trial.facts)] == [
        "TrainingArguments(…, gradient_accumulation_steps=2, per_device_train_batch_size=4)",
        "apply(Trainer(…), ChunkedCrossEntropy())",
    ]


def test_evaluation_and_saving_come_after_the_steps(tried, tmp_path):
    """As the script does them; a copy of its own arguments says when."""
    source = TRAINER_SCRIPT.replace('save_strategy="no"', 'save_strategy="epoch", eval_strategy="steps", eval_steps=1')
    source = source.replace("Trainer(model", 'Trainer(eval_dataset=[{"input_ids": ids[0], "labels": ids[0]}], model')
    _, trial = tried(source)
    assert trial.facts["also"] == []
    _, trial = tried(source, life=True)
    assert trial.facts["also"] == ["evaluation", "saving"]
    assert trial.facts["steps"] == 3
    assert list(tmp_path.glob("checkpoint-3/*.safetensors"))  # among what is deleted, not in the script's own folder
    assert not (tmp_path / "somewhere").exists()


def test_what_a_model_has_already_is_seen(tried):
    _, trial = tried(TRAINER_SCRIPT)
    assert "attention" in detect_names(trial.facts)  # it is fused
    assert "fused_gelu" not in detect_names(trial.facts)
    kinds = 'activation_function="gelu_pytorch_tanh", attn_implementation="eager", **rates'
    _, trial = tried(TRAINER_SCRIPT.replace("**rates", kinds))
    assert "attention" not in detect_names(trial.facts)
    assert "fused_gelu" in detect_names(trial.facts)


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
    assert (trial.facts["longest_row"], trial.facts["tokens"], trial.facts["rows"]) == (16, 16, 8)


def test_an_older_transformers_has_another_name():
    older = {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None}
    changed = arguments_to_change(GradientCheckpointing(), older)
    assert changed["gradient_checkpointing"] is True
    assert changed["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert not by_arguments(GradientCheckpointing(every_n_layers=2), {**older, "gradient_accumulation_steps": 1})
