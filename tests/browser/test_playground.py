"""The playground in a real JupyterLab: what a person clicks, and what the page then says.

One page serves all tests here; each begins by running its cell again, which makes a new panel.
"""

import json
import re
import time
import urllib.request

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import SCREENSHOTS
from driving import (
    GAUGE,
    HEAD,
    PROMPT,
    VERDICT,
    button,
    choose_theme,
    fill,
    gauge,
    open_part,
    output,
    run_all,
    stop_training,
    take,
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


def test_a_toggle_changes_gauge_and_words(page):
    before = gauge(page)
    started = time.monotonic()
    output(page).get_by_label("Gradient checkpointing", exact=True).check()
    page.wait_for_function("([g, old]) => document.querySelector(g).ariaLabel !== old", arg=[GAUGE, before])
    print(f"\nthe gauge answered after {time.monotonic() - started:.1f} s")
    assert "activations" in before
    output(page).get_by_label("every n layers").wait_for()
    output(page).get_by_text("exact loss; costs most of a second forward pass").wait_for()
    button(page, "Undo").click()
    page.wait_for_function("([g, old]) => document.querySelector(g).ariaLabel === old", arg=[GAUGE, before])


def test_the_need_is_the_sum_of_the_legend_and_an_overfull_bar_marks_the_end(page):
    def bytes_of(text):
        return [float(number) * UNITS.get(unit, 1) for number, unit in re.findall(r"([\d.]+) ([KMG]iB|B)\b", text)]

    for limit, words in (("", "the T4 has"), ("1MiB", "the limit is")):
        fill(page, "limit", limit)
        output(page).get_by_text(words).first.wait_for()
        need = bytes_of(verdict(page).splitlines()[-1])[0]
        parts = bytes_of(page.locator(f"{HEAD} .wb-legend").inner_text())
        assert sum(parts) == pytest.approx(need, rel=0.01), (need, parts)
        assert page.locator(f"{HEAD} .over").count() == bool(limit)


def test_one_click_makes_it_fit_and_the_next_takes_the_script_home(page):
    fill(page, "sequence length", "32")
    verdict(page)
    need = float(re.search(r"needs ([\d.]+) MiB", verdict(page))[1])
    fill(page, "limit", f"{need - 1:.0f}MiB")
    page.locator(f"{HEAD} .wb-verdict", has_text="too much").wait_for()
    words = take(page).inner_text()
    assert "Make it fit" in words
    assert "less" in words
    take(page).click()
    page.locator(f"{HEAD} .wb-verdict", has_text="Fits, ").wait_for()
    output(page).locator(".wb-action", has_text="Take the script home").click()
    assert "TrainingArguments(" in output(page).get_by_label("the recipe, to be copied").input_value()
    open_part(page, "Take the script home")


def test_a_card_that_is_clicked_is_chosen(page):
    open_part(page, "What fits where")
    output(page).get_by_role("button", name=re.compile("H100")).click()
    output(page).get_by_text("the H100 80 GB has").first.wait_for()
    assert output(page).get_by_label("predict for").input_value() == "H100 80 GB"
    output(page).get_by_title("choose 4 × 64 tokens").first.click()
    page.wait_for_function(
        "() => document.querySelector('.wb-sentence > :nth-child(4) input').value === '4'"
        " && document.querySelector('.wb-sentence > :nth-child(6) input').value === '64'"
    )


def test_keys_in_the_panel_are_not_the_notebooks(page):
    """With a dropdown focused, `x` deleted the cell and arrows left it."""
    output(page).get_by_label("predict for").focus()
    for key in ("x", "ArrowDown", "d", "d", "b", "Escape", "j"):
        page.keyboard.press(key)
    assert page.locator(".jp-CodeCell").count() == 1
    assert page.evaluate("() => document.activeElement.tagName") == "SELECT"


def test_a_billion_sequences_are_refused_in_words_and_the_next_answer_is_right(page):
    before = verdict(page)
    started = time.monotonic()
    fill(page, "effective batch size", "1000000000")
    output(page).get_by_text(re.compile("effective_batch_size must be an integer of at least 1 and at most")).wait_for()
    fill(page, "effective batch size", "60000")
    page.locator(f"{HEAD} .wb-verdict", has_text="too much").wait_for()
    print(f"\na billion and sixty thousand answered after {time.monotonic() - started:.1f} s")
    fill(page, "effective batch size", "8")
    page.locator(f"{HEAD} .wb-verdict", has_text="Fits, ").wait_for()
    assert verdict(page) == before


def test_a_name_counts_when_it_is_finished_and_a_wrong_one_is_told(page):
    field = output(page).get_by_label("model", exact=True)
    before = gauge(page)
    field.fill("")
    field.press_sequentially("gpt2-")
    page.wait_for_timeout(500)
    assert gauge(page) == before, "half a name is nobody's model"
    field.press("Enter")
    alarm = page.locator(f"{HEAD} [role=alert]")
    alarm.wait_for()
    assert "neither an existing folder nor a hub id" in alarm.inner_text()
    assert "Traceback" not in output(page).inner_text()
    fill(page, "model", "gpt2-tiny", key="Tab")  # leaving the field is enough
    page.wait_for_function("g => document.querySelector(g)", arg=GAUGE)
    assert VERDICT.search(verdict(page))


def test_each_switch_says_what_it_saves(page):
    page.locator(".wb-saved", has_text=re.compile(r"^\s*−[\d.]+ [KMG]?i?B")).first.wait_for()


# ---- settings ----


def test_what_a_setting_would_mend_is_not_grey(page):
    fill(page, "effective batch size", "6")
    accumulation = output(page).get_by_label("Gradient accumulation", exact=True)
    accumulation.check()
    pieces = output(page).get_by_label("steps", exact=True).first
    page.wait_for_function("box => box.value === '2'", arg=pieces.element_handle())  # the kernel chose what would go
    fill(page, "effective batch size", "7")
    output(page).get_by_text("a batch of 7 cannot be split into 2 equal micro-batches").wait_for()
    output(page).locator(".wb-action:disabled", has_text="First mend").wait_for()
    accumulation.uncheck()
    page.wait_for_function("() => !document.querySelector('.workbench-panel > .widget-html [role=alert]')")


def test_a_number_is_not_changed_without_a_word(page):
    open_part(page, "Train it here")
    fill(page, "steps", "1.5", key="Tab")
    output(page).get_by_text("steps must be an integer of at least 1").wait_for()
    wait_for_button(page, "Start", "disabled")


def test_with_the_keyboard_alone(page):
    output(page).get_by_label("model", exact=True).focus()
    reached = []
    while "Train it here" not in reached:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("() => document.activeElement.textContent.trim()"))
        assert len(reached) < 40, reached
        if reached[-1] == "more settings":
            page.keyboard.press("Space")
            output(page).get_by_label("learning rate", exact=True).wait_for()
            page.keyboard.press("Space")
            output(page).get_by_label("learning rate", exact=True).wait_for(state="hidden")
    assert "See the step" in reached
    page.keyboard.press("Enter")
    button(page, "Start").focus()
    page.keyboard.press("Enter")
    wait_for_status(page, r"step \d+ of 20000|loading")
    button(page, "Stop").focus()
    page.keyboard.press("Enter")
    wait_for_status(page, "interrupted after|Stopped before it began")
    open_part(page, "Train it here")
    output(page).locator(".wb-word", has_text="Train it here").focus()
    page.keyboard.press("Space")
    page.locator(".wb-fold", has_text="saving nothing").wait_for()  # the switches have found their places
    box = page.locator(".wb-switch input:visible:enabled").first
    box.focus()
    page.keyboard.press("Space")
    assert box.is_checked()


