"""The logic of the widgets, without a browser: values are set and buttons are clicked in Python."""

import platform
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from importlib import import_module

import ipywidgets as w
import psutil
import pytest

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS
from workbench.journal.record import Record, Status, read_all
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, GradientCheckpointing, Lora
from workbench.widgets import pages, runner
from workbench.widgets.controls import TOOLTIP, RecipeForm
from workbench.widgets.gauge import Gauge, Limit
from workbench.widgets.history import History, overlay
from workbench.widgets.playground import Playground
from workbench.widgets.runner import RUNNER
from workbench.widgets.savings import Savings


class Forecast:
    """What the gauge reads of a prediction."""

    def __init__(self, peak=3 * 2**30, capacity=4 * 2**30):
        self.gpu, self.context_bytes, self.capacity_bytes = "t4", 2**29, capacity
        self.peak_allocated_bytes = self.peak_reserved_bytes = peak
        self.by_category = {str(c): 0 for c in Category} | {"weights": peak - 100, "activations": 100}
        self.source, self.timeline = "emulated:t4", None
        self.peak_phase, self.peak_operation = "backward", "aten.<b>mm</b>"

    @property
    def need_bytes(self):
        return self.peak_reserved_bytes + self.context_bytes


@pytest.fixture
def predicted(monkeypatch):
    """No worker: the answers are made up, the questions are kept."""
    asked = []

    def predictor(recipe, gpu, **_):
        asked.append((recipe, gpu))
        return Forecast()

    monkeypatch.setattr("workbench.widgets.part.predict", predictor)
    monkeypatch.setattr(import_module("workbench.prediction.predict"), "predict", predictor)
    return asked


@pytest.fixture
def form():
    changes = []
    made = RecipeForm(Recipe(model="gpt2-tiny"))
    made.changed = lambda: changes.append(1)
    made.changes = changes
    made.suit((8, 0))
    return made


# ---- controls ----


def test_every_technique_and_every_setting_has_its_control(form):
    assert set(form.toggles) == set(REGISTRY)
    for name, toggle in form.toggles.items():
        assert set(toggle.controls) == {field.name for field in fields(REGISTRY[name])}
        for field in fields(REGISTRY[name]):
            assert field.metadata["help"] in getattr(toggle.controls[field.name], TOOLTIP)
    assert set(form.controls) == {f.name for f in fields(Recipe) if "help" in f.metadata}


def test_the_controls_give_the_recipe_they_were_set_to(form):
    recipe = Recipe(
        model="gpt2", effective_batch_size=16, learning_rate=2e-4, dropout=0.0, seed=7,
        arguments={"weight_decay": 0.1}, callbacks=["a.b:C"],  # have no control, and stay
        techniques=(Lora(rank=3, alpha=5.0), GradientCheckpointing(use_reentrant=True)),
    )  # fmt: skip
    form.show(recipe)
    assert form.recipe() == recipe
    form.show(Recipe(model="gpt2-tiny"))
    assert form.recipe() == Recipe(model="gpt2-tiny")


def test_switching_a_technique_on_adds_it_and_shows_its_settings(form, subtests):
    for name, technique in REGISTRY.items():
        with subtests.test(technique=name):
            toggle = form.toggles[name]
            assert "wb-hidden" in toggle.settings._dom_classes
            before = len(form.changes)
            toggle.box.value = True
            assert len(form.changes) > before
            assert "wb-hidden" not in toggle.settings._dom_classes
            assert form.recipe().techniques == (technique(),)
            toggle.box.value = False
            assert form.recipe().techniques == ()


def test_what_cannot_be_combined_is_greyed_with_the_reason(form):
    form.toggles["lora"].box.value = True
    other = form.toggles["qlora"]
    assert other.box.disabled
    assert "qlora brings an adapter beside the frozen model, which lora forbids" in other.reason.value
    form.toggles["lora"].box.value = False
    assert not other.box.disabled
    assert other.reason.value == ""


