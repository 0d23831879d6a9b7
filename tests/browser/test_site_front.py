"""The site's front page: what it answers without a kernel, by mouse and by keyboard, light, dark and narrow."""

import random
import shutil

import front_grid
import front_html
import pytest

from workbench.gpus.catalogue import COMMON

pytestmark = [pytest.mark.dear, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("front")
    (folder / "index.html").write_text(front_html.fill_page(), encoding="utf-8")
    for name in ("front.css", "front.js"):
        shutil.copy(front_html.FRONT / name, folder)
    return (folder / "index.html").as_uri()


@pytest.fixture
def front(browser, address):
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    yield page
    page.close()
    assert errors == []
    assert browser.strangers == []


def verdict(page):
    return page.locator("#words").inner_text()


def test_a_choice_is_answered_and_one_button_makes_it_fit(front):
    assert verdict(front) == "✗ 0.7 GiB too much"
    front.get_by_role("button", name="Make it fit").click()
    assert verdict(front).startswith("✓ Fits, ")
    assert front.get_by_role("checkbox", name="Fused GELU").is_checked()
    front.get_by_role("button", name="Undo").click()
    assert verdict(front) == "✗ 0.7 GiB too much"
    front.get_by_label("card", exact=True).select_option("h100")
    front.get_by_label("model", exact=True).select_option("meta-llama/Llama-3.1-8B")
    front.get_by_label("sequences a step").select_option("2")
    assert verdict(front).startswith("✗ ")
    assert front.get_by_role("checkbox", name="Fused GELU").is_disabled()
    front.get_by_role("radio", name="QLoRA").check()
    assert verdict(front).startswith("✓ Fits, ")
    assert "predicted, nothing was run" in front.locator("#because").inner_text()
    chosen = front.url
    front.goto("about:blank")
    front.goto(chosen)  # a link brings the choice along
    assert front.get_by_role("radio", name="QLoRA").is_checked()
    assert "--technique qlora" in front.locator("#foot code").inner_text()


def test_its_answers_are_those_that_were_checked(front):
    """`answer` of the tool, which was held against predictions, and `answerTo` of the page are two programs."""
    data = front.evaluate("DATA")
    points = {model["name"]: model["points"] for model in data["models"]}
    drawn = random.Random(1)
    choices = []
    for model in points:
        for mode, switches in front_grid.sets_of(model):
            batch = drawn.choice(front_grid.BATCHES[1:])
            length = drawn.choice(front_grid.lengths_of(model))
            gpus = [gpu for gpu in COMMON.values() if front_grid.suits(model, mode, length, gpu)]
            if not gpus:
                continue
            gpu = drawn.choice(gpus)
            accumulated = drawn.choice([(), (front_grid.ACCUMULATED,)])
            choices.append((front_grid.Choice(model, mode, (*accumulated, *switches), batch, length), gpu))
    asked = [{**vars(choice), "gpu": gpu.name} for choice, gpu in choices]
    answers = front.evaluate("asked => asked.map(answerTo)", asked)
    for (choice, gpu), shown in zip(choices, answers, strict=True):
        expected = front_grid.answer(points, choice, gpu)
        assert (shown["verdict"], shown["need"]) == (expected.verdict, pytest.approx(expected.need, abs=0.2)), choice
        assert sum(shown["parts"].values()) == pytest.approx(expected.need, abs=0.2)


def test_what_the_points_do_not_tell_is_not_answered(front):
    """In 32 bits, and on a T4 at all, grouped queries store probabilities, which grow with the square of the length."""
    front.get_by_label("card", exact=True).select_option("h100")
    front.get_by_label("model", exact=True).select_option("Qwen/Qwen3-0.6B")
    front.get_by_label("tokens of a sequence").select_option("2048")
    assert front.get_by_role("radio", name="Every parameter").is_disabled()
    assert front.get_by_role("radio", name="Mixed precision (bf16)").is_checked()
    front.get_by_label("card", exact=True).select_option("t4")
    assert front.get_by_label("tokens of a sequence").locator("option").all_inner_texts() == ["1,024"]
    assert front.get_by_role("radio", name="Every parameter").is_checked()
    assert front.get_by_role("radio", name="LoRA, mixed precision", exact=True).is_disabled()


def test_keys_reach_everything_and_everything_has_a_name(front):
    reached = []
    front.locator("#model").focus()
    for _ in range(12):
        reached.append(front.evaluate("document.activeElement.id || document.activeElement.value"))
        front.keyboard.press("Tab")
    # of the radio buttons the chosen one: arrows lead on from there
    assert reached[:10] == ["model", "batch", "length", "gpu", "fit", "acc", "gelu", "chunk", "ckpt", "full"]
    front.get_by_role("checkbox", name="Chunked cross-entropy").focus()
    front.keyboard.press("Space")
    assert verdict(front).startswith("✓ Fits, ")
    front.get_by_role("radio", name="Every parameter").focus()
    front.keyboard.press("ArrowDown")
    assert front.get_by_role("radio", name="Mixed precision (fp16)").is_checked()
    assert front.locator("#bar").get_attribute("aria-label").startswith(front.locator("#because").inner_text()[6:10])


def test_no_width_cuts_it_off_and_without_javascript_there_is_a_table(front, subtests):
    for theme in ("light", "dark"):
        front.emulate_media(color_scheme=theme)
        for width in (1400, 700, 400):
            with subtests.test(theme=theme, width=width):
                front.set_viewport_size({"width": width, "height": 900})
                assert front.evaluate("document.documentElement.scrollWidth") == width
    assert front.locator("noscript").count() == 1
    text = front_html.fill_page().partition("<noscript>")[2].partition("</noscript>")[0]
    assert text.count("<tr>") == 1 + len(front_grid.MODELS)
