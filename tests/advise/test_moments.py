"""In which moment a message came: frames as Python, IPython and rich write them."""

import pytest

from workbench.advise.message import read_message
from workbench.advise.moments import MOMENTS, PAGE, STEPPING, moment_of
from workbench.base.paths import ROOT

MESSAGE = "torch.OutOfMemoryError: CUDA out of memory."


def traceback(*functions):
    frames = [
        f'  File "/site-packages/torch/optim/x.py", line {n}, in {name}\n    x()' for n, name in enumerate(functions)
    ]
    return "\n".join(["Traceback (most recent call last):", *frames, MESSAGE])


@pytest.mark.parametrize(
    ("functions", "doing"),
    [
        (("<module>", "prepare_model_for_kbit_training"), "prepared for QLoRA"),
        (("train", "_maybe_log_save_evaluate", "evaluate", "evaluation_loop", "forward"), "evaluated"),
        (("train", "evaluate", "prediction_step", "generate", "forward"), "generated"),
        (("train", "_inner_training_loop", "_load_optimizer_and_scheduler", "load"), "to resume"),
        (("train", "_maybe_log_save_evaluate", "_save_checkpoint", "save_model"), "saving"),
        (("train", "training_step", "compute_loss", "forward"), "forward pass"),
        (("train", "training_step", "backward", "backward", "forward"), "backward pass"),
        (("train", "step", "_init_group"), "optimizer's step"),
    ],
)
def test_the_frames_tell_what_was_being_done(functions, doing):
    assert doing in moment_of(traceback(*functions))
    assert doing in str(read_message(traceback(*functions)))


def test_ipython_and_rich_write_frames_otherwise():
    assert "evaluated" in moment_of(f"File /x/trainer.py:3051, in Trainer.evaluate(self, rows)\n{MESSAGE}")
    assert "evaluated" in moment_of(f"│ /x/trainer.py:3051 in evaluate │\n{MESSAGE}")
    assert "saving" in moment_of(f"/x/trainer.py in save_model(self)\n{MESSAGE}")


def test_a_programs_own_step_is_not_the_optimizers():
    own = traceback("main", "step", "forward").replace("torch/optim", "model")
    assert "forward pass" in moment_of(own)
    assert moment_of(traceback("step").replace("torch/optim", "model")) == ""


def test_lines_of_code_are_no_frames_and_later_tracebacks_are_another_matter():
    assert moment_of(f'  File "a.py", line 3, in train\n    for row in evaluate(rows):\n{MESSAGE}') == ""
    assert moment_of(MESSAGE) == ""
    assert "forward" in moment_of(traceback("forward") + "\n" + traceback("save_model"))
    assert "saving" in moment_of(traceback("forward").replace(MESSAGE, "KeyError: 1") + "\n" + traceback("save_model"))


def test_the_page_has_the_sections():
    headings = [line.removeprefix("## ") for line in (ROOT / PAGE).read_text(encoding="utf-8").splitlines()]
    for moment in MOMENTS:
        assert set(moment.sections) <= set(headings)


def test_the_trainer_and_peft_have_these_functions():
    from peft import LoraModel, prepare_model_for_kbit_training
    from transformers import GenerationMixin, PreTrainedModel, Trainer

    known = {name for cls in (Trainer, PreTrainedModel, GenerationMixin, LoraModel) for name in dir(cls)}
    known.add(prepare_model_for_kbit_training.__name__)
    for moment in MOMENTS:
        if moment.sections != STEPPING:
            assert moment.functions & known, moment
