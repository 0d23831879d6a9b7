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
        """Do nothing: `write` holds nothing back."""


def progress_bar(**options: Any) -> "tqdm[Any]":
    """Return a `tqdm` that is gone when it is closed.

    It shows nothing where output is collected, as under papermill or in a pipe. A panel trains in a thread, and shows
    its progress itself: in a thread there is no bar either.
    """
    in_terminal = sys.stderr.isatty()
    is_seen = in_terminal or "JPY_SESSION_NAME" in os.environ
    in_thread = current_thread() is not main_thread()
    file = None if in_terminal or not is_seen else LineOfPage()
    return tqdm(disable=in_thread or not is_seen, leave=False, file=file, **options)
