"""The site: `make site`. Its pages are the repository's own: links between them are true on GitHub and here.

Notebooks are shown as `python -m workbench notebooks` executed them, from `build/notebooks`; one that was not executed
is shown without its outputs. Nothing is executed here, and a page fetches nothing from the network. With the address
of this repository in the environment variable REPOSITORY_URL, a lesson links to its copy for Colab and Kaggle.
"""

import json
import os
import re
import sys
from itertools import groupby
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert as to_mathml

from workbench import __version__

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from anywhere import Repository  # noqa: E402
from front_html import fill_page  # noqa: E402

WORDS_PER_MINUTE = 200  # of prose and code alike
FRONT = re.compile(r"\[([^]]+)\]\(front/index\.html\)")
LESSON = re.compile(r"\(\.\./notebooks/(\w+\.ipynb)\)")

project, author, release = "GPT-2 memory workbench", "", __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "notebooks/*.ipynb", "data/reference/*.md", "data/models/*/README.md"]
include_patterns += ["data/reference/h200/README.md", "data/reference/real/*.md"]
include_patterns += ["README.md", "SKILL.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "data/runs", "tests", "tools", "workbench"]
suppress_warnings = ["config.cache"]

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # scripts from the network, for widgets that no page has
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
nb_code_prompt_show = nb_code_prompt_hide = "How the answer was computed"  # of a guess
FOLDED = {"setup": "What is imported", "parameters": "The lesson's parameters"}  # so that its picture comes sooner
myst_heading_anchors = 3
default_role = "code"  # docstrings are Markdown here
autodoc_typehints = "none"
autodoc_member_order = "alphabetical"

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["front"]  # the front page's style, script and picture; the page itself is filled in below
html_math_renderer = "mathml"
html_theme_options = {"navbar_persistent": [], "use_fullscreen_button": False, "show_toc_level": 2}


def show_executed(app, docname, source):
    """Takes the executed notebook in place of the committed one, and says below its title where it opens. Where a
    source is hidden, as that of a guess, which would tell its answer, it is folded; and so are imports and parameters,
    which would push the picture that is the idea off the first screen."""
    if not docname.startswith("notebooks/"):
        return
    name = f"{Path(docname).name}.ipynb"
    executed = ROOT / app.config.executed_notebooks / name
    app.env.note_dependency(executed)  # which may come later, and then the page is made anew
    if executed.exists():
        source[0] = executed.read_text(encoding="utf-8")
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        # the lessons' own pictures bring their words
        cell["metadata"]["mystnb"] = {"image": {"alt": "A picture that the cell above draws."}}
        tags = cell["metadata"].setdefault("tags", [])
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            tags.append("hide-input")
        for tag in FOLDED.keys() & tags:
            tags.append("hide-input")
            prompt = FOLDED[tag]
            cell["metadata"]["mystnb"] |= {"code_prompt_show": prompt, "code_prompt_hide": prompt}
    if app.config.repository_url:
        opened = Repository(app.config.repository_url).addresses_of(name)
        title, _, rest = "".join(notebook["cells"][0]["source"]).partition("\n")
        links = " or ".join(f"[{where}]({address})" for where, address in opened.items())
        notebook["cells"][0]["source"] = f"{title}\n\nOpen it in {links}.\n{rest}"
    source[0] = json.dumps(notebook)


def write_front_page(app, error):
    """In place of its template, which was copied: the page with its predictions and this repository's address."""
    if error is None and app.builder.format == "html":
        page = Path(app.outdir) / "index.html"
        page.write_text(fill_page(app.config.repository_url), encoding="utf-8")


def link_front_page(app, docname, source):
    """It is no page of Sphinx's, and stands elsewhere in the site than in the repository."""
    if docname == "docs/index":
        source[0] = FRONT.sub(r'<a href="../index.html">\1</a>', source[0])


def tell_minutes(app, docname, source):
    """Behind each lesson of a reading path how long it takes to read and to run, and behind each path the sum."""
    if docname == "docs/paths":
        source[0], notebooks = with_minutes(source[0], ROOT / app.config.executed_notebooks)
        for path in notebooks:
            app.env.note_dependency(path)


def with_minutes(text, executed):
    """The text, and the notebooks whose words were counted or whose run was timed."""
    told, asked = [], []
    for listed, lines in groupby(text.splitlines(), lambda line: bool(re.match(r"\d+\. ", line))):
        times = []
        for line in lines:
            if listed:
                name = LESSON.search(line)[1]
                asked += [ROOT / "notebooks" / name, executed / name]
                times.append((minutes_to_read(asked[-2]), minutes_to_run(asked[-1])))
                line += f" *({in_minutes(*times[-1])})*"
            told.append(line)
        if listed:
            reading, running = zip(*times, strict=True)
            told += ["", f"*Together {in_minutes(sum(reading), None if None in running else sum(running))}.*"]
    return "\n".join(told), [path for path in asked if path.exists()]


def minutes_to_read(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return sum(len("".join(cell["source"]).split()) for cell in cells) / WORDS_PER_MINUTE


def minutes_to_run(executed):
    """As papermill noted it; None for what was not executed to its end."""
    if executed.exists():
        noted = json.loads(executed.read_text(encoding="utf-8"))["metadata"].get("papermill", {})
        if noted.get("duration") and not noted.get("exception"):
            return noted["duration"] / 60
    return None


def in_minutes(reading, running):
    ran = "" if running is None else f", {running:.1f} to run"
    return f"{reading:.0f} min to read{ran}"


def inline_formula(self, node):
    self.body.append(to_mathml(node.astext()))
    raise SkipNode


def block_formula(self, node):
    self.body.append(to_mathml(node.astext(), display="block"))
    raise SkipNode


def setup(app):
    app.add_config_value("executed_notebooks", "build/notebooks", "env")
    app.add_config_value("repository_url", os.environ.get("REPOSITORY_URL", ""), "env")
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))
    app.connect("source-read", show_executed)
    app.connect("source-read", tell_minutes)
    app.connect("source-read", link_front_page)
    app.connect("build-finished", write_front_page)
