"""Taking a recipe home, in a real JupyterLab: the clipboard, and a file."""

import pytest
from driving import OUTPUT, write_notebook

pytestmark = [pytest.mark.dear, pytest.mark.xdist_group("browser")]
SOURCE = """from workbench import Recipe
from workbench.widgets.takehome import TakeHome
recipe = Recipe(model='gpt2-tiny', steps=3)
tab = TakeHome(lambda: recipe)
tab.form.value = 'command'
tab.view"""


@pytest.fixture
def page(lab, open_notebook):
    write_notebook(lab[1] / "home.ipynb", SOURCE)
    return open_notebook("home.ipynb")


def test_a_recipe_is_copied_and_downloaded(page, browser, screenshot):
    alerts = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    shown = page.locator(OUTPUT)
    shown.locator("select").select_option("recipe file (TOML)")
    taken = shown.get_by_label("the recipe, to be copied")
    shown.get_by_text("Download recipe.toml").wait_for()

    browser.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.get_by_role("button", name="Copy", exact=True).click()
    shown.get_by_role("status").get_by_text("Copied.").wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == taken.input_value()
    page.evaluate("() => Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # a page without https
    taken.evaluate("area => { area.value += '# again' }")
    shown.get_by_role("button", name="Copy", exact=True).focus()
    page.keyboard.press("Enter")
    shown.get_by_role("status").get_by_text("Copied.").wait_for()
    assert page.evaluate("() => getSelection().toString()").endswith("# again")

    with page.expect_download() as downloaded:
        shown.get_by_text("Download recipe.toml").click()
    assert downloaded.value.suggested_filename == "recipe.toml"
    assert 'model = "gpt2-tiny"' in downloaded.value.path().read_text(encoding="utf-8")

    screenshot(page, "take-home-light")
    assert alerts == []
    assert browser.strangers == []
