"""A panel in a notebook's page: how it is written, run, filled in and read."""

import re
from contextlib import contextmanager

import nbformat

OUTPUT = ".jp-Cell-outputArea"
HEAD = f"{OUTPUT} .wb-head .workbench-gauge"
GAUGE = f"{HEAD} [role=img]"
NEWEST_GAUGE = f"{HEAD}:not(.wb-old) [role=img]"  # of an answer to the newest question
PROMPT = ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell .jp-InputArea-prompt"
VERDICT = re.compile("Fits, |too much")


def write_notebook(path, *sources, hidden=0):
    """A notebook of these code cells; the sources of the first ones may be hidden."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    for cell in notebook.cells[:hidden]:
        cell.metadata = {"jupyter": {"source_hidden": True}}
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


@contextmanager
def failing_with_page_text(page, what):
    """What fails here says what the page says."""
    from playwright.sync_api import Error

    try:
        yield
    except Error as error:
        raise AssertionError(f"no {what}; the page says: {page.locator('body').inner_text()[-3000:]}") from error


def run_all(page):
    """Run the notebook's one cell again, to its end, which is when it has another number. JupyterLab says `Idle` before
    it has begun, and then the panel of the run before is still on the page."""
    number_before = number_of_cell(page, "")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    number_of_cell(page, number_before)
    with failing_with_page_text(page, "verdict"):
        page.locator(NEWEST_GAUGE).wait_for()


def number_of_cell(page, number_before):
    """What stands before the cell once it is not running and has another number: `[ ]:`, and then `[1]:`."""
    with failing_with_page_text(page, "end of the cell"):
        page.wait_for_function(
            "([prompt, before]) => {"
            "  const number = document.querySelector(prompt)?.innerText ?? '*';"
            "  return !number.includes('*') && number !== before; }",
            arg=[PROMPT, number_before],
        )
    return page.locator(PROMPT).inner_text()


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
    """Of an answer to the newest question: the headline, and the line below it."""
    page.wait_for_function(f"() => document.querySelector('{NEWEST_GAUGE}')")
    return page.locator(f"{HEAD} .wb-verdict").inner_text()


def open_part(page, name):
    """What stands behind one of the four words; it stays open if it is."""
    word = output(page).locator(".wb-word", has_text=name)
    if "mod-active" not in word.get_attribute("class"):
        word.click()
    output(page).locator(".wb-word.mod-active", has_text=name).wait_for()


def take(page):
    """The one button, once it says what it will do."""
    action = output(page).locator(".wb-action:enabled")
    action.wait_for()
    return action


def wait_for_status(page, words):
    with failing_with_page_text(page, f"status {words!r}"):
        output(page).locator('[role="status"]', has_text=re.compile(words)).first.wait_for()


def stop_training(page):
    if button(page, "Stop").count() and button(page, "Stop").is_enabled():
        button(page, "Stop").click()
        wait_for_status(page, "interrupted after|Stopped before it began")


def choose_theme(page, name):
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Theme$")).hover()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{name}$")).click()
    page.wait_for_timeout(800)