# ---- training ----


def test_start_curves_move_stop(page, screenshot):
    open_part(page, "Train it here")
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
    open_part(page, "Train it here")
    button(page, "Start").click()
    wait_for_status(page, r"step \d+ of 20000")
    page.once("dialog", lambda dialog: dialog.accept())
    page.reload()
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell")
    page.get_by_text("| Idle").first.wait_for()  # or JupyterLab, which has not found the kernel again, asks for one
    run_all(page)
    open_part(page, "Train it here")
    wait_for_status(page, r"step \d+ of 20000")
    wait_for_button(page, "Start", "disabled")
    button(page, "Stop").click()
    wait_for_status(page, "interrupted after")


def test_out_of_memory_is_an_alarm_with_advice(page, screenshot):
    open_part(page, "Train it here")
    fill(page, "memory cap", "12MiB")
    fill(page, "steps", "5", key="Tab")
    button(page, "Start").click()
    wait_for_status(page, "oom after")
    alarm = output(page).locator('[role="status"]', has_text="oom after")
    assert "213, 94, 0" in alarm.evaluate("e => getComputedStyle(e).borderLeftColor")
    wait_for_button(page, "Start", "enabled")  # while advice is looked for
    output(page).get_by_text("ran out of memory in the").first.wait_for()  # the cause, at once
    output(page).locator(".wb-open pre", has_text="predicted for").wait_for()
    screenshot(page, "playground-out-of-memory")
    fill(page, "memory cap", "")
    button(page, "Start").click()
    wait_for_status(page, "ok. Held-out loss")
    output(page).get_by_text(re.compile(r"Predicted .* measured .*: [+-]\d+\.\d%")).first.wait_for()


