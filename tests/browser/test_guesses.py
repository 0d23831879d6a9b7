"""A guess in a real chromium: what the page says to it, by mouse and keyboard, alone and in JupyterLab."""

import pytest
from driving import output, write_notebook

from workbench.lessons.exercise import exercise

pytestmark = [pytest.mark.dear, pytest.mark.xdist_group("browser")]
MIB = 2**20
HOSTILE = """<b>bold</b> "quoted" 'too' {{answer}} </form><script>window.broken = 1</script>"""
PAGE = (
    "<!doctype html><html lang='en'><title>t</title><body style='{style}'>{body}<p id='after'>after</p></body></html>"
)
SOURCE = """\
from workbench.lessons.exercise import exercise
exercise("Which grows?", "logits", "why", choices=["weights", "logits"])
"""


@pytest.fixture
def page(browser):
    """Shows exercises one below the other; nothing may go wrong in their scripts, and nothing is fetched."""
    before, opened = list(browser.strangers), browser.new_page()
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))

    def show(*exercises, width=1000, style=""):
        opened.set_viewport_size({"width": width, "height": 700})
        opened.set_content(PAGE.format(style=style, body="".join(one.data for one in exercises)))
        return opened

    yield show
    opened.close()
    assert errors == []
    assert browser.strangers == before


def guess(form, text):
    form.get_by_role("textbox").fill(text)
    form.get_by_role("button", name="Check").click()
    return form.get_by_role("status").inner_text()


def test_the_page_judges_guesses_of_bytes_and_of_other_numbers(page):
    shown = page(
        exercise("Bytes?", 1024 * MIB, "why"),
        exercise("Share?", 4.2, "why", unit="%"),
        exercise("None?", 0, "why", unit="times"),
    )
    in_bytes, share, none = (shown.locator("form").nth(i) for i in range(3))
    for text, verdict in (
        ("600 MiB", "Close: the answer is more."), ("1.9 GiB", "Close: the answer is less."),
        ("1 MiB", "Far off: the answer is more."), ("1e3 GiB", "Write a number and its unit, such as MiB."),
        ("1024", "Write a number and its unit, such as MiB."),
        ("42 bananas", "Write a number and its unit, such as MiB."),
        ("", "Write a number and its unit, such as MiB."), ("-1024 MiB", "Far off: the answer is more."),
    ):  # fmt: skip
        assert guess(in_bytes, text) == verdict, text
        assert in_bytes.locator("details").get_attribute("open") is None
    for text in (
        "1,024 MiB",
        "1 024 mib",
        "1_048_576 KiB",
        "1GiB",
        "1 G",
        "1,07 GB",
        "0.95 GiB",
        ".95 gib",
        "1073741824 bytes",
    ):
        assert guess(in_bytes, text) == "Right.", text
    assert in_bytes.locator("details").get_attribute("open") is not None
    for text, verdict in (
        ("4.2", "Right."),
        ("4,2 %", "Right."),
        ("4.2 MiB", "Write a number, in %."),
        ("0.042", "Far off: the answer is more."),
    ):
        assert guess(share, text) == verdict, text
    assert guess(none, "0") == "Right."
    assert guess(none, "1") == "Far off: the answer is less."
    assert guess(none, "0 ti") == "Right."


def test_several_on_a_page_the_same_twice_with_the_keyboard_alone_and_by_name(page):
    which = exercise("Which grows?", "logits", "why", choices=["weights", "logits"])
    shown = page(which, which, exercise("How much?", 42 * MIB, "why", number=2))
    first, second, third = (shown.locator("form").nth(i) for i in range(3))
    assert first.get_by_role("radiogroup", name="Which grows?").get_by_role("radio").count() == 2
    assert third.get_by_role("textbox", name="How much?").count() == 1
    assert third.locator("b").first.inner_text() == "Exercise 2."
    heard = "() => { window.heard = 0; document.addEventListener('keydown', () => window.heard++); }"
    shown.evaluate(heard)
    keys = shown.keyboard
    for key in ("Tab", "Space", "ArrowDown", "Enter"):
        keys.press(key)
    assert first.get_by_role("status").inner_text() == "Right."
    assert second.get_by_role("status").inner_text() == ""
    second.get_by_role("button").click()
    assert second.get_by_role("status").inner_text() == "Choose one."
    second.get_by_role("radio", name="weights").check()
    second.get_by_role("button").press("Space")
    assert second.get_by_role("status").inner_text().startswith("No: look again")
    assert first.get_by_role("radio", name="logits").is_checked()
    third.get_by_role("textbox").focus()
    keys.type("42 mib")
    keys.press("Enter")
    assert third.get_by_role("status").inner_text() == "Right."
    assert shown.evaluate("() => window.heard") == 1  # the Tab that came from outside


def test_words_stay_words_and_a_narrow_page_stays_narrow(page):
    hostile = exercise(HOSTILE, HOSTILE, HOSTILE, choices=[HOSTILE, "b"])
    shown = page(hostile, width=400, style="color: #ddd; background: #111")
    assert shown.evaluate("() => window.broken") is None
    assert shown.locator("form").locator("#after").count() == 0
    assert shown.locator(".question").inner_text() == HOSTILE
    assert shown.locator("form b").count() == 2  # the label and the answer
    shown.get_by_role("radio").first.check()
    shown.get_by_role("button").click()
    assert shown.get_by_role("status").inner_text() == "Right."
    assert shown.locator("details p").inner_text() == f"{HOSTILE}. {HOSTILE}"
    assert shown.evaluate("() => document.documentElement.scrollWidth") == 400
    contrast = "one => [getComputedStyle(one).color, getComputedStyle(one.querySelector('summary')).color]"
    assert shown.locator("form").evaluate(contrast) == ["rgb(221, 221, 221)"] * 2


def test_a_guess_is_judged_and_its_keys_move_no_cell(lab, open_notebook):
    _, folder = lab
    sources = (SOURCE, 'exercise("How much?", 42 * 2**20, "why")', "'behind'")
    write_notebook(folder / "guess.ipynb", *sources, hidden=2)
    page = open_notebook("guess.ipynb")
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
