"""Pages of the panel: templates that escape every text, with words beside each picture, readable in both themes."""

import base64
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from workbench.base.categories import format_bytes
from workbench.journal.record import Record
from workbench.lessons.plots import COLOURS, Picture

STYLE = f"<style>{Path(__file__).with_name('panel.css').read_text(encoding='utf-8')}</style>"
UNUSED = "reserved, unused"
CONTEXT = "CUDA context"
SHADES: dict[str, str] = dict(COLOURS.items())
SHADES[UNUSED] = "#c8c8c8"
SHADES[CONTEXT] = "#5c5c5c"


def page(template: str, **names: Any) -> str:
    """A template of `templates/` filled in; every text is escaped."""
    return TEMPLATES.get_template(f"{template}.html").render(names)


def small(text: object) -> str:
    return f"<small>{escape(text)}</small>" if text else ""


def alarm(text: object) -> str:
    return f'<p role="alert" class="wb-alarm">⚠ {escape(text)}</p>'


def status(text: object) -> str:
    return f'<p role="status">{escape(text)}</p>'


def picture(figure: Picture, text: str) -> Markup:
    """An image with its text equivalent; no file and no network."""
    source = base64.b64encode(figure.png()).decode()
    return Markup('<img alt="{}" src="data:image/png;base64,{}" style="max-width: 100%">').format(text, source)


def begun(record: Record) -> str:
    """When, in this machine's time zone."""
    return f"{datetime.fromisoformat(record.created_at).astimezone():%d %b %H:%M}"


TEMPLATES = Environment(loader=PackageLoader("workbench.widgets"), autoescape=True, trim_blocks=True)
TEMPLATES.filters["bytes"] = format_bytes
TEMPLATES.filters["begun"] = begun
TEMPLATES.globals["shades"] = SHADES
