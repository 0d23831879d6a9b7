"""The logic of the widgets, without a browser: values are set and buttons are clicked in Python."""

import subprocess
import sys
import threading
import time
from dataclasses import fields, replace

import ipywidgets as w
import pytest

from workbench.advise.doctor import diagnose
from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.recipe import Recipe
from workbench.records.record import Record, Status, read_all
from workbench.run import run as training
from workbench.techniques import REGISTRY, GradientCheckpointing, Lora
from workbench.widgets.controls import RecipeForm
from workbench.widgets.gauge import Gauge, page_of, verdict
from workbench.widgets.history import History, overlay, table_of
from workbench.widgets.playground import Playground


class Forecast:
    """What the gauge reads of a prediction."""

    def __init__(self, peak=3 * 2**30, capacity=4 * 2**30):
        self.gpu, self.context_bytes, self.capacity_bytes = "t4", 2**29, capacity
        self.peak_allocated_bytes = self.peak_reserved_bytes = peak
        self.by_category = {str(c): 0 for c in Category} | {"weights": peak - 100, "activations": 100}
        self.peak_phase, self.peak_operation = "backward", "aten.<b>mm</b>"


@pytest.fixture
def predicted(monkeypatch):
    """No worker: the answers are made up, the questions are kept."""
    asked = []

    def predictor(recipe, gpu):
        asked.append((recipe, gpu))
        return Forecast()

    monkeypatch.setattr("workbench.widgets.gauge.predict", predictor)
    monkeypatch.setattr(Gauge.__init__, "__defaults__", ("h100", predictor))
    return asked


@pytest.fixture
def form():
    changes = []
    made = RecipeForm(Recipe(model="gpt2-tiny"), lambda: changes.append(1))
    made.changes = changes
    return made


# ---- controls ----


def test_every_technique_and_every_setting_has_its_control(form):
    assert set(form.toggles) == set(REGISTRY)
    for name, toggle in form.toggles.items():
        assert set(toggle.form.controls) == {field.name for field in fields(REGISTRY[name])}
        for field in fields(REGISTRY[name]):
            assert field.metadata["help"] in toggle.form.controls[field.name].tooltip
    assert set(form.form.controls) == {f.name for f in fields(Recipe) if "help" in f.metadata}


def test_the_controls_give_the_recipe_they_were_set_to(form):
    recipe = Recipe(
        model="gpt2", effective_batch_size=16, learning_rate=2e-4, dropout=0.0, seed=7,
        techniques=(Lora(rank=3, alpha=5.0), GradientCheckpointing(use_reentrant=True)),
    )  # fmt: skip
    form.show(recipe)
    assert form.recipe() == recipe
    form.show(Recipe(model="gpt2-tiny"))
    assert form.recipe() == Recipe(model="gpt2-tiny")


@pytest.mark.parametrize("name", REGISTRY)
def test_switching_a_technique_on_adds_it_and_shows_its_settings(form, name):
    toggle = form.toggles[name]
    assert toggle.settings.layout.display == "none"
    before = len(form.changes)
    toggle.box.value = True
    assert len(form.changes) > before
    assert toggle.settings.layout.display is None
    assert form.recipe().techniques == (REGISTRY[name](),)


def test_what_cannot_be_combined_is_greyed_with_the_reason(form):
    accumulation = form.toggles["gradient_accumulation"]
    form.form.controls["effective_batch_size"].value = 7
    assert accumulation.box.disabled
    assert "a batch of 7 cannot be split into 4 equal micro-batches" in accumulation.reason.value
    form.form.controls["effective_batch_size"].value = 8
    assert not accumulation.box.disabled
    assert accumulation.reason.value == ""


def test_a_setting_out_of_range_is_said_and_the_control_stays_usable(form):
    form.toggles["lora"].box.value = True
    form.toggles["lora"].form.controls["alpha"].value = "<b>much"
    assert "lora: alpha must be a number" in form.error.value
    assert "<b>much" not in form.error.value
    with pytest.raises(ConfigurationError):
        form.recipe()
    form.toggles["lora"].form.controls["alpha"].value = "8"
    assert form.error.value == ""
    assert form.recipe().techniques == (Lora(alpha=8.0),)


# ---- gauge ----


@pytest.mark.parametrize(
    ("need", "have", "words"),
    [(1, 1, "Fits."), (2**30 + 2**29, 2**30, "Does not fit, over by 512 MiB."), (1, None, "No limit known.")],
)
def test_the_verdict_in_words(need, have, words):
    assert verdict(need, have) == words


def test_the_page_says_in_words_what_the_bar_shows_and_is_escaped():
    page = page_of(Forecast())
    assert "<b>Fits.</b> 3.5 GiB of 4.0 GiB of" in page
    assert 'role="img" aria-label="Fits. weights 3.0 GiB' in page
    assert "<b>mm</b>" not in page
    assert "over by 2.0 GiB" in page_of(Forecast(), budget_bytes=2**30)


def test_the_gauge_answers_the_newest_question_only():
    release, asked = threading.Event(), []

    def slow(recipe, gpu):
        asked.append(recipe.steps)
        release.wait(10)
        return Forecast()

    gauge = Gauge(predictor=slow)
    for steps in (1, 2, 3, 4):
        gauge.show(Recipe(steps=steps))
        while not asked:
            time.sleep(0.01)
    release.set()
    gauge.wait(10)
    assert asked[0] == 1
    assert asked[-1] == 4
    assert len(asked) <= 3, "those in between were never asked"


