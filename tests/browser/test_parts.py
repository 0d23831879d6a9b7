"""The parts of the panel, each alone in a real JupyterLab: by keyboard, at two widths, in light and dark."""

import re
from pathlib import Path

import pytest
from driving import write_notebook

pytestmark = [pytest.mark.dear, pytest.mark.xdist_group("browser")]
PARTS = ".jp-Cell-outputArea .wb-part"
NOTEBOOK = """\
import sys
sys.path.insert(0, {folder!r})
from IPython.display import display
from parts import MIB, Machine
from workbench.recipe import Recipe
from workbench.widgets import fits as what_fits

recipe, machine = Recipe(model="gpt2-tiny", effective_batch_size=16, sequence_length=512), Machine()
what_fits.predict_all = machine.each
fits = what_fits.WhatFits()
fits.predictor = machine
fits.show(recipe, "t4", 800 * MIB)
display(fits.view)
"""


@pytest.fixture(scope="module")
def page(lab, open_notebook):
    """One notebook with all of them, opened once."""
    _, folder = lab
    source = NOTEBOOK.format(folder=str(Path(__file__).parents[1] / "widgets"))
    write_notebook(folder / "parts.ipynb", source, hidden=1)
    page = open_notebook("parts.ipynb")
    part(page, "All is predicted").wait_for()
    return page


CUT_OFF = """
() => [...document.querySelectorAll('.wb-part, .wb-part .wide, .wb-part button, .wb-part li')]
  .filter(e => e.scrollWidth > e.clientWidth + 2).map(e => e.className + ' ' + e.innerText.slice(0, 60))
"""


def part(page, words):
    return page.locator(PARTS, has_text=words)


def test_the_table_has_headers_and_a_caption(page):
    fits = part(page, "On every card")
    table = fits.get_by_role("table", name=re.compile("Batch × length within 800 MiB on NVIDIA T4"))
    assert table.get_by_role("columnheader").count() == 8
    assert table.get_by_role("rowheader").count() == 5
    assert fits.get_by_role("listitem").count() == 21


def test_nothing_is_cut_off_in_light_and_dark(page, browser, screenshot, subtests):
    if page.locator("#jp-left-stack").is_visible():
        page.keyboard.press("Control+b")  # the file browser
    for theme in ("Light", "Dark"):
        page.get_by_role("menuitem", name="Settings", exact=True).click()
        page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Theme$")).hover()
        page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^JupyterLab {theme}$")).click()
        page.wait_for_timeout(500)
        for width in (1280, 700):
            page.set_viewport_size({"width": width, "height": 2600})
            page.locator(".jp-WindowedPanel-outer").first.evaluate("e => { e.scrollTop = 0 }")
            page.wait_for_timeout(300)
            screenshot(page, f"parts-{width}-{theme.lower()}")
            with subtests.test(theme=theme, width=width):
                assert page.evaluate(CUT_OFF) == []
    page.set_viewport_size({"width": 1280, "height": 1000})
    assert browser.strangers == []
    assert page.locator('[data-mime-type$="stderr"]').count() == 0, "no progress bar beside the panel"
