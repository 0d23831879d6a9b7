"""A panel in a notebook's page: how it is written, run, filled in and read."""

import re
from contextlib import contextmanager

import nbformat

OUTPUT = ".jp-Cell-outputArea"
GAUGE = f"{OUTPUT} .workbench-gauge [role=img]"
VERDICT = re.compile("Fits.|Does not fit")


def write_panel(path, source):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


@contextmanager
def told(page, what):
    """What fails here says what the page says."""
    from playwright.sync_api import Error

    try:
        yield
    except Error as error:
        raise AssertionError(f"no {what}; the page says: {page.locator('body').inner_text()[-3000:]}") from error


def run_all(page, menu="Run", entry="Run All Cells"):
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.get_by_role("menuitem", name=entry, exact=True).click()
    page.get_by_text("| Idle").first.wait_for()
    with told(page, "verdict"):
        output(page).get_by_text(VERDICT).filter(visible=True).first.wait_for()  # a closed tab has one, too
    page.wait_for_timeout(300)


def output(page):
    """Only what the cell shows: its source contains the same words."""
    return page.locator(OUTPUT)


def button(page, name):
    return output(page).get_by_role("button", name=name, exact=True)


def wait_for_button(page, name, state):
    """Until it is `enabled` or `disabled`: what a panel says and what it allows are messages of their own."""
    button(page, name).and_(page.locator(f":{state}")).wait_for()


def fill(page, label, text, key="Enter"):
    """The first field with this label: of the recipe, not of a technique."""
    field = output(page).get_by_label(label, exact=True).first
    field.fill(text)
    field.press(key)


def gauge(page):
    return page.locator(GAUGE).get_attribute("aria-label")


def verdict(page):
    """The line above the bar, of an answer to the newest question."""
    page.wait_for_function(
        f"() => document.querySelector('{GAUGE}') && !document.querySelector('.workbench-gauge.wb-old')"
    )
    return page.locator(".workbench-gauge p").nth(0).inner_text()


def wait_for_status(page, words):
    with told(page, f"status {words!r}"):
        output(page).locator('[role="status"]', has_text=re.compile(words)).first.wait_for()


def stop_training(page):
    if button(page, "Stop").count() and button(page, "Stop").is_enabled():
        button(page, "Stop").click()
        wait_for_status(page, "interrupted after")


def choose_theme(page, name):
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Theme$")).hover()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{name}$")).click()
    page.wait_for_timeout(800)
