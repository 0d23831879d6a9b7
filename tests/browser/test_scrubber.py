"""The page of a step in a real chromium: what is at the cursor, by mouse and by keyboard, and how fast it follows."""

import re

import numpy as np
import pytest

from tests.lessons.test_timeline import HOSTILE, MIB, ROWS, one_step, prediction, repeated, told
from workbench.base.categories import Category, Phase
from workbench.lessons.timeline import scrubber

pytestmark = [pytest.mark.dear, pytest.mark.xdist_group("browser")]
LIGHT, DARK = "color: #222; background: #fff", "color: #ddd; background: #111"
LIVE = "() => steps.map(step => step.live.map(live => [...live].slice(0, step.events)))"


@pytest.fixture
def show(browser):
    """Open frames on a page of their own; the frame's document, and whatever went wrong in it."""
    pages = []

    def shown(frame, style=LIGHT, width=1000):
        page = browser.new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": 900})
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(error))
        page.set_content(f'<body style="margin: 0; {style}">{frame}</body>')
        page.frames[1].locator("[role=slider][aria-valuetext]").first.wait_for()
        return page, page.frames[1]

    yield shown
    for page in pages:
        assert page.errors == []
        page.close()


def words(frame, which=0):
    """What a screen reader says of the cursor, once it has been drawn."""
    frame.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return frame.locator("[role=slider]").nth(which).get_attribute("aria-valuetext")


def test_mouse_and_keys_move_the_words(show, browser):
    before = list(browser.strangers)
    page, frame = show(scrubber([prediction(one_step())]))
    slider = frame.get_by_role("slider")
    assert "20.0 MiB of tensors" not in words(frame)  # begins at the peak, which is 24
    assert re.search(r"^backward, event 3 of 8: gradient of tanh; 4.0 MiB taken; .*24.0 MiB of tensors", words(frame))
    slider.focus()
    page.keyboard.press("Home")
    assert words(frame).startswith("forward, event 1 of 8: matrix product, block 0, MLP")
    page.keyboard.press("ArrowRight")
    assert "event 2 of 8" in words(frame)
    assert "weights 4.0 MiB, activations 16.0 MiB" in words(frame)
    page.keyboard.press("End")
    assert words(frame).startswith("evaluation, event 8 of 8: after: matrix product")
    assert slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax") == "7"
    page.keyboard.press("p")
    assert "event 3 of 8" in words(frame)
    box = slider.bounding_box()
    page.mouse.move(box["x"] + 70, box["y"] + 100)
    assert "event 1 of 8" in words(frame)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] + 40, box["y"] + 400)  # a drag goes on outside
    assert "event 8 of 8" in words(frame)
    page.mouse.up()
    assert browser.strangers == before  # nothing was fetched


def test_what_lives_says_who_made_it_and_what_it_waits_for(show):
    _, frame = show(scrubber([prediction(one_step())]))
    text = frame.locator("#cards").inner_text()
    assert re.search(r"16.0 MiB\s+matrix product, MLP, block 0\s+2 × 8.0 MiB · until its backward · activations", text)
    assert re.search(r"4.0 MiB\s+gradients\s+1 tensors? · until the optimizer step", text)
    assert "the backward has come to: block 0, MLP" in text


def test_the_limit_is_told_in_words_and_where_it_is_exceeded(show):
    page, frame = show(scrubber([prediction(one_step())], 22 * MIB))
    verdict = frame.locator(".verdict")
    assert verdict.inner_text() == "✗ Does not fit: 26.0 MiB of 22.0 MiB, over by 4.0 MiB."
    assert words(frame).endswith("over the limit by 2.0 MiB")
    frame.get_by_role("slider").focus()
    page.keyboard.press("ArrowLeft")
    assert "over the limit" not in words(frame)
    _, frame = show(scrubber([prediction(one_step())]))
    assert frame.locator(".verdict").inner_text() == "✓ Fits: 538 MiB of 14.6 GiB."
    assert "14.6 GiB of NVIDIA T4 less 512 MiB of CUDA's context" in frame.locator("#notes").inner_text()
    on_cpu = prediction(one_step(), gpu="cpu", capacity_bytes=None, peak_reserved_bytes=None)
    _, frame = show(scrubber([on_cpu]))
    assert frame.locator(".verdict").inner_text() == "No limit known."