def test_a_batch_of_six_is_accumulated_in_two_pieces(form):
    accumulation = form.toggles["gradient_accumulation"]
    form.controls["effective_batch_size"].value = "6"
    assert not accumulation.box.disabled, "the default of 4 does not divide it, but 2 does"
    accumulation.box.value = True
    assert form.error.value == ""
    assert form.recipe().techniques[0].settings() == {"steps": 2}


def test_where_a_setting_would_help_its_field_is_there(form):
    smaller = form.toggles["batch_size"]
    form.controls["effective_batch_size"].value = "7"
    assert not smaller.box.disabled
    smaller.box.value = True
    assert "Possible sizes for this batch: 1." in form.error.value
    assert "wb-hidden" not in smaller.settings._dom_classes
    smaller.controls["size"].value = "1"
    assert form.error.value == ""


def test_what_a_card_cannot_do_is_not_what_a_switch_offers(form):
    form.suit((7, 5))  # no bf16
    form.toggles["mixed_precision"].box.value = True
    assert form.recipe().techniques[0].settings() == {"dtype": "fp16"}


def test_settings_of_a_switch_are_kept_while_it_is_off(form):
    lora = form.toggles["lora"]
    lora.box.value = True
    lora.controls["rank"].value = "32"
    lora.box.value = False
    form.controls["steps"].value = "13"
    lora.box.value = True
    assert form.recipe().techniques == (Lora(rank=32),)


def test_a_number_is_never_changed_without_a_word(form, subtests):
    for typed, words in (("1.5", "steps must be an integer"), ("0", "at least 1"), ("", "integer")):
        with subtests.test(typed=typed):
            form.controls["steps"].value = typed
            assert words in form.error.value
            assert form.valid() is None
            form.controls["steps"].value = "3"
            assert form.error.value == ""


def test_a_setting_out_of_range_is_said_and_the_control_stays_usable(form):
    form.toggles["lora"].box.value = True
    form.toggles["lora"].controls["alpha"].value = "<b>much"
    assert "lora: alpha must be a number" in form.error.value
    assert "<b>much" not in form.error.value
    with pytest.raises(ConfigurationError):
        form.recipe()
    form.toggles["lora"].controls["alpha"].value = "8"
    assert form.error.value == ""
    assert form.recipe().techniques == (Lora(alpha=8.0),)


# ---- gauge ----


def gauge_with(predictor, gpu="t4"):
    gauge = Gauge(gpu)
    gauge.predictor = predictor
    return gauge


def shown(found, limit):
    gauge = gauge_with(lambda recipe, gpu: found, limit.gpu)
    gauge.budget.value = f"{limit.budget_bytes}B" if limit.budget_bytes else ""
    gauge.show(Recipe())
    assert gauge.wait(10)
    return " ".join(gauge.page.value.split())


def test_the_page_says_in_words_what_the_bar_shows_and_is_escaped():
    page = shown(Forecast(), Limit("t4"))
    assert "<b>✓ Fits.</b> 3.5 GiB of the 14.6 GiB of NVIDIA T4" in page
    assert 'role="img" aria-label="✓ Fits. weights 3.0 GiB' in page
    assert "<b>mm</b>" not in page
    assert "✗ Does not fit, over by 2.0 GiB." in shown(Forecast(), Limit("t4", 2**30))
    assert "✓ Fits." in shown(Forecast(peak=2**30), Limit("t4", 2**30)), "to the byte"


