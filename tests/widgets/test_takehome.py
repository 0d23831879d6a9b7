"""Taking a recipe home, without a browser: what the page says."""

import base64
import os
import re
import threading
import tomllib
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe, as_command
from workbench.techniques import Lora
from workbench.widgets.takehome import FORMS, TakeHome

NASTY = "</textarea><img src=x onerror='alert(1)'>\"&amp; ${name}.txt"
TAGS = {"div", "p", "textarea", "button", "a", "span", "b", "br", "ul", "li", "code"}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.text, self.links = [], "", "", {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = tag
        if tag == "a":
            self.links |= dict(attributes)

    def handle_data(self, data):
        self.text += data if self.inside == "textarea" else ""

    def handle_endtag(self, tag):
        self.inside = ""

    @property
    def file(self):
        return base64.b64decode(self.links["href"].partition("base64,")[2]).decode()


class Panel:
    """What the playground is to the tab."""

    def __init__(self, recipe):
        self.recipe = recipe
        self.tab = TakeHome(lambda: self.recipe)

    def page_as(self, form):
        self.tab.form.value = form
        self.tab.show()
        assert self.tab.wait()
        return Page(self.tab.page.value)


@pytest.fixture
def panel(recipe):
    made = Panel(recipe | Lora(rank=2))
    made.page_as("command")
    return made


def test_what_is_shown_is_what_is_downloaded(panel, subtests):
    for form, (file_name, *_) in FORMS.items():
        with subtests.test(form=form):
            page = panel.page_as(form)
            assert page.text == page.file
            assert page.links["download"] == file_name
            assert not re.search(r"[\"'\s=]/(tmp|work|root|home)/", page.file)
            assert "It needs beside it" in panel.tab.page.value  # text and model are elsewhere
            if form.endswith("script"):
                compile(page.file, file_name, "exec")
                assert "trainer.train()" in page.file
            elif form == "command":
                assert page.file.startswith("python -m workbench run")
            else:
                assert Recipe.from_dict(tomllib.loads(page.file)).techniques == panel.recipe.techniques
                assert "[technique.lora]\nrank = 2" in page.file


def test_nothing_in_a_recipe_breaks_out_of_the_page():
    panel = Panel(Recipe(corpus=NASTY))
    page = panel.page_as("command")
    assert set(page.tags) <= TAGS
    assert page.file == as_command(panel.recipe)
    assert page.text == page.file


def test_an_impossible_recipe_is_said(panel):
    def refuse():
        raise ConfigurationError("recipe: <b>no</b>.")

    panel.tab.recipe = refuse
    panel.tab.show()
    assert "⚠ recipe: &lt;b&gt;no&lt;/b&gt;." in panel.tab.page.value


def test_until_another_form_is_written_the_old_text_is_dimmed(panel, monkeypatch):
    may_write = threading.Event()
    monkeypatch.setitem(FORMS, "TRL script", ("train.py", lambda recipe: may_write.wait(10) and "new"))
    panel.page_as("command")
    panel.tab.form.value = "TRL script"
    assert "wb-old" in panel.tab.view._dom_classes
    may_write.set()
    assert panel.tab.wait()
    assert "wb-old" not in panel.tab.view._dom_classes
    assert Page(panel.tab.page.value).file == "new"


def test_a_size_of_gpt2_is_written_without_the_hub(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("workbench.models.source.model_files", refuse)
    page = Panel(Recipe(model="gpt2-xl") | Lora(rank=2)).page_as("Hugging Face script")
    assert 'MODEL, LENGTH, BATCH = "gpt2-xl", 128, 8' in page.file
    assert "AutoTokenizer.from_pretrained(MODEL" in page.file
    assert "fan_in_fan_out=True" in page.file


def test_what_is_needed_is_said_where_it_lies_below_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("To be, or not to be. " * 999)
    monkeypatch.chdir(tmp_path)
    panel = Panel(Recipe(model="gpt2", corpus="mine.txt:encoding=latin-1"))
    for form in FORMS:
        panel.page_as(form)
        assert f"from {tmp_path / 'mine.txt'}" in panel.tab.page.value


@pytest.mark.values
@pytest.mark.dear  # it starts a program that imports everything
def test_the_file_run_again_gives_the_losses_of_the_recipe(recipe, fine_tuned, tmp_path, monkeypatch):
    """Text and model where the page says that they have to be."""
    from workbench.__main__ import main
    from workbench.journal.record import read_all

    asked = replace(recipe | Lora(rank=2), arguments={"lr_scheduler_type": "cosine"})
    panel = Panel(asked)
    text = panel.page_as("recipe file (TOML)").file
    for path in (asked.corpus, asked.model.removeprefix("random:")):
        (tmp_path / os.path.basename(path)).symlink_to(path)
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "recipe.toml", "--device", "cpu", "--sample-tokens", "0"]) == 0
    assert read_all()[0].losses == fine_tuned(asked).losses != fine_tuned(recipe | Lora(rank=2)).losses
