"""Real trainings of the small model from the panel, in a process that imports all libraries."""

import platform
import subprocess
import sys
import time
from dataclasses import replace

import ipywidgets as w
import pytest

from workbench.base.errors import ConfigurationError
from workbench.journal.record import Record, Status, read_all
from workbench.recipe import Recipe
from workbench.widgets import runner
from workbench.widgets.playground import Playground
from workbench.widgets.runner import RUNNER


def finish(playground):
    RUNNER.wait(120)
    assert not RUNNER.running


@pytest.mark.dear
@pytest.mark.smoke
def test_a_run_ends_with_its_numbers_and_is_listed(playground, tmp_path):
    train = playground.train
    train.start.click()
    assert train.start.disabled
    assert not train.stop.disabled
    finish(playground)
    (record,) = read_all(tmp_path)
    assert record.status is Status.OK
    assert f"Held-out loss {record.held_out_loss_before:.3f} → {record.held_out_loss:.3f}" in train.status.value
    assert train.progress.value == train.progress.max == record.steps_done
    assert "Training loss: baseline from" in train.live.value
    assert "Predicted 3.0 GiB, measured " in train.live.value
    assert f"<td>{record.held_out_loss:.3f}</td>" in train.runs.value
    assert not train.start.disabled
    assert train.stop.disabled


@pytest.mark.dear
def test_stop_ends_it_within_a_second_and_leaves_a_record(playground, recipe, tmp_path):
    playground.form.show(replace(recipe, steps=100_000))
    playground.train.start.click()
    while playground.train.progress.value == 0:
        time.sleep(0.02)
    stopped = time.monotonic()
    playground.train.stop.click()
    assert "Stopping" in playground.train.status.value
    RUNNER.wait(60)
    print(f"stopped after {time.monotonic() - stopped:.2f} s")
    assert [record.status for record in read_all(tmp_path)] == [Status.INTERRUPTED]
    assert "interrupted after" in playground.train.status.value
    assert not playground.train.start.disabled


@pytest.mark.dear
def test_another_panel_of_the_kernel_shows_the_same_training_and_can_stop_it(playground, recipe, tmp_path):
    playground.form.show(replace(recipe, steps=100_000))
    playground.train.start.click()
    while playground.train.progress.value == 0:
        time.sleep(0.02)
    other = Playground(recipe, folder=tmp_path)
    assert "step" in other.train.status.value, "as in a page that was reloaded, or a cell that ran again"
    assert other.train.start.disabled
    with pytest.raises(ConfigurationError, match="is training in this kernel"):
        RUNNER.start(recipe, folder=tmp_path)
    other.train.stop.click()
    RUNNER.wait(60)
    for panel in (playground, other):
        assert "interrupted after" in panel.train.status.value
        assert not panel.train.start.disabled
    assert len(read_all(tmp_path)) == 1


@pytest.mark.dear
def test_a_step_that_takes_long_is_stopped_in_its_middle(playground, monkeypatch, tmp_path):
    def one_long_step():
        from workbench.training.elsewhere import execute_in_child
        from workbench.training.trainer import MeteredTrainer

        def endless(self, *_, **__):
            (tmp_path / "inside").touch()
            while True:
                time.sleep(0.01)

        MeteredTrainer.training_step = endless
        return execute_in_child()

    monkeypatch.setattr(runner, "execute_in_child", one_long_step)
    playground.train.start.click()
    while not (tmp_path / "inside").exists():
        time.sleep(0.02)
    playground.train.stop.click()
    RUNNER.wait(20)
    assert [record.status for record in read_all(tmp_path)] == [Status.INTERRUPTED]


@pytest.mark.dear
def test_a_failure_is_an_alarm_with_its_reason(playground, monkeypatch, tmp_path):
    def fail():
        from workbench.training import execute
        from workbench.training.elsewhere import execute_in_child

        def build_trainer(*_, **__):
            raise ValueError("<script>boom</script>")

        execute.build_trainer = build_trainer
        return execute_in_child()

    monkeypatch.setattr(runner, "execute_in_child", fail)
    playground.train.start.click()
    finish(playground)
    assert "failed after 0 steps. ValueError: &lt;script&gt;boom" in playground.train.status.value
    assert "wb-alarm" in playground.train.status.value
    assert [record.status for record in read_all(tmp_path)] == [Status.FAILED]


@pytest.mark.dear
def test_what_is_refused_before_it_starts_is_said(playground, recipe, tmp_path):
    (tmp_path / "short.txt").write_text("To be, or not to be: that is the question. " * 4)
    playground.form.show(replace(recipe, corpus=str(tmp_path / "short.txt")))
    playground.train.start.click()
    finish(playground)
    assert "training blocks of 32 tokens, but a batch needs 8" in playground.train.status.value
    assert read_all(tmp_path) == []
    assert not playground.train.start.disabled