def test_the_bold_number_is_the_sum_of_the_legend(subtests):
    """A limit of one's own is for what is reserved, without the context; all that a device has, for both."""
    forecast = Forecast()
    forecast.peak_reserved_bytes = forecast.peak_allocated_bytes + 10
    reserved, context = forecast.peak_reserved_bytes, forecast.context_bytes
    card, memory_here = GPUS["t4"], psutil.virtual_memory().total
    for limit, needed, have, have_with_context in (
        (Limit("t4"), reserved + context, card.memory_bytes, card.memory_bytes),
        (Limit("t4", 2**30), reserved, 2**30, 2**30 + card.context_bytes_estimate),
        (Limit("cpu"), reserved + context, memory_here, memory_here),
    ):
        with subtests.test(limit=limit):
            assert sum(limit.parts_of(forecast).values()) == needed
            assert limit.have_bytes == have
            assert limit.limit_bytes == have_with_context


def test_where_a_bar_is_overfull_the_end_of_the_memory_is_marked():
    overfull = shown(Forecast(), Limit("t4", 2**31))
    assert "the memory ends here" in overfull
    assert "left: 66.67%" in overfull
    assert "the memory ends here" not in shown(Forecast(), Limit("t4", 3 * 2**30))


def test_an_old_verdict_is_dimmed_while_the_next_is_predicted():
    release = threading.Event()

    def slow(recipe, gpu):
        assert recipe.steps == 1 or release.wait(10)
        return Forecast()

    gauge = gauge_with(slow)
    gauge.show(Recipe(steps=1))
    gauge.wait(10)
    gauge.show(Recipe(steps=2) | Lora())
    assert "predicting lora" in gauge.status.value
    assert "wb-old" in gauge.view._dom_classes
    assert "Fits" in gauge.page.value
    release.set()
    gauge.wait(10)
    assert "wb-old" not in gauge.view._dom_classes
    assert gauge.status.value == ""


def test_the_gauge_answers_the_newest_question_only():
    release, asked = threading.Event(), []

    def slow(recipe, gpu):
        asked.append(recipe.steps)
        release.wait(10)
        return Forecast()

    gauge = gauge_with(slow)
    for steps in (1, 2, 3, 4):
        gauge.show(Recipe(steps=steps))
        while not asked:
            time.sleep(0.01)
    release.set()
    gauge.wait(10)
    assert asked[0] == 1
    assert asked[-1] == 4
    assert len(asked) <= 3, "those in between were never asked"


def test_what_nobody_waits_for_comes_after_the_gauge(form):
    inside, release, order = threading.Event(), threading.Event(), []

    def slow(recipe, gpu):
        inside.set()
        assert release.wait(10)
        order.append("gauge")
        return Forecast()

    gauge, savings = gauge_with(slow), Savings(form.toggles)
    savings.predictor = lambda *_: order.append("saving") or Forecast()
    savings.quiet_s = 0.01
    gauge.show(Recipe())
    assert inside.wait(10)
    savings.show(Recipe(), "t4")
    time.sleep(0.1)
    release.set()
    assert savings.wait(20)
    assert order[0] == "gauge"
    assert "saving" in order


def test_a_budget_that_cannot_be_read_is_said(subtests):
    for budget in ("lots", "8", "-1GiB"):
        with subtests.test(budget=budget):
            gauge = gauge_with(lambda recipe, gpu: Forecast())
            gauge.budget.value = budget
            gauge.show(Recipe())
            assert gauge.wait(10)
            assert "limit" in gauge.page.value
            assert "⚠" in gauge.page.value


def test_an_error_of_the_prediction_is_said_and_the_next_one_works():
    answers = [ConfigurationError("no <i>such</i> thing"), ValueError("broken")]

    def failing(recipe, gpu):
        if answers:
            raise answers.pop(0)
        return Forecast()

    gauge = gauge_with(failing)
    for words in ("no &lt;i&gt;such", "ValueError broken", "Fits."):
        gauge.show(Recipe())
        gauge.wait(10)
        assert words in gauge.page.value


def test_an_error_while_an_answer_is_shown_is_told_and_the_next_answer_is_shown(subtests):
    """By whoever looks on: the part says so, and goes on."""
    errors = [OSError("the page is <gone>")]

    def shown():
        if errors:
            raise errors.pop()

    gauge = gauge_with(lambda recipe, gpu: Forecast())
    gauge.shown = shown
    for text in ("OSError the page is &lt;gone&gt;", "Fits."):
        with subtests.test(text=text):
            gauge.show(Recipe())
            assert gauge.wait(10)
            assert text in gauge.page.value


