"""Progress: seen where somebody looks on, and gone afterwards."""

from threading import Thread

import IPython.display
import pytest

from workbench.base.bar import progress_bar


class Handle:
    """Keeps what is shown below the cell, one page after the other."""

    def __init__(self):
        self.pages = []

    def show(self, page, display_id):
        self.update(page)
        return self

    def update(self, page):
        self.pages.append(page.data)


@pytest.fixture
def below_the_cell(monkeypatch):
    handle = Handle()
    monkeypatch.setattr(IPython.display, "display", handle.show)
    monkeypatch.setenv("JPY_SESSION_NAME", "lesson.ipynb")
    return handle.pages


def step_through(**options):
    with progress_bar(total=3, desc="<lora>", mininterval=0, **options) as bar:
        for _ in range(3):
            bar.update()


def test_in_jupyterlab_a_bar_is_no_error_and_leaves_an_empty_line(below_the_cell, capsys):
    step_through()
    assert any("&lt;lora&gt;: 100%" in page for page in below_the_cell)
    assert below_the_cell[-1] == ""
    assert capsys.readouterr().err == ""


def test_a_thread_of_a_panel_and_what_is_collected_have_no_bar(below_the_cell, monkeypatch, capsys):
    thread = Thread(target=step_through)
    thread.start()
    thread.join()
    monkeypatch.delenv("JPY_SESSION_NAME")
    step_through()
    assert below_the_cell == []
    assert capsys.readouterr().err == ""
