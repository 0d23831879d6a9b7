"""The logic of the widgets, without a browser: values are set and buttons are clicked in Python."""

import html
import json
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
from workbench.widgets.controls import OF_A_RUN, SENTENCE, RecipeForm
from workbench.widgets.gauge import Gauge, Limit
from workbench.widgets.playground import Playground
from workbench.widgets.runner import RUNNER
from workbench.widgets.savings import Savings
from workbench.widgets.switches import Switches
from workbench.widgets.takehome import FORMS


class Forecast:
    """What the gauge reads of a prediction."""

    def __init__(self, peak=3 * 2**30, capacity=4 * 2**30, source="emulated:t4"):
        self.gpu, self.context_bytes, self.capacity_bytes = "t4", 2**29, capacity
        self.peak_allocated_bytes = self.peak_reserved_bytes = peak
        self.by_category = {str(c): 0 for c in Category} | {"weights": peak - 100, "activations": 100}
        self.source, self.timeline, self.work = source, None, {"fp32_flops": 1000}
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

    for name in ("part.predict", "gauge.predict_known", "savings.predict_known", "playground.predict_known"):
        monkeypatch.setattr(f"workbench.widgets.{name}", predictor)
    monkeypatch.setattr(import_module("workbench.prediction.predict"), "predict", predictor)
    return asked


@pytest.fixture
def form():
    changes = []
    made = RecipeForm(Recipe(model="gpt2-tiny"))
    made.changed = lambda: changes.append(1)
    made.changes = changes
    made.suit("a100-80gb")
    return made


# ---- controls ----


def test_every_technique_and_every_setting_has_its_control(form):
    assert set(form.toggles) == set(REGISTRY)
    for name, toggle in form.toggles.items():
        assert set(toggle.controls) == {field.name for field in fields(REGISTRY[name])}
        for field in fields(REGISTRY[name]):
            assert any(
                field.metadata["help"] in html.unescape(help_text.value)
                for help_text in toggle.explained([field.name])[1:]
            )
    assert set(form.controls) == {f.name for f in fields(Recipe) if "help" in f.metadata}


def test_every_setting_is_in_the_sentence_with_the_training_or_behind_more_settings(form):
    button, rest = form.more()
    assert rest.children == ()
    button.value = True
    shown = {widget.description for widget in rest.children if hasattr(widget, "description")} - {""}
    beside = {name.replace("_", " ") for name in (*SENTENCE, *OF_A_RUN)}
    assert shown == {name.replace("_", " ") for name in form.controls} - beside
    assert "wb-hidden" not in rest._dom_classes
    button.value = False
    assert "wb-hidden" in rest._dom_classes


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
    assert "qlora brings an adapter beside the frozen model, which lora forbids" in other.reason
    form.toggles["lora"].box.value = False
    assert not other.box.disabled
    assert other.reason == ""


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
    form.suit("t4")  # no bf16
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
    assert "<b>✓ Fits, 11.1 GiB to spare</b>" in page
    assert "needs 3.5 GiB; the T4 has 14.6 GiB" in page
    assert 'role="img" aria-label="✓ Fits, 11.1 GiB to spare. weights 3.0 GiB' in page
    limited = shown(Forecast(), Limit("t4", 2**30))
    assert "<b>✗ 2.5 GiB too much</b>" in limited
    assert "the limit is 1.0 GiB" in limited
    assert "✓ Fits, 0 B to spare" in shown(Forecast(), Limit("t4", 3 * 2**30 + 2**29))
    assert "<i>" not in shown(Forecast(source="emulated:<i>"), Limit("t4"))


def test_a_limit_beyond_the_card_is_the_card():
    """And one below it counts CUDA's context, as the card does, and as `plan --budget` does."""
    card = GPUS["t4"]
    assert Limit("t4", 2**40).have_bytes == card.memory_bytes
    assert Limit("t4", 2**30).have_bytes == 2**30
    assert Limit("t4").have_bytes == card.memory_bytes
    assert Limit("cpu").have_bytes == psutil.virtual_memory().total
    most = Forecast(peak=card.memory_bytes - 2**29 + 1)
    page = shown(most, Limit("t4", 16 * 10**9))
    assert "✗ 1 B too much" in page
    assert "the T4 has" in page


