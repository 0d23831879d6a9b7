"""The playground in a real JupyterLab: what a person clicks, and what the page then says.

One page serves all tests here; each begins by running its cell again, which makes a new panel.
"""

import re
import time

import pytest
from driving import (
    GAUGE,
    VERDICT,
    button,
    choose_theme,
    fill,
    gauge,
    output,
    run_all,
    stop_training,
    verdict,
    wait_for_button,
    wait_for_status,
    write_notebook,
)

from workbench.base.categories import UNITS

pytestmark = [pytest.mark.dear, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def panel(open_notebook, lab, model_name, text_file):
    """A notebook with a playground of the small model, so that a step takes milliseconds."""
    source = (
        "import os, torch\ntorch.set_num_threads(1)\nos.environ.pop('JPY_SESSION_NAME', None)  # as in VS Code, Colab\n"
        "from workbench import Playground, Recipe\n"
        f"Playground(Recipe(model={model_name!r}, corpus={str(text_file)!r}, sequence_length=32, steps=20_000))"
    )
    write_notebook(lab[1] / "panel.ipynb", source)
    return open_notebook("panel.ipynb")


@pytest.fixture
def page(panel):
    stop_training(panel)
    run_all(panel)
    return panel


def in_sight(page, selector):
    """Whether the middle of the element is what one would click there."""
    return page.locator(selector).first.evaluate(
        "e => { const r = e.getBoundingClientRect();"
        " const at = document.elementFromPoint(r.x + r.width / 2, r.y + r.height / 2); return e.contains(at); }"
    )


# ---- the gauge ----


@pytest.mark.smoke
def test_a_toggle_changes_gauge_and_words(page):
    before = gauge(page)
    started = time.monotonic()
    output(page).get_by_label("Gradient checkpointing", exact=True).check()
    page.wait_for_function("([g, old]) => document.querySelector(g).ariaLabel !== old", arg=[GAUGE, before])
    print(f"\nthe gauge answered after {time.monotonic() - started:.1f} s")
    assert "activations" in before
    output(page).get_by_label("every n layers").wait_for()
    output(page).get_by_text("exact loss; costs most of a second forward pass").wait_for()


def test_the_bold_number_is_the_sum_of_the_legend_and_an_overfull_bar_marks_the_end(page):
    def bytes_of(text):
        return [float(number) * UNITS.get(unit, 1) for number, unit in re.findall(r"([\d.]+) ([KMG]iB|B)\b", text)]

    for limit, words in (("", "of NVIDIA T4"), ("1MiB", "of the limit")):
        fill(page, "limit", limit)
        output(page).get_by_text(words).first.wait_for()
        need = bytes_of(verdict(page))[-2]  # … of the …
        parts = bytes_of(page.locator(".workbench-gauge small").first.inner_text())
        assert sum(parts) == pytest.approx(need, rel=0.01), (need, parts)
        assert page.locator('.workbench-gauge [title="the memory ends here"]').count() == bool(limit)


def test_a_billion_sequences_are_refused_in_words_and_the_next_answer_is_right(page):
    before = verdict(page)
    started = time.monotonic()
    fill(page, "effective batch size", "1000000000")
    output(page).get_by_text(re.compile("effective_batch_size must be an integer of at least 1 and at most")).wait_for()
    fill(page, "effective batch size", "60000")
    page.locator(".workbench-gauge p", has_text="Does not fit").wait_for()
    print(f"\na billion and sixty thousand answered after {time.monotonic() - started:.1f} s")
    fill(page, "effective batch size", "8")
    page.locator(".workbench-gauge p", has_text="Fits.").wait_for()
    assert verdict(page) == before


def test_a_name_counts_when_it_is_finished_and_a_wrong_one_is_told(page):
    field = output(page).get_by_label("model", exact=True)
    before = gauge(page)
    field.fill("")
    field.press_sequentially("gpt2-")
    page.wait_for_timeout(500)
    assert gauge(page) == before, "half a name is nobody's model"
    field.press("Enter")
    alarm = page.locator(".workbench-gauge [role=alert]")
    alarm.wait_for()
    assert "neither an existing folder nor a hub id" in alarm.inner_text()
    assert "Traceback" not in output(page).inner_text()
    fill(page, "model", "gpt2-tiny", key="Tab")  # leaving the field is enough
    page.wait_for_function("g => document.querySelector(g)", arg=GAUGE)
    assert VERDICT.search(verdict(page))


def test_each_switch_says_what_it_saves(page):
    saved = page.locator(".workbench-form .widget-html small", has_text=re.compile(r"^[−+±][\d.]+ [KMG]?i?B$"))
    saved.nth(5).wait_for()


# ---- settings ----


def test_what_a_setting_would_mend_is_not_grey(page):
    fill(page, "effective batch size", "6")
    accumulation = output(page).get_by_label("Gradient accumulation", exact=True)
    accumulation.check()
    pieces = output(page).get_by_label("steps", exact=True).nth(1)
    page.wait_for_function("box => box.value === '2'", arg=pieces.element_handle())  # the kernel chose what would go
    fill(page, "effective batch size", "7")
    output(page).get_by_text("a batch of 7 cannot be split into 2 equal micro-batches").wait_for()
    wait_for_button(page, "Start", "disabled")
    accumulation.uncheck()
    page.wait_for_function("() => !document.querySelector('.workbench-form [role=alert]')")


def test_a_number_is_not_changed_without_a_word(page):
    fill(page, "steps", "1.5", key="Tab")
    output(page).get_by_text("steps must be an integer of at least 1").wait_for()
    wait_for_button(page, "Start", "disabled")


def test_with_the_keyboard_alone(page):
    output(page).get_by_label("model", exact=True).focus()
    pressed = 0
    while page.evaluate("() => document.activeElement.textContent.trim()") != "Start":
        page.keyboard.press("Tab")
        pressed += 1
        assert pressed < 10, "from the model to Start"
        if page.evaluate("() => document.activeElement.textContent.trim()") == "More settings":
            page.keyboard.press("Space")
            output(page).get_by_label("learning rate", exact=True).wait_for()
            page.keyboard.press("Space")
            output(page).get_by_label("learning rate", exact=True).wait_for(state="hidden")
    page.keyboard.press("Enter")
    wait_for_status(page, r"step \d+ of 20000|loading")
    button(page, "Stop").focus()
    page.keyboard.press("Enter")
    wait_for_status(page, "interrupted after|Stopped before it began")
    box = output(page).get_by_label("Gradient checkpointing", exact=True)
    box.focus()
    page.keyboard.press("Space")
    assert box.is_checked()
    output(page).get_by_role("tab", name="Train").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert output(page).get_by_role("tab").nth(1).get_attribute("aria-selected") == "true"


# ---- training ----


def test_start_curves_move_stop(page, screenshot):
    button(page, "Start").click()
    wait_for_status(page, r"step \d+ of 20000")
    first = output(page).locator('img[alt^="Training loss"]').first
    first.wait_for()
    before = first.get_attribute("alt")
    page.wait_for_function(
        "before => document.querySelector('.jp-Cell-outputArea img[alt^=\"Training loss\"]').alt !== before", arg=before
    )
    screenshot(page, "playground-running")
    started = time.monotonic()
    button(page, "Stop").click()
    wait_for_status(page, "interrupted after")
    print(f"\nstopped after {time.monotonic() - started:.1f} s")
    wait_for_button(page, "Start", "enabled")


def test_a_page_reloaded_before_it_was_saved_finds_the_training_again(page):
    button(page, "Start").click()
    wait_for_status(page, r"step \d+ of 20000")
    page.once("dialog", lambda dialog: dialog.accept())
    page.reload()
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell")
    page.get_by_text("| Idle").first.wait_for()  # or JupyterLab, which has not found the kernel again, asks for one
    run_all(page)
    wait_for_status(page, r"step \d+ of 20000")
    wait_for_button(page, "Start", "disabled")
    button(page, "Stop").click()
    wait_for_status(page, "interrupted after")


def test_out_of_memory_is_an_alarm_and_its_advice_clicked_works(page, screenshot):
    fill(page, "memory cap", "12MiB")
    fill(page, "steps", "5", key="Tab")
    button(page, "Start").click()
    wait_for_status(page, "oom after")
    alarm = output(page).locator('[role="status"]', has_text="oom after")
    assert "213, 94, 0" in alarm.evaluate("e => getComputedStyle(e).borderLeftColor")
    wait_for_button(page, "Start", "enabled")  # while advice is looked for
    started = time.monotonic()
    advice = output(page).get_by_role("button", name=re.compile("^Turn on|^Set")).first
    advice.wait_for()
    print(f"\nthe first advice after {time.monotonic() - started:.1f} s")
    screenshot(page, "playground-out-of-memory")
    advice.click()
    button(page, "Start").click()
    wait_for_status(page, "ok. Held-out loss")
    output(page).get_by_text(re.compile(r"Predicted .* measured .*: [+-]\d+\.\d%")).first.wait_for()


def test_the_history_tells_the_shape_of_a_run_and_the_export_keeps_the_prediction(page, lab):
    fill(page, "steps", "5", key="Tab")
    button(page, "Start").click()
    wait_for_status(page, "ok. Held-out loss")
    output(page).get_by_role("tab", name="History").click()
    header = output(page).locator("thead", has_text="batch").first.inner_text()
    assert all(name in header for name in ("length", "cap", "predicted", "measured"))
    output(page).locator("select[multiple] option").first.click()
    output(page).locator('img[alt^="Peak memory"]').wait_for()
    page.keyboard.press("Control+s")
    page.wait_for_timeout(1500)
    exported = as_html(lab[1] / "panel.ipynb")
    assert "of NVIDIA T4" in exported
    assert "ok. Held-out loss" in exported
    assert "Box(children" not in exported


def as_html(path):
    from nbconvert import HTMLExporter

    return HTMLExporter().from_filename(str(path))[0]


# ---- how it looks ----


WIDTHS = (640, 700, 1000, 1280, 1920)  # 1,280: at 200 % as 640, beside the files as 1,000


def test_nothing_is_cut_off_and_the_gauge_stays_in_sight(page, browser, screenshot, subtests):
    if page.locator("#jp-left-stack").is_visible():
        page.keyboard.press("Control+b")  # the file browser
    for width in WIDTHS:
        with subtests.test(width=width):
            show_at(page, width)
            cut = page.evaluate(
                "() => [...document.querySelectorAll('.jp-Cell-outputArea .widget-box, "
                ".jp-Cell-outputArea .widget-label, .workbench-tabs .lm-TabBar-tabLabel')]"
                ".filter(e => e.scrollWidth > e.clientWidth + 2).map(e => e.innerText)"
            )
            assert cut == []
            screenshot(page, f"playground-{width}")
            streaming = output(page).get_by_label("Streaming", exact=True)  # far down: the form scrolls to it
            streaming.check()
            assert in_sight(page, GAUGE)
            streaming.uncheck()
    choose_theme(page, "JupyterLab Dark")
    for width in WIDTHS:
        show_at(page, width)
        screenshot(page, f"playground-{width}-dark")
    choose_theme(page, "JupyterLab Light")
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert browser.strangers == []


def show_at(page, width):
    page.set_viewport_size({"width": width, "height": 1000 if width > 640 else 500})
    page.wait_for_timeout(300)
    page.locator(".workbench-panel").first.scroll_into_view_if_needed()


@pytest.mark.long
def test_the_pictures_of_the_readme(open_notebook, lab, screenshot):
    """Looked at by eye, then copied to data/pictures: what a T4 needs, and a training of the embedded model."""
    write_notebook(lab[1] / "needs.ipynb", "from workbench import Playground\nPlayground()")
    page = open_notebook("needs.ipynb")
    page.set_viewport_size({"width": 1280, "height": 1000})
    choose_theme(page, "JupyterLab Light")
    if page.locator("#jp-left-stack").is_visible():
        page.keyboard.press("Control+b")  # the file browser
    output(page).get_by_text(re.compile("Does not fit, over by")).first.wait_for()
    page.locator(".workbench-form small", has_text="GiB").nth(12).wait_for()
    output(page).get_by_role("tab", name="Timeline").click()
    page.wait_for_timeout(1500)
    screenshot(page, "readme-needs")
    choose_theme(page, "JupyterLab Dark")
    output(page).get_by_role("tab", name="Train").click()
    button(page, "Start").click()
    wait_for_status(page, "ok. Held-out loss")
    output(page).get_by_text(re.compile("Predicted .* measured")).first.wait_for()
    screenshot(page, "readme-trains")
