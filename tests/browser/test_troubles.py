"""What goes wrong around the panel: a worker, a kernel or a text is gone, or there are two of them.

Two notebooks with a panel each, two kernels, one folder of records.
"""

import re

import psutil
import pytest
from driving import (
    HEAD,
    VERDICT,
    button,
    fill,
    open_part,
    output,
    stop_training,
    take,
    verdict,
    wait_for_button,
    wait_for_status,
    write_notebook,
)

from workbench.journal.record import Status, read_all

pytestmark = [pytest.mark.dear, pytest.mark.xdist_group("browser")]
SOURCE = """\
import os, torch
from pathlib import Path
from workbench import Playground, Recipe
from workbench.widgets.savings import Savings
torch.set_num_threads(1)
Savings.quiet_s = 3600.0  # the worker answers the gauge alone
Path("{name}.pid").write_text(str(os.getpid()))
os.environ["WORKBENCH_RUNS"] = {folder!r}  # no prediction of other panels: the worker answers
recipe = Recipe(model={model!r}, corpus={text!r}, sequence_length=32, steps={steps})
Playground(recipe)"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("troubles")


@pytest.fixture(scope="module")
def panel(open_notebook, lab, folder, model_name, text_file):
    def opened(name):
        source = SOURCE.format(name=name, model=model_name, text=str(text_file), steps=20_000, folder=str(folder))
        write_notebook(lab[1] / f"{name}.ipynb", source)
        page = open_notebook(f"{name}.ipynb")
        open_part(page, "Train it here")
        take(page)  # the button knows last what it will do
        return page

    return opened


@pytest.fixture(scope="module")
def one(panel):
    return panel("one")


@pytest.fixture
def page(one):
    yield one
    stop_training(one)


def worker_of(kernel):
    (found,) = (p for p in psutil.Process(kernel).children() if "workbench.predict" in " ".join(p.cmdline()))
    return found


def start(page):
    open_part(page, "Train it here")
    button(page, "Start").click()
    wait_for_status(page, r"step \d+ of")


def test_a_worker_killed_in_the_middle_is_told_and_the_next_toggle_has_another(page, lab):
    worker = worker_of(int((lab[1] / "one.pid").read_text()))
    output(page).locator(".wb-word", has_text="Train it here").click()  # in a narrow page the switches are behind it
    box = output(page).get_by_label("Gradient checkpointing", exact=True)
    worker.suspend()
    box.check()
    button(page, "Make it fit Predicting …").wait_for()
    page.wait_for_timeout(300)
    worker.kill()
    alarm = page.locator(f"{HEAD} [role=alert]").first
    alarm.wait_for()
    assert "killed in the middle" in alarm.inner_text()
    assert "the next call starts another" in alarm.inner_text()
    assert "Traceback" not in output(page).inner_text()
    box.uncheck()
    output(page).get_by_text(re.compile("Fits")).first.wait_for()
    assert VERDICT.search(verdict(page))


def test_a_text_that_has_vanished_before_start_is_told_and_the_panel_goes_on(page, lab, text_file):
    mine = lab[1] / "mine.txt"
    mine.write_text(text_file.read_text())
    open_part(page, "Train it here")
    fill(page, "corpus", str(mine))
    output(page).get_by_text(re.compile("^Start trains .*mine.txt")).wait_for()  # the kernel has looked for it
    mine.unlink()
    button(page, "Start").click()
    wait_for_status(page, "not started.*mine.txt")
    assert "Traceback" not in output(page).inner_text()
    fill(page, "corpus", str(text_file))
    start(page)


def test_of_a_kernel_restarted_in_a_training_nothing_is_lost(page, folder):
    before = {record.id for record in read_all(folder)}
    start(page)
    while not any(record.steps_done for record in read_all(folder) if record.id not in before):
        page.wait_for_timeout(200)  # it is written now and then
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_role("menuitem", name="Restart Kernel and Run All Cells…", exact=True).click()
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    wait_for_status(page, r"killed after \d+ steps. Its kernel ended; its record has the steps until then")
    (record,) = (record for record in read_all(folder) if record.id not in before)
    assert record.status is Status.KILLED
    assert 0 < record.steps_done <= len(record.losses) + 1  # a step's loss is told after the step
    wait_for_button(page, "Start", "enabled")
    open_part(page, "Train it here")
    row = output(page).locator("tr", has_text="killed").first
    assert row.inner_text().split("\t")[3] == str(record.steps_done)


def test_two_panels_in_two_kernels_train_at_once_and_both_records_are_kept(page, panel, folder):
    before = {record.id for record in read_all(folder)}
    other = panel("two")
    fill(other, "steps", "60")
    start(page)
    start(other)
    wait_for_status(other, "ok. Held-out loss")
    wait_for_status(page, r"step \d+ of 20000")
    button(page, "Stop").click()
    wait_for_status(page, "interrupted after")
    kept = [record for record in read_all(folder) if record.id not in before]
    assert sorted(record.status for record in kept) == [Status.INTERRUPTED, Status.OK]
    assert len({record.id for record in kept}) == 2
    for one in (page, other):
        open_part(one, "Train it here")
        output(one).locator("tr", has_text="interrupted").first.wait_for()
