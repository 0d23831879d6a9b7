"""The panel as a whole, without a browser: its one button, Undo, its parts, and settings that are pasted."""

import json

from workbench.recipe import Recipe
from workbench.techniques import ChunkedCrossEntropy, Lora
from workbench.widgets.takehome import FORMS


def known(playground):
    """Everything that works by itself has ended."""
    playground.savings.quiet_s = 0
    playground.answer()
    for part in (playground.gauge, playground.savings, playground.fit):
        assert part.wait(30)


def test_what_fits_is_taken_home_by_the_one_button(playground):
    known(playground)
    assert playground.fit.button.description.startswith("Take the script home")
    playground.fit.button.click()
    assert playground.openers["Take the script home"].value
    assert playground.parts["Take the script home"].wait(30)
    assert "train.py" in playground.parts["Take the script home"].page.value


def test_what_does_not_fit_says_so_and_is_undone(playground):
    playground.gauge.budget.value = "1GiB"
    known(playground)
    assert "too much" in playground.gauge.page.value
    before = playground.form.recipe()
    playground.form.toggles["lora"].box.value = True
    assert not playground.undo.disabled
    playground.form.controls["steps"].value = "7"
    playground.undo.click()
    playground.undo.click()
    assert playground.form.recipe() == before
    assert playground.undo.disabled
    playground.undo.click()
    assert playground.form.recipe() == before


def test_one_part_is_open_at_a_time(playground):
    playground.openers["What fits where"].value = True
    assert "wb-hidden" not in playground.open_part._dom_classes
    playground.openers["Train it here"].value = True
    assert not playground.openers["What fits where"].value
    assert playground.train.view in playground.open_part.children
    assert playground.openers["Train it here"].description == "✕ Train it here"
    playground.openers["Train it here"].value = False
    assert "wb-hidden" in playground.open_part._dom_classes


def test_a_card_and_a_cell_that_are_clicked_are_chosen(playground):
    playground.chosen.value = json.dumps({"gpu": "h100"})
    assert playground.gauge.gpu.value == "h100"
    assert playground.chosen.value == "", "so that the same can be clicked again"
    cell = {"effective_batch_size": 4, "sequence_length": 16}
    playground.form.toggles["lora"].box.value = True
    playground.chosen.value = json.dumps(cell)
    recipe = playground.form.recipe()
    assert (recipe.effective_batch_size, recipe.sequence_length, recipe.techniques) == (4, 16, (Lora(),))


def test_switches_move_only_when_another_sentence_is_chosen(playground, monkeypatch):
    arranged = []
    known(playground)
    monkeypatch.setattr(playground.switches, "arrange", lambda offers: arranged.append(len(offers)))
    playground.form.toggles["lora"].box.value = True
    playground.form.controls["learning_rate"].value = "1e-4"
    known(playground)
    assert arranged == []
    playground.form.controls["sequence_length"].value = "16"
    known(playground)
    assert arranged == [len(playground.form.toggles)]


def test_the_page_without_a_kernel_says_what_each_technique_would_do(playground):
    known(playground)
    page = playground.as_page()
    assert "what each technique would do" in page
    assert "Fused GELU" in page
    assert "Take the script home" in page


def pasted(playground, text):
    """As the panel's script hands it over."""
    playground.chosen.value = json.dumps({"settings": text})
    return playground.brought.value


def test_settings_that_are_pasted_set_the_panel_and_are_explained(playground):
    before = playground.form.recipe()
    settings = (
        "model_name_or_path: gpt2-xl\nuse_peft: true\nlora_r: 4\nper_device_train_batch_size: 6\nbf16: false\n"
        "gradient_checkpointing: false\nlora_modules_to_save: <b>\n"
    )
    page = pasted(playground, settings)
    recipe = playground.form.recipe()
    assert (recipe.model, recipe.effective_batch_size, recipe.techniques) == (
        "gpt2-xl", 6, (Lora(rank=4, alpha=32, dropout=0.05), ChunkedCrossEntropy()),
    )  # fmt: skip
    assert recipe.corpus == before.corpus
    assert "SFTConfig (trl" in page
    assert "lora_r: 4" in page
    assert "lora_modules_to_save: &lt;b&gt;" in page
    remark = "What is predicted is without what this setting does: lora_modules_to_save."
    assert remark in playground.form.error.value
    playground.form.controls["steps"].value = "7"
    assert remark in playground.form.error.value, "it stays true"
    playground.undo.click()
    assert remark in playground.form.error.value
    assert "<b>" not in page
    playground.undo.click()
    assert playground.form.recipe() == before
    assert playground.form.error.value == ""
    assert "Paste them anywhere" in playground.brought.value


def test_what_went_comes_back(playground):
    asked = Recipe(steps=3, arguments={"weight_decay": 0.1}, callbacks=["a.b:C"]) | Lora(rank=5)
    playground.form.show(Recipe())
    pasted(playground, FORMS["recipe file (TOML)"][1](asked))
    assert playground.form.recipe() == asked


def test_settings_that_cannot_be_used_change_nothing(playground, subtests):
    before = playground.form.recipe()
    for text in ("<b>", "[1]", "lora_r: !!python/object:x {}", "sequence_len: <b>", '{"steps": 0}'):
        with subtests.test(text=text):
            page = pasted(playground, text)
            assert playground.form.recipe() == before
            assert 'role="alert"' in page
            assert "Nothing was changed." in page
            assert "<b>" not in page


def test_settings_are_the_way_out_of_a_form_that_cannot_be_used(playground):
    playground.form.controls["learning_rate"].value = "fast"
    pasted(playground, "model = 'gpt2'\nsteps = 7\n")
    assert playground.form.recipe().steps == 7
