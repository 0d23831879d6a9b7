"""Taking a recipe home and bringing one, in a real JupyterLab: the clipboard, a file, and what the panel then says."""

import pytest
from driving import OUTPUT, write_notebook

pytestmark = [pytest.mark.dear, pytest.mark.xdist_group("browser")]
AXOLOTL = """base_model: <img src=x onerror=alert(1)>
adapter: qlora
load_in_4bit: true
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 2
lora_r: 4
learning_rate: 2e-4
deepspeed: zero.json
"""
SOURCE = """import ipywidgets as w
from workbench import Recipe
from workbench.widgets.takehome import TakeHome
class Panel:
    recipe = Recipe(model='gpt2-tiny', steps=3)
    words = w.HTML(recipe.label)
    def choose(self, recipe):
        self.recipe, self.words.value = recipe, recipe.label
panel = Panel()
tab = TakeHome(lambda: panel.recipe, panel.choose)
tab.form.value = 'JSON'
w.VBox([panel.words, tab.view])"""


@pytest.fixture
def page(lab, open_notebook):
    write_notebook(lab[1] / "home.ipynb", SOURCE)
    return open_notebook("home.ipynb")


def test_a_recipe_is_brought_copied_and_downloaded(page, browser, screenshot):
    alerts = []
    page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
    shown = page.locator(OUTPUT)
    shown.locator("select").select_option("recipe file (TOML)")
    taken = shown.get_by_label("the recipe, to be copied")
    shown.get_by_text("Download recipe.toml").wait_for()

    shown.locator(".widget-textarea textarea").fill(AXOLOTL)
    shown.get_by_role("button", name="Use it").click()
    shown.get_by_text("read as settings of axolotl").wait_for()
    shown.get_by_text("several GPUs are not predicted from here").wait_for()
    shown.get_by_text("gradient_accumulation(steps=2) + pure_bf16 + qlora(rank=4, compute=bfloat16)").wait_for()
    page.wait_for_function("() => document.querySelector('.workbench-take-home textarea').value.includes('rank = 4')")

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
    assert "[technique.qlora]" in downloaded.value.path().read_text(encoding="utf-8")

    shown.locator(".widget-textarea textarea").fill("sequence_len: <b>many")
    shown.get_by_role("button", name="Use it").click()
    shown.get_by_role("alert").get_by_text("Nothing was changed").wait_for()
    assert shown.get_by_text("qlora(rank=4, compute=bfloat16)").is_visible()
    screenshot(page, "take-home-light")
    assert alerts == []
    assert browser.strangers == []
