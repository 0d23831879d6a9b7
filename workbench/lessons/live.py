"""The question whether a notebook is on a live page, or is run headless."""

from typing import Any

from IPython.core.getipython import get_ipython


def live_page() -> bool:
    """Whether the notebook is on a live page.

    A page lets its cells ask for input, papermill and nbconvert do not (`allow_stdin` in Jupyter's messaging protocol).
    """
    return bool(request().get("content", {}).get("allow_stdin"))


def request() -> dict[str, Any]:
    """Return the message that asked the kernel to execute the cell; empty without a kernel."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return {}
    return dict(kernel.get_parent() or {})
