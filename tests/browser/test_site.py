"""The site: built without a warning of what lies in the repository, and opened from the disk, without a network."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag

import nbformat
import pytest

from workbench.base.paths import ROOT
from workbench.lessons.notebooks import execute_notebook

pytest.importorskip("sphinx_book_theme", reason="needs the extra `site`")
pytestmark = [pytest.mark.dear, pytest.mark.xdist_group("browser")]
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"
CELLS = (
    "# 05 · Written by a test\n\nFor $x^2$ and\n\n$$\\frac{a}{b}$$\n\nbut not `$HOME`. [Next](17_headline.ipynb)",
    "steps: int = 1",
    f"print({HOSTILE!r})",
    "from IPython.display import HTML\nHTML('<table><tr>' + '<td>one of many columns</td>' * 60 + '</tr></table>')",
    "HTML('<div><iframe srcdoc=\"<p>six times seven is<script>document.write(6 * 7)</script>\"></iframe></div>')",
    "import matplotlib.pyplot as plt\ndraw = plt.plot\nfigure = draw([1, 2])",
)


class Page(HTMLParser):
    """What a page refers to, and the alternative texts of its pictures."""

    def __init__(self, text):
        super().__init__()
        self.links, self.fetched, self.pictures = set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "a":
            self.links.add(given.get("href", ""))
        elif tag == "img":
            self.pictures.append(given.get("alt"))
        if tag not in ("a", "meta"):
            self.fetched |= {given[name] for name in ("src", "href", "data") if given.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site; lesson 05 is a short one that was executed, the others have no outputs."""
    folder = tmp_path_factory.mktemp("site")
    new = [nbformat.v4.new_markdown_cell, *[nbformat.v4.new_code_cell] * 5]
    book = nbformat.v4.new_notebook(cells=[make(source) for make, source in zip(new, CELLS, strict=True)])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(book, folder / "lesson.ipynb")
    execute_notebook(folder / "lesson.ipynb", folder / "executed" / "05_lora.ipynb")
    options = ["-q", "-W", "--keep-going", "-D", f"executed_notebooks={folder / 'executed'}"]
    command = [sys.executable, "-m", "sphinx", *options, "-c", str(ROOT / "docs"), "-d", str(folder / "doctrees")]
    done = subprocess.run([*command, str(ROOT), str(folder / "html")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site):
    return {
        path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if "_static" not in path.parts
    }


def test_every_notebook_has_its_page_and_the_front_page_leads_there(site):
    made = {path.stem for path in (site / "notebooks").glob("*.html")}
    assert made == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    front = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="docs/index.html"' in front
    assert "{{" not in front  # it is filled in


def test_whatever_a_page_refers_to_is_there(pages, subtests):
    for path, page in pages.items():
        for link in page.links | page.fetched:
            place, part = urldefrag(link)
            if not re.match(r"https?:|data:|mailto:", link) and place:
                target = path.parent / unquote(place.split("?")[0])
                is_there = target.exists() and (not part or f'id="{part}"' in target.read_text(encoding="utf-8"))
                if not is_there:
                    with subtests.test(page=path.name, link=link):
                        pytest.fail("leads nowhere")


def test_no_page_fetches_from_a_network(pages, subtests):
    for path, page in pages.items():
        with subtests.test(page=path.name):
            assert not [address for address in page.fetched if re.match(r"(https?:)?//", address)]


def test_pictures_have_words(pages, subtests):
    for path, page in pages.items():
        with subtests.test(page=path.name):
            assert all(words and not words.endswith(".png") for words in page.pictures)
    (lesson,) = (page for path, page in pages.items() if path.stem == "05_lora")
    assert lesson.pictures == ["A picture that the cell above draws."]


def test_the_executed_notebook_is_shown_and_its_output_stays_text(site):
    page = (site / "notebooks" / "05_lora.html").read_text(encoding="utf-8")
    assert "Written by a test" in page
    assert "&lt;script&gt;alert(1)" in page
    assert HOSTILE not in page
    assert 'href="17_headline.html"' in page
    assert "<msup>" in page
    assert "<mfrac>" in page
    assert "$HOME" in page
    assert "output text_plain" not in (site / "notebooks" / "03_gradient_checkpointing.html").read_text()


@pytest.fixture
def opened(browser, site):
    page = browser.new_page()

    def open_at(name, width=1280, theme="light"):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme)
        page.goto(f"{site.as_uri()}/{name}")
        return page

    yield open_at
    page.close()
    assert browser.strangers == []


def test_imports_and_parameters_are_folded_so_that_the_picture_comes_soon(opened):
    page = opened("notebooks/03_gradient_checkpointing.html", 1400)
    prompts = page.locator("details.hide summary .expanded, details.hide summary .collapsed").all_inner_texts()
    assert {"What is imported", "The lesson's parameters"} <= {text for text in prompts if text}
    assert not page.locator("div.tag_parameters pre").is_visible()
    drawn_by = page.locator("div.tag_idea pre").first
    assert drawn_by.bounding_box()["y"] < 600


def test_a_narrow_window_scrolls_tables_not_the_page(opened, subtests):
    overflow = "box => box.scrollWidth > 5 * box.clientWidth && getComputedStyle(box).overflowX"
    for theme in ("light", "dark"):
        for name in ("notebooks/05_lora", "data/reference/README", "docs/index", "docs/symptoms", "docs/api"):
            with subtests.test(page=name, theme=theme):
                page = opened(f"{name}.html", 400, theme)
                assert page.evaluate("() => document.documentElement.scrollWidth") == 400
        with subtests.test("a table, a picture and a frame", theme=theme):
            page = opened("notebooks/05_lora.html", 400, theme)
            assert page.locator(".text_html", has=page.locator("table")).first.evaluate(overflow) == "auto"
            picture = page.locator(".cell_output img")
            assert picture.evaluate("one => one.complete && one.naturalWidth") > 100
            assert picture.evaluate("one => getComputedStyle(one).filter") == "none"
            assert page.frame_locator("iframe").locator("p").inner_text() == "six times seven is42"


def test_every_cure_of_a_symptom_is_inside_the_page(opened, subtests):
    outside = """() => [...document.querySelectorAll('#symptoms td, #symptoms td a, #symptoms td code')]
      .filter(e => e.getBoundingClientRect().right > document.querySelector('#symptoms').getBoundingClientRect().right)
      .map(e => e.innerText.slice(0, 60))"""
    for width in (400, 1400, 1900):
        with subtests.test(width=width):
            page = opened("docs/symptoms.html", width)
            assert page.locator("#symptoms td").count() > 250
            assert page.evaluate(outside) == []


def test_search_and_next_work_from_the_disk(opened):
    page = opened("search.html?q=checkpointing")
    page.locator(".search a", has_text="03 · Gradient checkpointing").first.wait_for()
    page = opened("index.html")
    assert page.locator("#words").inner_text() == "✗ 0.7 GiB too much"
    page.locator("nav").get_by_role("link", name="All pages").click()
    page.wait_for_url("**/docs/index.html")
    page.get_by_role("link", name="The front page").click()
    page.wait_for_url("**/html/index.html")
    page.go_back()
    page.locator("a.right-next").click()
    page.wait_for_url("**/docs/paths.html")
    page.locator("article a", has_text="Memory anatomy").first.click()
    page.wait_for_url("**/notebooks/00_memory_anatomy.html")
