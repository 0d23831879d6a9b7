"""The table of pairs as it is shown, and the one that is committed. That it can be made anew: tests/tools."""

import pandas as pd

from workbench.advise.pairs import style_pairs
from workbench.base.paths import DATA
from workbench.techniques import REGISTRY

REFERENCE = DATA / "reference" / "cpu" / "gpt2-tiny" / "pairs.csv"


def test_the_more_a_pair_saves_the_greener_it_is():
    table = pd.DataFrame({"one": ["a", "a", "b"], "other": ["a", "b", "b"], "verdict": ["measured", "emulated", "oom"]})
    page = style_pairs(table.assign(saved_fraction=[0.61, -0.07, None])).to_html()
    assert ">61%<" in page
    assert ">-7%*<" in page, "a star for what was emulated"
    for style in ("background-color: rgba(0, 158, 115, 0.61)", "background-color: rgba(213, 94, 0, 0.07)", "#808080"):
        assert style in page


def test_the_committed_table_has_every_pair_and_agrees_with_what_recipes_refuse():
    table, count = pd.read_csv(REFERENCE), len(REGISTRY)
    assert set(table["one"]) | set(table["other"]) == set(REGISTRY)
    assert len(table) == count * (count + 1) // 2
    assert "failed" not in set(table["verdict"])
    ran = table["verdict"].isin(["measured", "emulated"])
    assert table.loc[~ran, "reason"].notna().all()
    assert table.loc[ran, ["peak_allocated_bytes", "saved_fraction"]].notna().all(axis=None)
    assert table.loc[ran & (table["one"] != table["other"]), "saved_beyond_fraction"].notna().mean() > 0.9