def test_an_error_that_cannot_even_be_told_is_not_the_end(form, capsys):
    savings = Savings({"lora": form.toggles["lora"]})
    savings.quiet_s = 0
    savings.predictor = lambda *_: Forecast()
    toggle = savings.toggles["lora"]
    savings.put = lambda answer: 1 / 0
    savings.show(Recipe(), "t4")
    assert savings.wait(10)
    assert "ZeroDivisionError" in capsys.readouterr().err
    del savings.put
    savings.show(Recipe(), "t4")
    assert savings.wait(10)
    assert "±0 B" in toggle.saving.value


# ---- what each switch saves ----


def test_each_switch_says_what_it_saves(form):
    def predictor(recipe, gpu):
        if recipe.techniques and recipe.techniques[0].name == "dora":
            raise ConfigurationError("not on this <card>")
        return Forecast(peak=2**30 if recipe.techniques else 3 * 2**30)

    savings = Savings(form.toggles)
    savings.predictor = predictor
    form.toggles["gradient_checkpointing"].box.value = True
    savings.quiet_s = 0.01
    savings.show(Recipe(), "t4")
    assert savings.wait(20)
    assert "−2.0 GiB" in form.toggles["lora"].saving.value
    assert "not here" in form.toggles["dora"].saving.value
    assert "not on this &lt;card&gt;" in form.toggles["dora"].saving.value
    assert "±0 B" in form.toggles["gradient_checkpointing"].saving.value, "it is on in neither, or in both"
    savings.show(None, "t4")
    assert "wb-old" in form.toggles["lora"].saving._dom_classes


# ---- playground: real trainings of the small model, in a process that imports all libraries ----


@pytest.fixture
def playground(recipe, predicted, tmp_path):
    return Playground(replace(recipe, steps=2), folder=tmp_path)


def finish(playground):
    RUNNER.wait(120)
    assert not RUNNER.running


@pytest.mark.dear
@pytest.mark.smoke
def test_a_run_ends_with_its_numbers_and_is_in_the_history(playground, tmp_path):
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
    assert playground.history.choice.options[0][1] == record.id
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
        from workbench.training.elsewhere import execute_here
        from workbench.training.trainer import SeamTrainer

        def endless(self, *_, **__):
            (tmp_path / "inside").touch()
            while True:
                time.sleep(0.01)

        SeamTrainer.training_step = endless
        return execute_here()

    monkeypatch.setattr(runner, "execute_here", one_long_step)
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
        from workbench.training.elsewhere import execute_here

        def assemble(*_, **__):
            raise ValueError("<script>boom</script>")

        execute.assemble = assemble
        return execute_here()

    monkeypatch.setattr(runner, "execute_here", fail)
    playground.train.start.click()
    finish(playground)
    assert "failed after 0 steps. ValueError: &lt;script&gt;boom" in playground.train.status.value
    assert "wb-alarm" in playground.train.status.value
    assert [record.status for record in read_all(tmp_path)] == [Status.FAILED]


@pytest.mark.dear
def test_what_is_refused_before_it_starts_is_said(playground, recipe, tmp_path):
    playground.form.show(replace(recipe, corpus="missing.txt"))
    playground.train.start.click()
    finish(playground)
    assert "not started: corpus: there is no file" in playground.train.status.value
    assert read_all(tmp_path) == []
    assert not playground.train.start.disabled


