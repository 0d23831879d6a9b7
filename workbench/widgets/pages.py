"""Pages of the panel: templates that escape every text, and say in words what a picture shows; for both themes."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import escape

from workbench.advise.budget import UNUSED
from workbench.base.categories import format_bytes
from workbench.lessons.plots import COLOURS, INKS
from workbench.prediction.prediction import engine_words

STYLE = f"<style>{Path(__file__).with_name('panel.css').read_text(encoding='utf-8')}</style>"
# JupyterLab would take keys for its notebook, in which `x` deletes a cell, unless the element with the focus has this
# mark (Lumino, `CommandRegistry`); Ctrl-S and its like stay JupyterLab's. A click on a card, or on a cell of a table,
# chooses it. Pasted settings, which are lines, JSON or a command, go to the panel; other pasted text goes to its field.
SCRIPT = """<style onload="
  const panel = this.closest('.workbench-panel');
  if (panel && !panel.dataset.listens) {
    panel.dataset.listens = 'true';
    const keep = event => { event.target.dataset.lmSuppressShortcuts = 'true'; };
    panel.addEventListener('focusin', keep);
    panel.addEventListener('keyup', keep);
    panel.addEventListener('keydown', event => {
      if (event.key === 'Control' || event.key === 'Meta') delete event.target.dataset.lmSuppressShortcuts;
    });
    const choose = facts => {
      const field = panel.querySelector('.wb-chosen input');
      field.value = facts;
      field.dispatchEvent(new Event('input', {bubbles: true}));
      field.dispatchEvent(new Event('change', {bubbles: true}));
    };
    panel.addEventListener('click', event => {
      const choice = event.target.closest('[data-choice]');
      if (choice) choose(choice.dataset.choice);
    });
    panel.tabIndex = -1;  // so that a click anywhere on it takes the focus, and with it what is pasted
    panel.addEventListener('paste', event => {
      const settings = event.clipboardData.getData('text/plain').trim();
      if (!/\\n|^{| --/.test(settings)) return;
      event.preventDefault();
      event.stopPropagation();
      choose(JSON.stringify({settings}));
    });
  }
"></style>"""
CONTEXT = "CUDA context"
SHADES = {**COLOURS, UNUSED: "#c8c8c8", CONTEXT: "#5c5c5c"}
LETTERS = {**INKS, UNUSED: "#000", CONTEXT: "#fff"}


def page(template: str, **names: Any) -> str:
    """Return a template of `templates/`, filled in; every text is escaped."""
    return TEMPLATES.get_template(f"{template}.html").render(names)


def small(text: object) -> str:
    return f"<small>{escape(text)}</small>" if text else ""


def alarm(text: object) -> str:
    return f'<p role="alert" class="wb-alarm">⚠ {escape(text)}</p>'


def status(text: object) -> str:
    return f'<p role="status">{escape(text)}</p>'


TEMPLATES = Environment(loader=PackageLoader("workbench.widgets"), autoescape=True, trim_blocks=True)
TEMPLATES.filters["bytes"] = format_bytes
TEMPLATES.globals["shades"] = SHADES
TEMPLATES.globals["letters"] = LETTERS
TEMPLATES.globals["engine_words"] = engine_words