def test_a_run_is_listed_and_the_export_keeps_it_and_the_prediction(page, lab):
    open_part(page, "Train it here")
    fill(page, "steps", "5", key="Tab")
    button(page, "Start").click()
    wait_for_status(page, "ok. Held-out loss")
    output(page).get_by_text(re.compile("Predicted .* measured")).first.wait_for()
    runs = output(page).get_by_role("region", name="runs")
    assert all(name in runs.locator("thead").inner_text() for name in ("peak_allocated_bytes", "held_out_loss"))
    assert runs.locator("tbody tr").first.inner_text().split("\t")[2:4] == ["ok", "5"]
    assert runs.evaluate("e => e.scrollWidth <= e.clientWidth"), "no column is cut off"
    page.keyboard.press("Control+s")
    page.wait_for_timeout(1500)
    exported = as_html(lab[1] / "panel.ipynb")
    assert "the T4 has" in exported
    assert "ok. Held-out loss" in exported
    assert "Box(children" not in exported


def as_html(path):
    from nbconvert import HTMLExporter

    return HTMLExporter().from_filename(str(path))[0]


def test_a_notebook_that_is_opened_again_says_that_it_needs_a_kernel(open_notebook, lab, model_name, text_file):
    """And not "Error displaying widget: model not found"."""
    address, folder = lab
    recipe = f"Recipe(model={model_name!r}, corpus={str(text_file)!r}, sequence_length=32)"
    write_notebook(folder / "again.ipynb", f"from workbench import Playground, Recipe\nPlayground({recipe})")
    page = open_notebook("again.ipynb")
    verdict(page)
    page.wait_for_timeout(1000)
    page.keyboard.press("Control+s")
    page.wait_for_timeout(1500)
    with urllib.request.urlopen(f"{address}/api/sessions?token=t") as answer:
        (session,) = [found for found in json.load(answer) if found["path"] == "again.ipynb"]
    request = urllib.request.Request(f"{address}/api/sessions/{session['id']}?token=t", method="DELETE")
    urllib.request.urlopen(request).close()
    page.goto(f"{address}/lab/tree/again.ipynb?token=t&reset")
    page.locator(".wb-asleep", has_text="needs a running kernel: run this cell again").wait_for()
    assert not page.get_by_text("model not found").first.is_visible()


def test_settings_that_are_pasted_on_the_panel_reach_it_and_nothing_else(page, browser):
    """With the focus of a click on its words; a single word is for the field it is pasted into."""
    alerts = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    browser.grant_permissions(["clipboard-read", "clipboard-write"])
    cells = page.locator(PROMPT).count()

    def paste(text):
        page.evaluate("text => navigator.clipboard.writeText(text)", text)
        page.keyboard.press("Control+v")

    output(page).get_by_text("tokens a step on a").click()
    paste(
        "model_name_or_path: gpt2\nuse_peft: true\nlora_r: 4\nmax_length: 64\nper_device_train_batch_size: 2\n"
        "lora_modules_to_save: <img src=x onerror=alert(1)>\n"
    )
    output(page).get_by_text("read as SFTConfig").wait_for()
    page.locator(f"{HEAD} .wb-alarm", has_text="compute capability").wait_for()  # of T4, which has no bf16
    output(page).get_by_text("lora_modules_to_save: <img src=x onerror=alert(1)>").wait_for()
    assert output(page).get_by_label("LoRA", exact=True).is_checked()
    button(page, "Undo").click()
    output(page).get_by_label("LoRA", exact=True).and_(page.locator(":not(:checked)")).wait_for(state="attached")
    length = output(page).get_by_label("sequence length", exact=True)
    assert length.input_value() == "32"
    length.select_text()
    paste("48")
    length.press("Enter")
    assert length.input_value() == "48"
    assert page.locator(PROMPT).count() == cells
    assert alerts == []