@pytest.mark.dear  # the doctor looks for advice meanwhile, with predictions
def test_a_cap_that_is_too_small_ends_as_out_of_memory(playground, recipe, tmp_path):
    playground.train.here.budget.value = "3MiB"
    playground.train.start.click()
    RUNNER.wait(60)
    assert [record.status for record in read_all(tmp_path)] == [Status.OOM]
    assert "oom after" in playground.train.status.value
    assert "wb-alarm" in playground.train.status.value
    assert not playground.train.start.disabled, "the next may begin while advice on the last is looked for"
    playground.form.controls["effective_batch_size"].value = "4"
    assert not playground.train.start.disabled
    playground.train.here.budget.value = ""
    playground.train.start.click()
    finish(playground)
    assert [record.status for record in read_all(tmp_path)] == [Status.OOM, Status.OK]


def test_a_cap_that_cannot_be_read_keeps_start_off(playground, subtests):
    for cap in ("lots", "8"):
        with subtests.test(cap=cap):
            playground.train.here.budget.value = cap
            assert playground.train.start.disabled
            assert "Start is off: limit:" in playground.train.what.value
            playground.train.here.budget.value = ""
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
    assert playground.train.trained() == Recipe(model="gpt2-tiny", sequence_length=128)
    assert "Start trains baseline on gpt2-tiny, 8 × 128 tokens" in playground.train.what.value
    playground.train.stands_in.value = False
    assert playground.train.trained().model == "gpt2-xl"


def test_a_run_whose_kernel_ended_is_told_of_with_its_steps(recipe, predicted, tmp_path):
    gone = {"host": platform.node(), "pid": 2**22 + 1, "began": 0.0}
    record(status=Status.RUNNING, owner=gone, steps_done=13).save(tmp_path)
    panel = Playground(recipe, folder=tmp_path)
    assert "killed after 13 steps" in panel.train.status.value


def test_start_is_off_while_the_recipe_cannot_be_used(playground):
    playground.form.controls["learning_rate"].value = "fast"
    assert playground.train.start.disabled
    playground.form.controls["learning_rate"].value = ""
    assert not playground.train.start.disabled


def test_without_a_live_page_it_shows_words_and_bars(playground, monkeypatch, capsys):
    playground.gauge.wait()
    page = playground.as_page()
    assert "Fits." in page
    assert "jupyter.widget" not in page
    assert "<script" not in page


def test_a_cell_that_runs_again_ends_its_panel_and_no_other(recipe, predicted, tmp_path, monkeypatch, subtests):
    """Some front ends do not name their cells: there every panel may still be looked at."""
    monkeypatch.setattr("workbench.widgets.panel.live_page", lambda: True)
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


# ---- history ----


def record(label="<b>x</b>", status=Status.OK, steps=3, **more):
    made = Record.start(Recipe(), device_kind="cpu")
    return replace(made, label=label, status=status, losses=[5.0 - i for i in range(steps)], **more)


def test_the_table_is_escaped():
    page = pages.page("history", records=[record(error="<script>")], predicted={})
    assert "<b>x" not in page
    assert "&lt;b&gt;x" in page


def test_runs_of_unequal_length_and_equal_label_overlay():
    page = overlay([record(steps=3), record(steps=5), record(status=Status.OOM, steps=0, error="<i>none</i> left")])
    assert page.count("<img alt=") == 1
    assert "1: &lt;b&gt;x&lt;/b&gt; from 5.000 to 3.000" in page
    assert "&lt;i&gt;none" in page


def test_picked_runs_show_their_texts_and_stay_picked(tmp_path):
    kept = record(text_before="To be", text_after="<or not>")
    kept.save(tmp_path)
    history = History(tmp_path)
    history.choice.value = (kept.id,)
    assert "&lt;or not&gt;" in history.page.value
    record().save(tmp_path)
    history.refresh()
    assert history.choice.value == (kept.id,)
    assert len(history.choice.options) == 2


@pytest.mark.dear
def test_headless_use_never_imports_the_widgets():
    code = "import sys, workbench, workbench.training.run, workbench.__main__; print('ipywidgets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_views_are_widgets(playground):
    assert isinstance(playground.view, w.Box)
