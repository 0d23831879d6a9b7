"""The playground in a real JupyterLab: what a person clicks, and what the page then says."""

import re
import time

import nbformat
import pytest

from workbench.locations import NOTEBOOKS

OUTPUT = ".jp-Cell-outputArea"


@pytest.fixture(scope="module", autouse=True)
def panel(lab, model_name, text_file):
    """A notebook with a playground of the small model, so that a step takes milliseconds."""
    _, folder = lab
    source = (
        "import torch\ntorch.set_num_threads(1)\nfrom workbench import Playground, Recipe\n"
        f"Playground(Recipe(model={model_name!r}, corpus={str(text_file)!r}, sequence_length=32, steps=400))"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "panel.ipynb")


@pytest.fixture
def page(open_notebook):
    page = open_notebook("panel.ipynb")
    output(page).get_by_text("Fits.").wait_for()
    return page


def output(page):
    """Only what the cell shows: its source contains the same words."""
    return page.locator(OUTPUT)


def button(page, name):
    return output(page).get_by_role("button", name=name, exact=True)


def status(page):
    return output(page).locator('[role="status"]')


def wait_for_status(page, words, timeout=60_000):
    output(page).locator('[role="status"]', has_text=re.compile(words)).wait_for(timeout=timeout)


def test_a_toggle_changes_gauge_and_words(page, screenshot):
    gauge = output(page).locator('[role="img"]').first
    before = gauge.get_attribute("aria-label")
    started = time.monotonic()
    output(page).get_by_label("Gradient checkpointing", exact=True).check()
    page.wait_for_function(
        "before => document.querySelector('.jp-Cell-outputArea [role=\"img\"]').ariaLabel !== before", arg=before
    )
    print(f"\nthe gauge answered after {time.monotonic() - started:.1f} s")
    assert "activations" in before
    assert output(page).get_by_label("every n layers").is_visible()
    output(page).get_by_label("budget").fill("1MiB")
    output(page).get_by_label("budget").press("Enter")
    output(page).get_by_text(re.compile("Does not fit, over by")).wait_for()
    screenshot(page, "playground-light")


def test_start_curves_move_stop(page, screenshot):
    button(page, "Start").click()
    wait_for_status(page, r"step \d+ of 400")
    first = output(page).locator('img[alt^="Training loss"]').first
    first.wait_for()
    before = first.get_attribute("alt")
    page.wait_for_function(
        "before => document.querySelector('.jp-Cell-outputArea img[alt^=\"Training loss\"]').alt !== before", arg=before
    )
    screenshot(page, "playground-running")
    started = time.monotonic()
    button(page, "Stop").click()
    wait_for_status(page, "interrupted after", timeout=10_000)
    print(f"\nstopped after {time.monotonic() - started:.1f} s")
    assert button(page, "Start").is_enabled()


def test_the_page_can_be_reloaded_in_the_middle_of_a_run(page):
    page.keyboard.press("Control+s")
    button(page, "Start").click()
    wait_for_status(page, r"step \d+ of 400")
    page.keyboard.press("Control+s")
    time.sleep(1.0)
    page.reload()
    wait_for_status(page, r"step \d+ of 400")
    button(page, "Stop").click()
    wait_for_status(page, "interrupted after", timeout=10_000)


def test_out_of_memory_is_an_alarm_and_its_advice_clicked_works(page, screenshot):
    output(page).get_by_label("memory cap").fill("12MiB")
    output(page).get_by_role("spinbutton", name="steps", exact=True).fill("5")
    output(page).get_by_role("spinbutton", name="steps", exact=True).press("Tab")
    button(page, "Start").click()
    wait_for_status(page, "oom after")
    assert "213, 94, 0" in status(page).first.evaluate("e => getComputedStyle(e).borderLeftColor")
    screenshot(page, "playground-out-of-memory")
    advice = output(page).get_by_role("button", name=re.compile("^Turn on|^Set")).first
    advice.click()
    button(page, "Start").click()
    wait_for_status(page, "ok. Held-out loss")


def test_the_script_comes_out_and_the_history_overlays(page):
    output(page).get_by_role("spinbutton", name="steps", exact=True).fill("5")
    output(page).get_by_role("spinbutton", name="steps", exact=True).press("Tab")
    button(page, "Start").click()
    wait_for_status(page, "ok. Held-out loss")
    output(page).get_by_role("tab", name="Take home").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.jp-Cell-outputArea textarea')]"
        ".some(t => t.value.includes('trainer.train()'))"
    )
    output(page).get_by_role("tab", name="History").click()
    output(page).locator("select[multiple] option").first.click()
    output(page).locator('img[alt^="Peak memory"]').wait_for()


def test_it_works_with_the_keyboard_alone(page):
    box = output(page).get_by_label("Gradient checkpointing", exact=True)
    box.focus()
    page.keyboard.press("Space")
    assert box.is_checked()
    button(page, "Start").focus()
    page.keyboard.press("Enter")
    wait_for_status(page, r"step \d+ of 400|loading")
    button(page, "Stop").click()
    wait_for_status(page, "interrupted after", timeout=20_000)


@pytest.mark.parametrize("width", [1280, 640])
def test_nothing_is_cut_off_in_light_and_dark(page, browser, screenshot, width):
    if page.locator("#jp-left-stack").is_visible():
        page.keyboard.press("Control+b")  # the file browser
    page.set_viewport_size({"width": width, "height": 1000})
    page.wait_for_timeout(300)
    wide = page.evaluate(
        "() => [...document.querySelectorAll('.jp-Cell-outputArea .widget-box')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 2).length"
    )
    screenshot(page, f"playground-{width}")
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Theme$")).hover()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^JupyterLab Dark$")).click()
    page.wait_for_timeout(800)
    screenshot(page, f"playground-{width}-dark")
    assert wide == 0
    assert browser.strangers == []


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[01]*.ipynb")), ids=lambda path: path.stem)
def test_every_lessons_widget_renders(open_notebook, lab, path):
    """The cells up to the recipe, then the widget's: the trainings between them are other tests' business."""
    notebook = nbformat.read(path, as_version=4)
    widget = [cell for cell in notebook.cells if "widget" in cell.metadata.tags and cell.cell_type == "code"]
    if not widget:
        pytest.skip("has no technique to toggle")
    source = "from workbench import Recipe\nrecipe, gpu = Recipe(model='gpt2-tiny'), 't4'\n" + widget[0].source
    small = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)], metadata=notebook.metadata)
    nbformat.write(small, lab[1] / f"widget-{path.stem}.ipynb")
    page = open_notebook(f"widget-{path.stem}.ipynb")
    output(page).get_by_role("checkbox").first.wait_for()
    output(page).get_by_text(re.compile("Fits.|Does not fit")).first.wait_for()
