"""The gauge says in words and a bar whether it fits, for the newest question only."""

import threading
import time

import psutil
from parts import Forecast

from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS
from workbench.recipe import Recipe
from workbench.techniques import Lora
from workbench.widgets import pages
from workbench.widgets.gauge import Gauge, Limit
from workbench.widgets.savings import Savings


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
            light, dark = sorted((luminance(shade), 0.0 if pages.LETTERS[name] == "#000" else 1.0), reverse=True)
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
    assert "wb-old" in gauge.view._dom_classes
    assert "Fits" in gauge.page.value
    release.set()
    gauge.wait(10)
    assert "wb-old" not in gauge.view._dom_classes


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
    gauge.on_answer = shown
    for text in ("OSError the page is &lt;gone&gt;", "Fits,"):
        with subtests.test(text=text):
            gauge.show(Recipe())
            assert gauge.wait(10)
            assert text in gauge.page.value


def test_an_error_that_cannot_even_be_told_is_not_the_end(form, capsys):
    savings = Savings({"lora": form.toggles["lora"]})
    savings.quiet_s = 0
    savings.predictor = lambda *_: Forecast()
    savings.show_answer = lambda answer: 1 / 0
    savings.show(Recipe(), Limit("t4"))
    assert savings.wait(10)
    assert "ZeroDivisionError" in capsys.readouterr().err
    del savings.show_answer
    savings.show(Recipe(), Limit("t4"))
    assert savings.wait(10)
    assert savings.offers["lora"].saved_bytes == 0