def test_the_bytes_of_every_event_are_the_timelines(show):
    """Of several steps the last and the evaluation; small tensors merged, what then lives exact."""
    random = np.random.default_rng(1)
    step = [Phase.FORWARD] * 150 + [Phase.BACKWARD] * 150 + [Phase.OPTIMIZER_STEP]
    phases = [None, Phase.EVALUATION, None, *step, None, *step, None, Phase.EVALUATION, None]
    begin = len(step) + 4
    sizes = [int(size) for size in random.choice((4, 512, 3000, 9 * MIB, 40 * MIB), len(phases))]
    tensors = []
    for event, size in enumerate(sizes):
        place = event - begin
        if not 150 <= place < 299:  # there a tensor of the forward pass ends
            tensors.append((size, event, begin + 298 - place if 0 <= place < 149 else -1, event % 7, event % 2))
    timeline = told(tensors, phases)
    wanted = timeline.live[:, begin:-1]
    _, frame = show(scrubber([prediction(timeline)]))
    live = np.array(frame.evaluate(LIVE)[0]).astype(np.int64)
    assert live.shape[1] < 0.8 * wanted.shape[1]
    assert live.sum(axis=0).max() == wanted.sum(axis=0).max()
    at = 0
    for column in live.T:  # each stands in the timeline, in its order
        found = np.flatnonzero((wanted[:, at:] == column[:, None]).all(axis=0))
        assert found.size
        at += int(found[0])
    np.testing.assert_array_equal(live[:, -1], wanted[:, -1])
    assert frame.evaluate("() => steps[0].born[0]") == -1  # there before
    assert frame.evaluate("() => steps[0].runs.map(run => run.phase)") == [
        "forward", "backward", "optimizer_step", "evaluation",
    ]  # fmt: skip


def test_two_recipes_move_together_on_one_scale(show):
    large = one_step()
    tensors = [(4 * MIB, 0, -1, 0, 0), (8 * MIB, 1, 3, ROWS[Category.ACTIVATIONS], 1), (MIB, 2, 4, 1, 1)]
    half = told(tensors, [None, Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP])
    page, frame = show(scrubber([prediction(large), prediction(half, label="half")]), width=700)
    frame.get_by_role("slider", name="half").focus()
    page.keyboard.press("Home")
    assert words(frame, 0).startswith("forward, event 1 ")
    assert words(frame, 1).startswith("forward, event 1 ")
    tops = frame.evaluate("() => steps.map(step => heightOf(step, step.total[step.peak]))")
    assert tops[0] < tops[1]
    assert frame.locator("h2").all_inner_texts() == ["A: baseline on gpt2", "B: half on gpt2"]


def test_behind_a_tab_it_waits_until_it_is_seen(browser):
    page = browser.new_page()
    page.set_content(f'<div id="tab" style="display: none">{scrubber([prediction(one_step())])}</div>')
    frame = page.frames[1]
    frame.locator("[role=slider][aria-valuetext]").wait_for(state="attached")
    page.evaluate("() => document.getElementById('tab').style.display = 'block'")
    frame.wait_for_function("() => steps[0].area.wide > 300 && frameElement.offsetHeight >= root.scrollHeight")
    assert frame.evaluate("() => steps[0].base.getContext('2d').getImageData(100, 200, 1, 1).data[3]") > 0  # drawn
    page.close()


def test_it_has_the_theme_of_the_page_around_it(show, subtests):
    heights = "() => [frameElement.offsetHeight, document.documentElement.scrollHeight, innerWidth, root.scrollWidth]"
    for style, other_style, dark in ((LIGHT, DARK, False), (DARK, LIGHT, True)):
        with subtests.test(dark=dark):
            page, frame = show(scrubber([prediction(one_step())]), style, width=400)
            assert frame.evaluate("() => root.classList.contains('dark')") is dark
            page.evaluate("style => document.body.setAttribute('style', style)", other_style)
            frame.wait_for_function("dark => root.classList.contains('dark') !== dark", arg=dark)
            outside, inside, wide, needed = frame.evaluate(heights)
            assert outside >= inside  # nothing is cut off, and nothing scrolls
            assert needed <= wide


def test_hostile_names_are_shown_as_they_are(show):
    hostile = one_step(operations=("given", HOSTILE, HOSTILE))
    page, frame = show(scrubber([prediction(hostile, label="<img src=x onerror=alert(1)>")]))
    assert frame.locator("h2").inner_text() == "<img src=x onerror=alert(1)> on gpt2"
    assert frame.locator("#cards script, #cards img, #charts img").count() == 0
    assert "broken" not in page.title() + frame.title()


def test_a_hundred_thousand_events_follow_the_cursor(show):
    timeline = repeated(micro_batches=44, layers=96)
    _, frame = show(scrubber([prediction(timeline)]))
    assert frame.evaluate("() => steps[0].events") > 100_000
    whole, cursor = frame.evaluate(
        """() => {
          const time = (times, work) => {
            const begin = performance.now();
            for (let i = 0; i < times; i += 1) work(i / times);
            return (performance.now() - begin) / times;
          };
          const moved = time(60, part => { position = width * part; show(); });
          return [time(6, drawAll), moved];
        }"""
    )
    print(f"100,000 events: all drawn in {whole:.1f} ms, the cursor and its words in {cursor:.2f} ms")
    assert cursor < whole / 2
