"""A program in an interpreter that lacks what the workbench needs: arguments alone are changed there."""

import ast
from pathlib import Path

import pytest
from scripts import LOOP_SCRIPT, TRAINER_SCRIPT
from test_edit import losses_of, run_by_itself

import workbench.gpus.emulator.inside
from workbench.base.errors import ConfigurationError
from workbench.fit import any_training, inside
from workbench.fit.candidates import list_choices, sizes_of
from workbench.fit.card import Card
from workbench.fit.edit import edits_of, rewrite_script
from workbench.fit.functions import functions_to_paste
from workbench.fit.program import changes_of, find_missing_packages
from workbench.fit.results import Fit
from workbench.gpus.catalogue import gpu
from workbench.techniques import FusedGelu, GradientAccumulation

EMULATOR = Path(workbench.gpus.emulator.inside.__path__[0])
TAKEN_ALONG = [Path(inside.__file__), Path(any_training.__file__), *sorted(EMULATOR.glob("*.py"))]
SIZES = {"weights": 1, "trained": 1, "states": 2, "peak": 2**30}


@pytest.mark.parametrize(
    "file",
    [Path(inside.__file__), Path(any_training.__file__), *sorted(EMULATOR.glob("*.py"))],
    ids=lambda file: file.name,
)
def test_what_runs_there_is_written_for_python_3_9(file):
    """Annotations are not evaluated there, so that they may be written as of today."""
    tree = ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 9))
    imports = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert imports[0] == "__future__"


def test_what_an_interpreter_lacks(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '["3.9.18", {"torch": "2.3.1", "Tqdm": "4.67.1"}]'\n""")
    python.chmod(0o755)
    faults = find_missing_packages(str(python))
    assert faults[0] == "Python 3.9.18 (3.11 or newer is needed)"
    assert "torch 2.3.1 (2.10 or newer is needed)" in faults
    assert "no peft" in faults
    assert not any("tqdm" in fault or "bitsandbytes" in fault for fault in faults)
    with pytest.raises(ConfigurationError, match="nowhere does not answer as a Python"):
        find_missing_packages("nowhere")


def test_arguments_are_changed_there_and_nothing_else(tried):
    _, as_it_is = tried(TRAINER_SCRIPT)
    assert as_it_is.facts["model"] == "GPT2LMHeadModel"
    names = {family[0].name for family in list_choices(as_it_is.facts, gpu("t4"), by_arguments_alone=True)}
    assert names == {"allocator", "gradient_accumulation", "gradient_checkpointing", "mixed_precision", "optimizer"}
    changes = [GradientAccumulation(4)]
    some_program, trial = tried(TRAINER_SCRIPT, *changes, before=as_it_is.facts)
    job = changes_of(some_program, changes, as_it_is.facts)
    assert job["on_model"] == job["on_trainer"] == {}  # for which the workbench is imported there
    assert trial.facts["steps"] == 3
    text = rewrite_script(some_program, edits_of(changes, trial.facts))
    assert "per_device_train_batch_size=2" in text
    assert "workbench" not in text


def test_a_loop_takes_no_arguments(tried):
    _, trial = tried(LOOP_SCRIPT)
    choices = list_choices(trial.facts, gpu("t4"), by_arguments_alone=True)
    assert [family[0].name for family in choices] == ["allocator"]
    functions = functions_to_paste(trial.facts, gpu("t4"), sizes_of({**trial.facts, "sizes": SIZES}, 2**30, 0))
    assert "gradient_checkpointing" in functions
    assert not [text for text in functions.values() if "trainer" in text]


def test_python_before_3_11_knows_the_line_of_a_call_alone(tried):
    some_program, trial = tried(TRAINER_SCRIPT, GradientAccumulation(4))
    with_positions = rewrite_script(some_program, edits_of(trial.techniques, trial.facts))
    del trial.facts["arguments_call"]["positions"]
    assert rewrite_script(some_program, edits_of(trial.techniques, trial.facts)) == with_positions


def test_functions_stand_alone_and_do_the_same(tried, tmp_path):
    """Pasted between the Trainer and its training, each leaves the losses as they are."""
    _, trial = tried(TRAINER_SCRIPT.replace("**rates", 'activation_function="gelu_new", **rates'))
    sizes = sizes_of({**trial.facts, "sizes": SIZES}, 2**30, 0)
    functions = functions_to_paste(trial.facts, gpu("t4"), sizes)
    assert {"chunked_cross_entropy", FusedGelu.name} <= functions.keys()
    assert not {"gradient_checkpointing", "gradient_accumulation"} & functions.keys()  # they are arguments
    assert not [name for name, text in functions.items() if "workbench" in text]
    plain = run_by_itself(TRAINER_SCRIPT, tmp_path, "plain.py")["trainer"]
    pasted = f"{functions['chunked_cross_entropy']}\n\n{functions['fused_gelu']}"
    source = TRAINER_SCRIPT.replace("trainer.train()", f"{pasted}\ntrainer.train()")
    changed = run_by_itself(source, tmp_path, "changed.py")["trainer"]
    assert "chunk_loss" in changed.compute_loss.__qualname__
    assert losses_of(changed) == pytest.approx(losses_of(plain), rel=1e-4)


@pytest.mark.parametrize(
    ("own", "name"),
    [({"own_loss": "KTOTrainer"}, "chunked_cross_entropy"), ({"own_optimizer": "Lion"}, "optimizer_offloading")],
)
def test_what_the_program_makes_itself_gets_no_function(own, name, tried):
    """Pasted there it would leave a loss without its logits, or change an optimizer that nobody takes."""
    _, trial = tried(TRAINER_SCRIPT)
    sizes = sizes_of({**trial.facts, "sizes": SIZES}, 2**30, 0)
    assert name in functions_to_paste(trial.facts, gpu("t4"), sizes)
    functions = functions_to_paste({**trial.facts, **own}, gpu("t4"), sizes)
    assert FusedGelu.name in functions
    assert name not in functions


def test_what_was_not_tried_is_told(tried):
    some_program, trial = tried(TRAINER_SCRIPT)
    planned = Fit(some_program, Card(gpu("t4")), 3, trial, None, lacks=("no peft",), functions={"x": "def x()"})
    assert "has not what the workbench needs: no peft" in str(planned)
    assert "no function of ours" in str(planned)
    assert "were not run: x." in str(planned)
    assert "def x()" in str(planned)  # where arguments alone bring no answer


def test_nothing_beside_the_workbench_is_found_in_its_folder(tmp_path):
    """What is installed beside it may be for another Python."""
    (tmp_path / "workbench").mkdir()
    (tmp_path / "workbench" / "__init__.py").write_text("")
    (tmp_path / "neighbour.py").write_text("")
    finder = inside.OnlyThisPackage(str(tmp_path / "workbench"))
    assert finder.find_spec("workbench").origin == str(tmp_path / "workbench" / "__init__.py")
    assert finder.find_spec("neighbour") is None
