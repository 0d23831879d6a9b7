"""Every pair of techniques is measured, or refused with a reason; none fails."""

from dataclasses import replace

import pandas as pd
import pytest

from workbench.__main__ import main
from workbench.advise.pairs import matrix, pairs, refusals, style_pairs
from workbench.paths import DATA
from workbench.techniques import REGISTRY

REFERENCE = DATA / "reference" / "cpu" / "gpt2-tiny" / "pairs.csv"


@pytest.fixture
def quick_options(model_name, text_file):
    return [model_name, "--corpus", str(text_file), "--steps", "1", "--sequence-length", "16"]


@pytest.fixture(scope="module")
def few(recipe, tmp_path_factory):
    names = ["gradient_accumulation", "gradient_checkpointing", "lora", "mixed_precision"]
    return pairs(replace(recipe, steps=1), names, device="cpu", folder=tmp_path_factory.mktemp("pairs"))


def test_singles_and_pairs_are_measured(few):
    assert len(few) == 4 + 6
    assert set(few["verdict"]) == {"measured"}
    assert (few["saved_fraction"] < 1).all()


def test_the_matrix_is_symmetric_and_complete(few):
    shown = matrix(few)
    assert shown.equals(shown.T)
    assert not shown.isna().any().any()
    assert shown.map(lambda words: words.endswith("%")).all().all()


def test_what_does_not_go_together_says_why(recipe):
    odd = replace(recipe, effective_batch_size=7, steps=1)
    table = pairs(odd, ["gradient_accumulation", "lora"], device="cpu")
    assert table["verdict"].tolist() == ["refused", "measured", "refused"]
    (row,) = refusals(table).to_dict("records")
    assert row["pair"] == "gradient_accumulation, gradient_accumulation + lora"
    assert "a batch of 7 cannot be split" in row["reason"]
    assert matrix(table).loc["lora", "gradient_accumulation"] == "refused"
    assert ">refused<" in style_pairs(table).to_html()


def test_the_more_a_pair_saves_the_greener_it_is():
    table = pd.DataFrame({"one": ["a", "a", "b"], "other": ["a", "b", "b"], "verdict": ["measured"] * 2 + ["oom"]})
    page = style_pairs(table.assign(saved_fraction=[0.61, -0.07, None])).to_html()
    for style in ("background-color: rgba(0, 158, 115, 0.61)", "background-color: rgba(213, 94, 0, 0.07)", "#808080"):
        assert style in page


def test_the_committed_table_has_every_pair_and_agrees_with_what_recipes_refuse():
    table, count = pd.read_csv(REFERENCE), len(REGISTRY)
    assert set(table["one"]) | set(table["other"]) == set(REGISTRY)
    assert len(table) == count * (count + 1) // 2
    assert "failed" not in set(table["verdict"])
    assert table.loc[table["verdict"] != "measured", "reason"].notna().all()


def test_the_command_tries_those_that_are_named(quick_options, capsys):
    assert main(["pairs", *quick_options, "--technique", "gradient_accumulation", "--technique", "lora"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["gradient_accumulation", "lora"]
    assert main(["pairs", *quick_options, "--technique", "lora=rank:4"]) == 2
    assert "There is no technique 'lora=rank:4'" in capsys.readouterr().err