@pytest.mark.parametrize("budget", ["lots", "8", "-1GiB"])
def test_a_budget_that_cannot_be_read_is_said(budget):
    gauge = Gauge(predictor=lambda recipe, gpu: Forecast())
    gauge.show(Recipe())
    gauge.budget.value = budget
    gauge.wait(10)
    assert "budget" in gauge.page.value
    assert "⚠" in gauge.page.value


def test_an_error_of_the_prediction_is_said_and_the_next_one_works():
    answers = [ConfigurationError("no <i>such</i> thing"), ValueError("broken")]

    def failing(recipe, gpu):
        if answers:
            raise answers.pop(0)
        return Forecast()

    gauge = Gauge(predictor=failing)
    for words in ("no &lt;i&gt;such", "no prediction: broken", "Fits."):
        gauge.show(Recipe())
        gauge.wait(10)
        assert words in gauge.page.value


# ---- playground: real trainings of the small model ----


@pytest.fixture
def playground(recipe, predicted, tmp_path):
    return Playground(recipe, folder=tmp_path)


def finish(playground):
    playground.runner.wait(120)
    assert not playground.runner.running


def test_a_run_ends_with_its_numbers_and_is_in_the_history(playground, tmp_path):
    playground.start.click()
    assert playground.start.disabled
    assert not playground.stop.disabled
    finish(playground)
    (record,) = read_all(tmp_path)
    assert record.status is Status.OK
    assert f"Held-out loss {record.held_out_loss_before:.3f} → {record.held_out_loss:.3f}" in playground.words.value
    assert playground.progress.value == playground.progress.max == record.steps_done
    assert "Training loss from" in playground.live.value
    assert playground.history.choice.options[0][1] == record.id
    assert not playground.start.disabled
    assert playground.stop.disabled


def test_stop_ends_it_within_a_second_and_leaves_a_record(playground, recipe, tmp_path):
    playground.form.show(replace(recipe, steps=100_000))
    playground.start.click()
    while playground.progress.value == 0:
        time.sleep(0.02)
    stopped = time.monotonic()
    playground.stop.click()
    assert "Stopping" in playground.words.value
    playground.runner.wait(60)
    print(f"stopped after {time.monotonic() - stopped:.2f} s")
    assert [record.status for record in read_all(tmp_path)] == [Status.INTERRUPTED]
    assert "interrupted after" in playground.words.value
    assert not playground.start.disabled


def test_a_step_that_takes_long_is_stopped_in_its_middle(playground, monkeypatch, tmp_path):
    from workbench.run.trainer import SeamTrainer

    inside = threading.Event()

    def endless(self, *_, **__):
        inside.set()
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(SeamTrainer, "training_step", endless)
    playground.start.click()
    inside.wait(60)
    playground.stop.click()
    playground.runner.wait(20)
    assert [record.status for record in read_all(tmp_path)] == [Status.INTERRUPTED]


def test_a_failure_is_an_alarm_with_its_reason(playground, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise ValueError("<script>boom</script>")

    monkeypatch.setattr(training.seams, "assemble", fail)
    playground.start.click()
    finish(playground)
    assert "failed after 0 steps. &lt;script&gt;boom" in playground.words.value
    assert "#D55E00" in playground.words.value
    assert [record.status for record in read_all(tmp_path)] == [Status.FAILED]


def test_what_is_refused_before_it_starts_is_said(playground, recipe, tmp_path):
    playground.form.show(replace(recipe, corpus="missing.txt"))
    playground.start.click()
    finish(playground)
    assert "not started: corpus: there is no file" in playground.words.value
    assert read_all(tmp_path) == []
    assert not playground.start.disabled


def test_a_cap_that_is_too_small_ends_as_out_of_memory(playground, tmp_path):
    playground.cap.value = "3MiB"
    playground.start.click()
    finish(playground)
    assert [record.status for record in read_all(tmp_path)] == [Status.OOM]
    assert "oom after" in playground.words.value
    assert "#D55E00" in playground.words.value


def test_the_next_run_may_begin_while_advice_on_the_last_is_looked_for(playground, recipe, tmp_path, monkeypatch):
    looking, proceed = threading.Event(), threading.Event()

    def slow(record):
        looking.set()
        assert proceed.wait(60)
        return diagnose(record, among=["gradient_checkpointing"])

    monkeypatch.setattr("workbench.widgets.playground.diagnose", slow)
    playground.cap.value = "3MiB"
    playground.start.click()
    assert looking.wait(60)
    last = playground.runner._thread
    playground.cap.value = ""
    playground.form.show(recipe | GradientCheckpointing())
    assert not playground.start.disabled
    playground.start.click()
    proceed.set()
    last.join(60)
    finish(playground)
    assert [record.status for record in read_all(tmp_path)] == [Status.OOM, Status.OK]
    assert playground.advice.children == ()  # it was about the last run
    assert not playground.start.disabled


def test_start_is_off_while_the_recipe_cannot_be_used(playground):
    playground.form.form.controls["learning_rate"].value = "fast"
    assert playground.start.disabled
    playground.form.form.controls["learning_rate"].value = ""
    assert not playground.start.disabled


def test_without_a_live_page_it_shows_words_and_bars(playground, monkeypatch, capsys):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    page = playground.as_page()
    assert "Fits." in page
    assert "widget" not in page


# ---- history ----


def record(label="<b>x</b>", status=Status.OK, steps=3, **more):
    made = Record.start(Recipe(), device_kind="cpu")
    return replace(made, label=label, status=status, losses=[5.0 - i for i in range(steps)], **more)


def test_the_table_is_escaped():
    page = table_of([record(error="<script>")])
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


def test_headless_use_never_imports_the_widgets():
    code = "import sys, workbench, workbench.run.run, workbench.__main__; print('ipywidgets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_views_are_widgets(playground):
    assert isinstance(playground.view, w.Box)