# ---- how it looks ----


WIDTHS = (400, 700, 1000, 1400)
CUT_OFF = """
() => [...document.querySelectorAll('.jp-Cell-outputArea :is(.widget-box, .widget-label, button, .wb-facts span)')]
  .filter(e => e.offsetParent && !e.closest('.wb-sentence > :is(.widget-text, .widget-dropdown)'))
  .filter(e => e.scrollWidth > e.clientWidth + 2 && getComputedStyle(e).overflowX !== 'visible')
  .filter(e => !e.matches('.wb-said'))
  .map(e => e.className + ': ' + e.innerText)
"""


def show_at(page, width):
    page.set_viewport_size({"width": width, "height": 1000})
    page.wait_for_timeout(300)
    page.locator(".workbench-panel").first.scroll_into_view_if_needed()


def test_nothing_is_cut_off_or_hard_to_reach_and_the_verdict_stays_in_sight(page, browser, screenshot, subtests):
    """At every width, in light and dark, with each part open. The rules of axe-core are WCAG's; JupyterLab's own frame
    is not ours."""
    if page.locator("#jp-left-stack").is_visible():
        page.keyboard.press("Control+b")  # the file browser
    take(page)
    for theme in ("Light", "Dark"):
        choose_theme(page, f"JupyterLab {theme}")
        for width in WIDTHS:
            show_at(page, width)
            screenshot(page, f"playground-{width}-{theme}")
            with subtests.test(width=width, theme=theme):
                assert page.evaluate(CUT_OFF) == []
                assert violations(page) == []
                page.locator(".wb-switch input:visible").last.focus()  # far down: it scrolls to it
                assert in_sight(page, GAUGE)
        show_at(page, 1400)
        for part in ("See the step", "What fits where", "Take the script home", "Train it here"):
            open_part(page, part)
            page.wait_for_timeout(1500)
            screenshot(page, f"playground-{part.replace(' ', '-')}-{theme}")
            with subtests.test(part=part, theme=theme):
                assert violations(page) == []
        output(page).locator(".wb-word.mod-active").click()
    choose_theme(page, "JupyterLab Light")
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert browser.strangers == []


def violations(page):
    """What axe-core finds in the panel: the rule, and the elements."""
    results = Axe().run(page, context=".workbench-panel", options={"iframes": False})
    return [
        f"{found['id']}: {[node['html'][:200] for node in found['nodes']]}" for found in results.response["violations"]
    ]


@pytest.mark.long
def test_the_pictures_of_the_readme(open_notebook, lab, screenshot):
    """Looked at by eye, then copied to data/pictures: what a T4 needs, and a training of the embedded model."""
    write_notebook(lab[1] / "needs.ipynb", "from workbench import Playground\nPlayground()", hidden=1)
    page = open_notebook("needs.ipynb")
    page.set_viewport_size({"width": 1280, "height": 900})
    choose_theme(page, "JupyterLab Light")
    if page.locator("#jp-left-stack").is_visible():
        page.keyboard.press("Control+b")  # the file browser
    take(page)
    page.locator(".wb-free").first.wait_for()
    page.locator(".workbench-panel").first.screenshot(path=SCREENSHOTS / "readme-needs.png")
    choose_theme(page, "JupyterLab Dark")
    open_part(page, "Train it here")
    button(page, "Start").click()
    wait_for_status(page, "ok. Held-out loss")
    output(page).get_by_text(re.compile("Predicted .* measured")).first.wait_for()
    page.locator(".workbench-panel").first.screenshot(path=SCREENSHOTS / "readme-trains.png")
