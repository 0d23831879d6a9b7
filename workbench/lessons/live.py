"""Whether somebody looks on while a notebook is executed."""

from typing import Any

from IPython.core.getipython import get_ipython


def live_page() -> bool:
    """Whether somebody looks on: a page lets its cells ask for input, papermill and nbconvert do not (`allow_stdin` in
    Jupyter's messaging protocol)."""
    return bool(request().get("content", {}).get("allow_stdin"))


def request() -> dict[str, Any]:
    """What the kernel was asked to execute."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return {}
    return dict(kernel.get_parent() or {})
