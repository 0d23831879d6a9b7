"""The playground in a real JupyterLab: what a person clicks, and what the page then says."""

import re
import time

import nbformat
import pytest

from workbench.paths import NOTEBOOKS

OUTPUT = ".jp-Cell-outputArea"


@pytest.fixture(scope="module", autouse=True)
def panel(lab, model_name, text_file):
    """A notebook with a playground of the small model, so that a step takes milliseconds."""
    _, folder = lab
    source = (
        "import torch\ntorch.set_num_threads(1)\nfrom workbench import Playground, Recipe\n"
        f"Playground(Recipe(model={model_name!r}, corpus={str(text_file)!r}, sequence_length=32, steps=400))"
    )
    write_panel(folder / "panel.ipynb", source)


def write_panel(path, source):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


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


def choose_theme(page, name):
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Theme$")).hover()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{name}$")).click()
    page.wait_for_timeout(800)


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
    choose_theme(page, "JupyterLab Dark")
    screenshot(page, f"playground-{width}-dark")
    assert wide == 0
    assert browser.strangers == []


def test_every_lessons_widget_renders(open_notebook, lab):
    """The widget's cell of each, in one notebook: the trainings before it are other tests' business."""
    lessons = {path.stem: nbformat.read(path, as_version=4) for path in sorted(NOTEBOOKS.glob("[01]*.ipynb"))}
    cells = {
        stem: cell.source
        for stem, lesson in lessons.items()
        for cell in lesson.cells
        if "widget" in cell.metadata.tags and cell.cell_type == "code"
    }
    assert {stem for stem in lessons if "01" < stem < "14"} - {"01_baseline"} == set(cells)
    setup = "from workbench import Recipe\nrecipe, gpu = Recipe(model='gpt2-tiny'), 't4'"
    both = nbformat.v4.new_notebook(metadata=next(iter(lessons.values())).metadata)
    both.cells = [nbformat.v4.new_code_cell(source) for source in (setup, *cells.values())]
    nbformat.write(both, lab[1] / "widgets.ipynb")
    page = open_notebook("widgets.ipynb")
    for number, stem in enumerate(cells, 1):
        cell = page.locator(".jp-CodeCell").nth(number)
        cell.scroll_into_view_if_needed()  # JupyterLab draws what is in sight
        shown = cell.locator(OUTPUT)
        shown.get_by_role("checkbox").first.wait_for()
        shown.get_by_text(re.compile("Fits.|Does not fit")).first.wait_for()
        assert shown.get_by_role("img").count(), stem


@pytest.mark.long
def test_the_pictures_of_the_readme(open_notebook, lab, screenshot):
    """Looked at by eye, then copied to data/pictures: what a T4 needs, and a training of the embedded model."""
    recipe = "Recipe(model='random:gpt2', effective_batch_size=8, sequence_length=1024)"
    write_panel(lab[1] / "needs.ipynb", f"from workbench import Playground, Recipe\nPlayground({recipe}, gpu='t4')")
    write_panel(lab[1] / "trains.ipynb", "from workbench import Playground\nPlayground(gpu='t4')")
    page = open_notebook("needs.ipynb")
    page.set_viewport_size({"width": 1280, "height": 1000})
    choose_theme(page, "JupyterLab Light")
    if page.locator("#jp-left-stack").is_visible():
        page.keyboard.press("Control+b")  # the file browser
    output(page).get_by_text(re.compile("Does not fit, over by")).wait_for()
    output(page).get_by_label("Gradient checkpointing", exact=True).check()
    output(page).get_by_text(re.compile("Fits.")).wait_for()
    screenshot(page, "readme-needs")
    page = open_notebook("trains.ipynb")
    page.set_viewport_size({"width": 1280, "height": 1000})
    choose_theme(page, "JupyterLab Dark")
    button(page, "Start").click()
    wait_for_status(page, "ok. Held-out loss")
    screenshot(page, "readme-trains")
