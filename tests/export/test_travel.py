"""What is exported names no place that is only on this machine."""

import os

from workbench.base.paths import ROOT
from workbench.export.script import portable, script
from workbench.recipe import Recipe, as_command, as_toml


def test_a_script_has_no_absolute_path(recipe, tmp_path, monkeypatch):
    """Texts lie below the working directory, the model elsewhere."""
    monkeypatch.chdir(os.path.dirname(recipe.corpus))
    text, moved = portable(recipe, script(recipe))
    compile(text, "script", "exec")
    assert str(tmp_path.anchor + "tmp") not in text
    assert f'"{os.path.basename(recipe.corpus)}"' in text
    assert moved[recipe.corpus] == os.path.basename(recipe.corpus)
    assert moved[recipe.model.removeprefix("random:")] == os.path.basename(recipe.model)


def test_nor_has_one_of_the_embedded_model_and_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, moved = portable(Recipe(), script(Recipe(model="gpt2-tiny")))
    assert str(ROOT) not in text
    assert moved[str(ROOT / "data/models/gpt2-tiny")] == "gpt2-tiny"


def test_nor_has_a_recipe_as_a_file_or_a_command(tmp_path, monkeypatch, subtests):
    monkeypatch.chdir(tmp_path)
    recipe = Recipe(model="random:/srv/models/mine", corpus=str(tmp_path / "texts" / "a b.txt"))
    for write in (as_toml, as_command):
        with subtests.test(write=write.__name__):
            text, moved = portable(recipe, write(recipe))
            assert moved == {"/srv/models/mine": "mine", recipe.corpus: "texts/a b.txt"}
            assert "/srv" not in text
            assert str(tmp_path) not in text
            assert "random:mine" in text
            assert "texts/a b.txt" in text


def test_what_only_looks_like_a_path_stays():
    recipe = Recipe(model="openai-community/gpt2", corpus="./a.txt")
    text = 'x = "/" + "//" + y / "a/b"'
    assert portable(recipe, as_toml(recipe) + text) == (as_toml(recipe) + text, {})
