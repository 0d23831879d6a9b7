"""A guess in a real JupyterLab: its source is hidden, its script runs, its keys are no shortcuts of the notebook."""

import nbformat

from tests.browser.driving import output

SOURCE = """\
from workbench.lessons.exercise import exercise
exercise("Which grows?", "logits", "why", choices=["weights", "logits"])
"""


def test_a_guess_is_judged_and_its_keys_move_no_cell(lab, browser):
    address, folder = lab
    sources = (SOURCE, 'exercise("How much?", 42 * 2**20, "why")', "'behind'")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for cell in notebook.cells[:2]:
        cell.metadata = {"jupyter": {"source_hidden": True}}
    nbformat.write(notebook, folder / "guess.ipynb")
    page = browser.new_page()
    page.goto(f"{address}/lab/tree/guess.ipynb?token=t&reset")
    page.get_by_text("| Idle").first.wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    which, much = output(page).locator("form").nth(0), output(page).locator("form").nth(1)
    much.get_by_role("textbox").wait_for()
    assert page.get_by_text('"logits", "why"').count() == 0  # the source would tell
    which.get_by_role("radio", name="weights").check()
    for key in ("d", "d", "a", "b", "x", "m", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert which.get_by_role("status").inner_text() == "Right."
    much.get_by_role("textbox").focus()
    page.keyboard.type("42 mib")
    page.keyboard.press("Enter")
    assert much.get_by_role("status").inner_text() == "Right."
    much.get_by_role("button").focus()
    page.keyboard.type("ddabxm")
    assert page.locator(".jp-NotebookPanel .jp-CodeCell").count() == len(sources)
    assert page.locator(".jp-NotebookPanel .jp-MarkdownCell").count() == 0
    page.close()
