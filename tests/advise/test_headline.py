from itertools import pairwise
from types import SimpleNamespace

import pytest

from workbench.__main__ import main
from workbench.advise import headline
from workbench.errors import OutOfMemoryError, UnavailableError

SMALL, LARGE = headline.PLAN["ladder"]


def test_a_rung_has_what_those_below_it_have_and_of_a_name_the_last():
    recipes = headline.climbed(SMALL)
    assert recipes[0].techniques == ()
    for below, above in pairwise(recipes[:-1]):
        assert set(below.techniques) < set(above.techniques)
    kinds = [t.kind for recipe in recipes[-2:] for t in recipe.techniques if t.name == "optimizer"]
    assert kinds == ["adamw_flash", "adamw_8bit_stochastic"]
    assert len(recipes[-1].techniques) == len(recipes[-2].techniques)


def test_the_small_ladder_reaches_an_eighth_of_the_memory_at_a_third_more_operations():
    table = headline.memory(SMALL)
    assert table["peak_allocated_bytes"].is_monotonic_decreasing
    assert table["smaller"].iloc[-2] > 8
    assert table["operations"].iloc[-1] < 1.35
    parts = table[[name for name in table if name.endswith("_bytes") and not name.startswith("peak")]]
    assert (parts.sum(axis=1) == table["peak_allocated_bytes"]).all()


def test_a_card_is_asked_with_the_rung_that_is_for_it_and_with_the_one_before(monkeypatch):
    def run(recipe, device, memory_cap):
        asked.append((recipe, device, memory_cap))
        if recipe in recipes[: len(recipes) - 1 : 2]:
            raise OutOfMemoryError("no room")
        if recipe == recipes[-1]:
            raise UnavailableError("no emulator")
        return SimpleNamespace(status="ok")

    asked, recipes = [], headline.climbed(LARGE)
    monkeypatch.setattr(headline, "run", run)
    table = headline.on_cards(LARGE)
    assert [recipe for recipe, _, _ in asked[::2]] == recipes[1:-1]
    assert [recipe for recipe, _, _ in asked[1::2]] == recipes[2:]
    assert asked[-1][1:] == ("emulated:rtx4060", 6 * 2**30 - 512 * 2**20)
    assert table["this rung"].tolist() == ["out of memory", "ok", "out of memory", "not judged: no emulator here"]


def test_every_set_takes_the_best_of_the_same_rates(monkeypatch):
    search = headline.PLAN["search"]
    best = dict(zip(("baseline", "gradient_checkpointing"), search["rates"][1:], strict=False))
    seen = []

    def loss(recipe):
        seen.append(recipe)
        return abs(recipe.learning_rate - best.get(recipe.label, search["rates"][0])) + recipe.seed / 100

    monkeypatch.setattr(headline, "_loss", loss)
    table = headline.losses({recipe.label: recipe for recipe in headline.climbed(SMALL)}).set_index("techniques")
    assert table["learning_rate"][list(best)].tolist() == list(best.values())
    assert not [label for label in table.index if "adamw_flash" in label], "it needs CUDA, and changes the loss"
    assert [label for label in table.index if "adamw_8bit_stochastic" in label]
    for label in best:
        tried = {recipe.learning_rate for recipe in seen if recipe.label == label}
        assert tried == set(search["rates"])


def test_a_verdict_is_that_of_the_comparison():
    table = headline.judged(
        {"baseline": [4.0, 4.1], "a": [4.05, 4.12], "b": [4.4, 4.5], "c": [3.0, 3.1], "d": [4.0, 4.1]}
    )
    assert table["verdict"].tolist() == ["", "tie", "worse", "better", "same"]
    assert table["held_out_loss_spread"].tolist() == pytest.approx([0.1, 0.07, 0.1, 0.1, 0.1])


def test_a_program_whose_package_is_missing_is_said_not_to_be_tried(monkeypatch):
    monkeypatch.setattr(headline, "find_spec", lambda _: None)
    found = SimpleNamespace(processes=[{"devices": [{"peak_allocated_bytes": 7}]}])
    commands = []
    monkeypatch.setattr(headline, "emulate", lambda command, *_, **__: commands.append(command) or found)
    table = headline.peers()
    assert table["peak_allocated_bytes"].tolist()[:3] == [7, 7, 7]
    assert table["source"].tolist()[-1] == "not tried: pip install trl"
    assert all((headline.PEERS / command[1].split("/")[-1]).exists() for command in commands)


def test_the_command_prints_and_writes_every_table(monkeypatch, tmp_path, capsys):
    one = headline.judged({"baseline": [4.0, 4.1]})
    monkeypatch.setattr(headline, "headline", lambda: iter([("losses", one), ("again", one)]))
    assert main(["headline", "--save", str(tmp_path / "tables")]) == 0
    assert capsys.readouterr().out.count("baseline") == 2
    assert len(list((tmp_path / "tables").glob("*.csv"))) == 2
