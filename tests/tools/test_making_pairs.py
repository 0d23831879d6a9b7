"""Every pair of techniques is measured, or refused with a reason; none fails."""

from dataclasses import replace

import pairs as module
import pytest
from pairs import pairs

from workbench.advise.pairs import matrix, refusals, style_pairs
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.journal.record import Record, Status
from workbench.recipe import Recipe

RECORD = Record("id", "2026", Status.OK, {}, "", "")


@pytest.fixture
def quick_options(model_name, text_file):
    return [model_name, "--set", f"corpus={text_file}", "--set", "sequence_length=16"]


@pytest.mark.dear
def test_singles_and_pairs_are_measured_and_the_matrix_is_symmetric_and_complete(recipe):
    few = pairs(replace(recipe, steps=2), ["gradient_accumulation", "gradient_checkpointing", "lora"], device="cpu")
    assert len(few) == 3 + 3
    assert set(few["verdict"]) == {"measured"}
    assert (few["saved_fraction"] < 1).all()
    shown = matrix(few)
    assert shown.equals(shown.T)
    assert not shown.isna().any().any()
    assert shown.map(lambda words: words.endswith("%")).all().all()


def test_what_does_not_go_together_says_why(recipe):
    odd = replace(recipe, effective_batch_size=7, steps=2)
    table = pairs(odd, ["gradient_accumulation", "lora"], device="cpu")
    assert table["verdict"].tolist() == ["refused", "measured", "refused"]
    (row,) = refusals(table).to_dict("records")
    assert row["pair"] == "gradient_accumulation, gradient_accumulation + lora"
    assert "a batch of 7 cannot be split" in row["reason"]
    assert matrix(table).loc["lora", "gradient_accumulation"] == "refused"
    assert ">refused<" in style_pairs(table).to_html()


PEAKS = {"baseline": 100, "lora": 80, "gradient_checkpointing": 60, "gradient_checkpointing + lora": 30}


@pytest.mark.parametrize("set_up", [True, False], ids=["emulator", "no emulator"])
def test_what_needs_a_gpu_is_emulated_and_a_pair_is_held_against_the_better_of_its_two(monkeypatch, set_up):
    def run(recipe, device, **_):
        ran.append((recipe.label, device))
        if "lora" in recipe.label and device == "cpu":
            raise UnavailableError("no GPU")
        return replace(RECORD, peak_allocated_bytes=PEAKS[recipe.label], memory_source=device)

    ran = []
    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module.place, "is_set_up", lambda: set_up)
    table = pairs(Recipe(model="gpt2-tiny"), ["lora", "gradient_checkpointing"], device="cpu").set_index(
        ["one", "other"]
    )
    assert table.loc[("gradient_checkpointing", "gradient_checkpointing"), "verdict"] == "measured"
    pair = table.loc[("gradient_checkpointing", "lora")]
    assert pair["verdict"] == ("emulated" if set_up else "unavailable")
    assert ("baseline", "emulated:h100") in ran or not set_up
    if set_up:
        assert (pair["saved_fraction"], pair["saved_beyond_fraction"]) == (0.7, 0.3)
        shown = matrix(table.reset_index(), "saved_beyond_fraction")
        assert shown.loc["lora", "gradient_checkpointing"] == "30%*"
        assert shown.loc["lora", "lora"] == "–"


def test_one_step_is_not_enough(recipe):
    with pytest.raises(ConfigurationError, match="steps must be at least 2"):
        pairs(replace(recipe, steps=1), ["lora"], device="cpu")


@pytest.mark.dear
def test_it_tries_those_that_are_named(quick_options, capsys):
    module.main([*quick_options, "--technique", "gradient_accumulation", "--technique", "lora"])
    assert capsys.readouterr().out.splitlines()[0].split() == ["gradient_accumulation", "lora"]
    with pytest.raises(ConfigurationError, match="There is no technique 'lora=rank:4'"):
        module.main([*quick_options, "--technique", "lora=rank:4"])


def test_those_of_a_recipe_file_are_tried_where_none_is_named(model_name, text_file, tmp_path, capsys):
    path = tmp_path / "recipe.toml"
    path.write_text(f'model = "{model_name}"\ncorpus = "{text_file}"\nsequence_length = 16\n[technique.lora]\n')
    module.main([str(path)])
    assert capsys.readouterr().out.split()[:2] == ["lora", "lora"]


def test_nothing_is_run_where_a_launcher_started_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE=2 in the environment says"):
        module.main(["gpt2-tiny"])
