"""The site: `make site`. Its pages are the repository's own: links between them are true on GitHub and here.

Notebooks are shown as `python -m workbench notebooks` executed them, from `build/notebooks`; one that was not executed
is shown without its outputs. Nothing is executed here, and a page fetches nothing from the network.
"""

import json
import re
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert as to_mathml

from workbench import __version__
from workbench.lessons import plots

ROOT = Path(__file__).resolve().parent.parent

project, author, release = "GPT-2 memory workbench", "", __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "notebooks/*.ipynb", "data/reference/*.md", "data/models/*/README.md"]
include_patterns += ["README.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "data/runs", "tests", "tools", "workbench"]
suppress_warnings = ["config.cache"]

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # scripts from the network, for widgets that no page has
nb_merge_streams = True
nb_code_prompt_show = nb_code_prompt_hide = "How the answer was computed"  # of a guess; no other source is folded
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
default_role = "code"  # docstrings are Markdown here
autodoc_typehints = "none"
autodoc_member_order = "alphabetical"

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["front"]  # index.html, which leads to the front page
html_math_renderer = "mathml"
html_theme_options = {"navbar_persistent": [], "use_fullscreen_button": False, "show_toc_level": 2}


def show_executed(app, docname, source):
    """Takes the executed notebook in place of the committed one. Where a source is hidden, as that of a guess, which
    would tell its answer, it is folded."""
    if not docname.startswith("notebooks/"):
        return
    executed = ROOT / app.config.executed_notebooks / f"{Path(docname).name}.ipynb"
    if executed.exists():
        app.env.note_dependency(executed)
        source[0] = executed.read_text(encoding="utf-8")
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        cell["metadata"]["mystnb"] = {"image": {"alt": told_in_words("".join(cell["source"]))}}
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            cell["metadata"]["tags"].append("hide-input")
    source[0] = json.dumps(notebook)


def told_in_words(code):
    """What the picture of a cell shows: the first sentence about the function that draws it."""
    drawn = re.findall(r"plots\.(\w+)\(", code)
    about = getattr(plots, drawn[-1]).__doc__ if drawn else "A picture that the cell above draws."
    return " ".join(re.split(r"(?<=\.)\s", about, maxsplit=1)[0].split())


def inline_formula(self, node):
    self.body.append(to_mathml(node.astext()))
    raise SkipNode


def block_formula(self, node):
    self.body.append(to_mathml(node.astext(), display="block"))
    raise SkipNode


def setup(app):
    app.add_config_value("executed_notebooks", "build/notebooks", "env")
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))
    app.connect("source-read", show_executed)