def test_the_need_is_the_sum_of_the_parts():
    forecast = Forecast()
    forecast.peak_reserved_bytes = forecast.peak_allocated_bytes + 10
    for limit in (Limit("t4"), Limit("t4", 2**30), Limit("cpu")):
        assert sum(limit.parts_of(forecast).values()) == forecast.need_bytes


def test_where_a_bar_is_overfull_the_end_of_the_memory_is_marked():
    overfull = shown(Forecast(), Limit("t4", 7 * 2**28))
    assert 'class="over" title="1.8 GiB too much" style="left: 50.00%"' in overfull
    assert 'class="frame" style="width: 50.00%"' in overfull
    assert 'class="over"' not in shown(Forecast(), Limit("t4", 7 * 2**29))


def test_the_letters_on_a_colour_can_be_read(subtests):
    """A contrast of 4.5 to 1 at least (WCAG 2.2, 1.4.3)."""

    def luminance(shade):
        parts = [int(shade[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name, shade in pages.SHADES.items():
        with subtests.test(name=name):
            light, dark = sorted((luminance(shade), 0.0 if pages.ink(shade) == "#000" else 1.0), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_an_old_verdict_is_dimmed_while_the_next_is_predicted():
    release = threading.Event()

    def slow(recipe, gpu):
        assert recipe.steps == 1 or release.wait(10)
        return Forecast()

    gauge = gauge_with(slow)
    gauge.show(Recipe(steps=1))
    gauge.wait(10)
    gauge.show(Recipe(steps=2) | Lora())
    assert "predicting LoRA" in gauge.status.value
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
    savings.show(Recipe(), Limit("t4"))
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
    for words in ("no &lt;i&gt;such", "ValueError broken", "Fits,"):
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
    for text in ("OSError the page is &lt;gone&gt;", "Fits,"):
        with subtests.test(text=text):
            gauge.show(Recipe())
            assert gauge.wait(10)
            assert text in gauge.page.value


def test_an_error_that_cannot_even_be_told_is_not_the_end(form, capsys):
    savings = Savings({"lora": form.toggles["lora"]})
    savings.quiet_s = 0
    savings.predictor = lambda *_: Forecast()
    savings.put = lambda answer: 1 / 0
    savings.show(Recipe(), Limit("t4"))
    assert savings.wait(10)
    assert "ZeroDivisionError" in capsys.readouterr().err
    del savings.put
    savings.show(Recipe(), Limit("t4"))
    assert savings.wait(10)
    assert savings.offers["lora"].saved_bytes == 0


# ---- what each switch does ----


def offers_of(form, predictor):
    """What is offered for the form's recipe, and the switches that say so."""
    savings, switches = Savings(form.toggles), Switches(form.toggles)
    savings.predictor = predictor
    savings.quiet_s = 0.01
    savings.told = lambda name: switches.tell(name, savings.offers[name])
    savings.show(form.recipe(), Limit("t4", 3 * 2**30))
    assert savings.wait(20)
    return savings.offers, switches


def half_with_anything(recipe, gpu):
    if recipe.techniques and recipe.techniques[0].name == "dora":
        raise ConfigurationError("not on this <card>")
    return Forecast(peak=2**30 if recipe.techniques else 3 * 2**30)


def test_each_switch_says_what_it_saves_costs_and_gives_up(form):
    form.toggles["gradient_checkpointing"].box.value = True
    offers, _ = offers_of(form, half_with_anything)
    facts = {name: toggle.facts.value for name, toggle in form.toggles.items()}
    assert "−2.0 GiB" in facts["gradient_checkpointing"], "what it saves while it is on"
    assert "enough by itself" in facts["gradient_checkpointing"]
    assert "±0 B" in facts["lora"], "beside the one that is on"
    assert "enough" not in facts["lora"]
    assert "±0 %" in facts["lora"]
    assert REGISTRY["lora"].costs in facts["lora"]
    assert "not on this &lt;card&gt;" in facts["dora"]
    assert offers["dora"] == "not on this <card>"


def test_what_costs_no_time_and_no_loss_is_free(form):
    offers_of(form, half_with_anything)
    assert "wb-free" in form.toggles["gradient_checkpointing"].facts.value
    assert "wb-free" not in form.toggles["lora"].facts.value, "another training"


def test_facts_of_the_recipe_before_are_dimmed(form):
    _, switches = offers_of(form, half_with_anything)
    assert "wb-old" not in form.toggles["lora"].facts._dom_classes
    switches.ask()
    assert "wb-old" in form.toggles["lora"].facts._dom_classes


def titles_in(group):
    """Of the switches in a box or a fold, from the top."""
    rows = [view.children[0] for view in group.children if isinstance(view, w.VBox)]
    return [row.children[0].description for row in rows]


def test_switches_stand_by_what_becomes_of_the_loss_the_largest_saving_first(form):
    sizes = {"gradient_checkpointing": 1, "chunked_cross_entropy": 2, "lora": 1, "fused_gelu": 3, "streaming": 4}

    def predictor(recipe, gpu):
        size = min((sizes.get(technique.name, 4) for technique in recipe.techniques), default=4)
        return Forecast(peak=size * 2**30)

    offers, switches = offers_of(form, predictor)
    switches.arrange(offers)
    assert titles_in(switches.same)[:3] == ["Gradient checkpointing", "Chunked cross-entropy", "Fused GELU"]
    assert "Lora" not in titles_in(switches.same)
    assert switches.another.button.description == "▸ Another training: LoRA −3.0 GiB"
    assert switches.another.rows.children == ()
    switches.another.button.value = True
    assert titles_in(switches.another.rows) == ["LoRA"]
    assert switches.another.button.description.startswith("▾")
    assert "more" in switches.useless.button.description
    assert len(titles_in(switches.same)) + 1 < len(form.toggles)


def test_a_group_with_a_switch_that_is_on_is_open(form):
    form.toggles["lora"].box.value = True
    offers, switches = offers_of(form, half_with_anything)
    switches.arrange(offers)
    assert titles_in(switches.another.rows) == ["LoRA"]


def test_two_engines_are_not_compared(form, monkeypatch):
    """What comes with the workbench is from an emulated GPU, and here may be none."""
    live = []

    def known(recipe, gpu):
        return Forecast(source="predicted:t4" if recipe.techniques else "emulated:t4")

    def shadow(recipe, gpu):
        live.append(recipe)
        return Forecast(source="predicted:t4", peak=2**30 if recipe.techniques else 2**31)

    monkeypatch.setattr("workbench.widgets.savings.predict", shadow)
    savings = Savings({"lora": form.toggles["lora"]})
    savings.predictor = known
    savings.quiet_s = 0
    savings.show(Recipe(), Limit("t4"))
    assert savings.wait(10)
    assert len(live) == 2
    assert savings.offers["lora"].saved_bytes == 2**30


# ---- playground: real trainings of the small model, in a process that imports all libraries ----


@pytest.fixture
def playground(recipe, predicted, tmp_path):
    return Playground(replace(recipe, steps=2), folder=tmp_path)


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
    assert playground.train.trained() == Recipe(model="gpt2-tiny", sequence_length=128)
    assert "Start trains gpt2-tiny with the text" in playground.train.what.value
    playground.train.stands_in.value = False
    assert playground.train.trained().model == "gpt2-xl"


def test_a_run_whose_kernel_ended_is_told_of_with_its_steps(recipe, predicted, tmp_path):
    gone = {"host": platform.node(), "pid": 2**22 + 1, "began": 0.0}
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


# ---- the panel's frame ----


def known(playground):
    """Everything that works by itself has ended."""
    playground.savings.quiet_s = 0
    playground.answer()
    for part in (playground.gauge, playground.savings, playground.fit):
        assert part.wait(30)


def test_what_fits_is_taken_home_by_the_one_button(playground):
    known(playground)
    assert playground.fit.button.description.startswith("Take the script home")
    playground.fit.button.click()
    assert playground.openers["Take the script home"].value
    assert playground.parts["Take the script home"].wait(30)
    assert "train.py" in playground.parts["Take the script home"].page.value


def test_what_does_not_fit_says_so_and_is_undone(playground):
    playground.gauge.budget.value = "1GiB"
    known(playground)
    assert "too much" in playground.gauge.page.value
    before = playground.form.recipe()
    playground.form.toggles["lora"].box.value = True
    assert not playground.undo.disabled
    playground.form.controls["steps"].value = "7"
    playground.undo.click()
    playground.undo.click()
    assert playground.form.recipe() == before
    assert playground.undo.disabled
    playground.undo.click()
    assert playground.form.recipe() == before


def test_one_part_is_open_at_a_time(playground):
    playground.openers["What fits where"].value = True
    assert "wb-has-part" in playground.body._dom_classes
    playground.openers["Train it here"].value = True
    assert not playground.openers["What fits where"].value
    assert playground.train.view in playground.open_part.children
    assert playground.openers["Train it here"].description == "✕ Train it here"
    playground.openers["Train it here"].value = False
    assert "wb-has-part" not in playground.body._dom_classes


def test_a_card_and_a_cell_that_are_clicked_are_chosen(playground):
    playground.chosen.value = json.dumps({"gpu": "h100"})
    assert playground.gauge.gpu.value == "h100"
    assert playground.chosen.value == "", "so that the same can be clicked again"
    cell = {"effective_batch_size": 4, "sequence_length": 16, "changed": False}
    playground.form.toggles["lora"].box.value = True
    playground.chosen.value = json.dumps(cell)
    recipe = playground.form.recipe()
    assert (recipe.effective_batch_size, recipe.sequence_length, recipe.techniques) == (4, 16, (Lora(),))
    playground.parts["What fits where"].changes = (GradientCheckpointing(),)
    playground.chosen.value = json.dumps(cell | {"changed": True})
    assert playground.form.recipe().techniques == (GradientCheckpointing(),)


def test_switches_move_only_when_another_sentence_is_chosen(playground, monkeypatch):
    arranged = []
    known(playground)
    monkeypatch.setattr(playground.switches, "arrange", lambda offers: arranged.append(len(offers)))
    playground.form.toggles["lora"].box.value = True
    playground.form.controls["learning_rate"].value = "1e-4"
    known(playground)
    assert arranged == []
    playground.form.controls["sequence_length"].value = "16"
    known(playground)
    assert arranged == [len(playground.form.toggles)]


def test_the_page_without_a_kernel_says_what_each_technique_would_do(playground):
    known(playground)
    page = playground.as_page()
    assert "what each technique would do" in page
    assert "Fused GELU" in page
    assert "Take the script home" in page


# ---- settings that are pasted ----


def pasted(playground, text):
    """As the panel's script hands it over."""
    playground.chosen.value = json.dumps({"settings": text})
    return playground.brought.value


def test_settings_that_are_pasted_set_the_panel_and_are_explained(playground):
    before = playground.form.recipe()
    settings = "base_model: gpt2-xl\nadapter: lora\nlora_r: 4\nmicro_batch_size: 6\nbf16: false\ncolour: <b>\n"
    page = pasted(playground, settings)
    recipe = playground.form.recipe()
    assert (recipe.model, recipe.effective_batch_size, recipe.techniques) == ("gpt2-xl", 6, (Lora(rank=4),))
    assert recipe.corpus == before.corpus
    assert "axolotl" in page
    assert "lora_r: 4" in page
    assert "colour: &lt;b&gt;" in page
    remark = "What is predicted is without what this setting does: colour."
    assert remark in playground.form.error.value
    playground.form.controls["steps"].value = "7"
    assert remark in playground.form.error.value, "it stays true"
    playground.undo.click()
    assert remark in playground.form.error.value
    assert "<b>" not in page
    playground.undo.click()
    assert playground.form.recipe() == before
    assert playground.form.error.value == ""
    assert "Paste settings" in playground.brought.value


def test_what_went_comes_back(playground, subtests):
    asked = Recipe(steps=3, arguments={"weight_decay": 0.1}, callbacks=["a.b:C"]) | Lora(rank=5)
    for form in ("recipe file (TOML)", "JSON"):
        with subtests.test(form=form):
            playground.form.show(Recipe())
            pasted(playground, FORMS[form][1](asked))
            assert playground.form.recipe() == asked


def test_settings_that_cannot_be_used_change_nothing(playground, subtests):
    before = playground.form.recipe()
    for text in ("<b>", "[1]", "lora_r: !!python/object:x {}", "sequence_len: <b>", '{"steps": 0}'):
        with subtests.test(text=text):
            page = pasted(playground, text)
            assert playground.form.recipe() == before
            assert 'role="alert"' in page
            assert "Nothing was changed." in page
            assert "<b>" not in page


def test_settings_are_the_way_out_of_a_form_that_cannot_be_used(playground):
    playground.form.controls["learning_rate"].value = "fast"
    pasted(playground, "model = 'gpt2'\nsteps = 7\n")
    assert playground.form.recipe().steps == 7
