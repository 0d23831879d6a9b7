"""A progress bar for whoever looks on: in a terminal, or below a cell of JupyterLab, where nothing of it stays."""

import html
import os
import sys
from threading import current_thread, main_thread
from typing import Any

from tqdm import tqdm


class LineOfPage:
    """A line below the cell for tqdm to write to; on stderr the bar would leave a red stripe when it is gone."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.handle: Any = None

    def write(self, text: str) -> None:
        from IPython.display import HTML, display

        line = text.strip()
        page = HTML(f'<pre style="margin: 0">{html.escape(line)}</pre>' if line else "")
        if self.handle is not None:
            self.handle.update(page)
        elif line:
            self.handle = display(page, display_id=True)

    def flush(self) -> None:
        """Nothing is held back."""


def progress_bar(**options: Any) -> "tqdm[Any]":
    """A `tqdm` that is gone when it is closed.

    It shows nothing where output is collected, as under papermill or in a pipe, and in a thread of a panel, which has
    words of its own.
    """
    in_terminal = sys.stderr.isatty()
    shown = in_terminal or "JPY_SESSION_NAME" in os.environ
    aside = current_thread() is not main_thread()
    file = None if in_terminal or not shown else LineOfPage()
    return tqdm(disable=aside or not shown, leave=False, file=file, **options)