@pytest.mark.dear  # the doctor looks for advice meanwhile, with predictions
def test_a_cap_that_is_too_small_ends_as_out_of_memory(playground, recipe, tmp_path):
    playground.train.cap.value = "3MiB"
    playground.train.start.click()
    RUNNER.wait(60)
    assert [record.status for record in read_all(tmp_path)] == [Status.OOM]
    assert "oom after" in playground.train.status.value
    assert "wb-alarm" in playground.train.status.value
    assert not playground.train.start.disabled, "the next may begin while advice on the last is looked for"
    playground.form.controls["effective_batch_size"].value = "4"
    assert not playground.train.start.disabled
    playground.train.cap.value = ""
    playground.train.start.click()
    finish(playground)
    assert [record.status for record in read_all(tmp_path)] == [Status.OOM, Status.OK]


def test_a_cap_that_cannot_be_read_keeps_start_off(playground, subtests):
    for cap in ("lots", "8"):
        with subtests.test(cap=cap):
            playground.train.cap.value = cap
            assert playground.train.start.disabled
            assert "Start is off: memory cap:" in playground.train.what.value
            playground.train.cap.value = ""
            assert not playground.train.start.disabled


def test_start_is_off_for_what_this_machine_has_not(playground, monkeypatch):
    monkeypatch.setattr("workbench.techniques.qlora.find_spec", lambda name: None)
    playground.form.toggles["qlora"].box.value = True
    assert playground.train.start.disabled
    assert "pip install bitsandbytes" in playground.train.what.value


def test_a_large_model_is_predicted_and_a_small_one_trained_in_its_place(playground, predicted):
    playground.form.show(Recipe(model="gpt2-xl", sequence_length=1024))
    playground.train.suggest(playground.form.recipe())
    assert playground.gauge.wait()
    assert "gpt2-xl" in {recipe.model for recipe, _ in predicted}
    assert playground.train.recipe_to_train() == Recipe(model="gpt2-tiny", sequence_length=128)
    assert "Start trains gpt2-tiny with the text" in playground.train.what.value
    playground.train.stands_in.value = False
    assert playground.train.recipe_to_train().model == "gpt2-xl"


def test_a_run_whose_kernel_ended_is_told_of_with_its_steps(recipe, predicted, tmp_path):
    gone = {"host": platform.node(), "pid": 2**22 + 1, "start": "0"}
    record(status=Status.RUNNING, owner=gone, steps_done=13).save(tmp_path)
    panel = Playground(recipe, folder=tmp_path)
    assert "killed after 13 steps" in panel.train.status.value
    assert panel.openers["Train it here"].value, "it is told where it can be seen"
    assert not Playground(recipe, folder=tmp_path).openers["Train it here"].value, "once"


def test_start_is_off_while_the_recipe_cannot_be_used(playground):
    playground.form.controls["learning_rate"].value = "fast"
    assert playground.train.start.disabled
    playground.form.controls["learning_rate"].value = ""
    assert not playground.train.start.disabled


def test_without_a_live_page_it_shows_words_and_bars(playground, monkeypatch, capsys):
    playground.gauge.wait()
    page = playground.as_page()
    assert "Fits," in page
    assert "jupyter.widget" not in page
    assert "<script" not in page


def test_a_cell_that_runs_again_ends_its_panel_and_no_other(recipe, predicted, tmp_path, monkeypatch, subtests):
    """Some front ends do not name their cells: there every panel may still be looked at."""
    monkeypatch.setattr("workbench.widgets.playground.live_page", lambda: True)
    monkeypatch.setattr("workbench.widgets.playground.display", lambda *_, **__: None)
    first, second = Playground(recipe, folder=tmp_path), Playground(recipe, folder=tmp_path)
    ended = []
    monkeypatch.setattr(Playground, "close", lambda self: ended.append(self))
    for name_of_the_cell, ended_panels in (("cell-1", [first]), ("", [])):
        request = {"metadata": {"cellId": name_of_the_cell}}
        monkeypatch.setattr("workbench.widgets.playground.request", lambda answer=request: answer)
        monkeypatch.setattr(Playground, "_in_cell", {})
        with subtests.test(cell=name_of_the_cell):
            ended.clear()
            for panel in (first, first, second):
                panel._ipython_display_()
            assert ended == ended_panels


def record(label="<b>x</b>", status=Status.OK, steps=3, **more):
    made = Record.start(Recipe(), device_kind="cpu")
    return replace(made, label=label, status=status, losses=[5.0 - i for i in range(steps)], **more)


def test_the_newest_runs_are_listed_escaped(recipe, predicted, tmp_path):
    record(steps_done=13).save(tmp_path)
    train = Playground(recipe, folder=tmp_path).train
    assert "&lt;b&gt;x" in train.runs.value
    assert "<b>x" not in train.runs.value
    assert "<td>13</td>" in train.runs.value
    assert "NA" not in train.runs.value
    assert "nan" not in train.runs.value.lower()


@pytest.mark.dear
def test_headless_use_never_imports_the_widgets():
    code = "import sys, workbench, workbench.training.run, workbench.__main__; print('ipywidgets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_views_are_widgets(playground):
    assert isinstance(playground.view, w.Box)
