from itertools import pairwise
from types import SimpleNamespace

import headline
import pandas as pd
import pytest
from headline import LARGE, SMALL

from tests.advise.test_compare import record
from workbench.base.errors import OutOfMemoryError, UnavailableError


def test_a_rung_has_what_those_below_it_have_and_of_a_name_the_last():
    recipes = headline.climb(SMALL)
    assert recipes[0].techniques == ()
    for below, above in pairwise(recipes[:-1]):
        assert set(below.techniques) < set(above.techniques)
    kinds = [t.kind for recipe in recipes[-2:] for t in recipe.techniques if t.name == "optimizer"]
    assert kinds == ["adamw_flash", "adamw_8bit_stochastic"]
    assert len(recipes[-1].techniques) == len(recipes[-2].techniques)


def test_a_rung_is_told_beside_the_first_one(monkeypatch):
    def predict(recipe, gpu):
        asked.append((recipe, gpu))
        rung = len(asked)
        parts = {"weights": 30 // rung, "activations": 90 // rung}
        return SimpleNamespace(by_category=parts, peak_allocated_bytes=120 // rung, flops=1000 * rung, source="made up")

    asked = []
    monkeypatch.setattr(headline, "predict", predict)
    table = headline.memory(LARGE)
    assert asked == [
        (recipe, rung.gpu or LARGE.gpu) for recipe, rung in zip(headline.climb(LARGE), LARGE.rungs, strict=True)
    ]
    assert table["label"].tolist()[:2] == ["plain", " + ".join(LARGE.rungs[1].adds)]
    assert table["smaller"].tolist()[:3] == [1, 2, 3]
    assert table["operations"].tolist()[:3] == [1, 2, 3]
    assert table.iloc[1].to_dict() == {
        "label": " + ".join(LARGE.rungs[1].adds), "peak_allocated_bytes": 60, "smaller": 2, "operations": 2,
        "memory_source": "made up", "weights_bytes": 15, "activations_bytes": 45,
    }  # fmt: skip


@pytest.mark.dear
@pytest.mark.usefixtures("predicted_once")
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

    asked, recipes = [], headline.climb(LARGE)
    monkeypatch.setattr(headline, "run", run)
    table = headline.on_cards(LARGE)
    assert [recipe for recipe, _, _ in asked[::2]] == recipes[1:-1]
    assert [recipe for recipe, _, _ in asked[1::2]] == recipes[2:]
    assert asked[-1][1:] == ("emulated:rtx4060", 6 * 2**30 - 512 * 2**20)
    assert table["this rung"].tolist() == ["out of memory", "ok", "out of memory", "not judged: no emulator here"]


def test_sets_that_a_cpu_can_judge_are_compared_on_the_small_model(monkeypatch):
    def side_by_side(base, *others, seeds, device, reuse):
        asked.extend([base, *others])
        return [[record(each.label, seed=seed, loss=4.0 + seed / 10) for seed in range(seeds)] for each in asked]

    asked = []
    monkeypatch.setattr(headline, "side_by_side", side_by_side)
    table = headline.losses([*headline.climb(SMALL), *headline.climb(LARGE)]).set_index("techniques")
    assert asked[0].techniques == ()
    assert {(recipe.model, recipe.dropout) for recipe in asked} == {("gpt2-tiny", 0.0)}
    assert len(set(asked)) == len(asked) == len(table)
    assert not [label for label in table.index if "adamw_flash" in label], "it needs CUDA, and changes the loss"
    assert [label for label in table.index if "adamw_8bit_stochastic" in label]
    assert [label for label in table.index if "4bit" in label and "allocator" not in label], "exact, and CUDA's alone"
    assert set(table["loss_verdict"]) == {"", "same"}


def test_a_program_whose_package_is_missing_is_said_not_to_be_tried(monkeypatch):
    monkeypatch.setattr(headline, "find_spec", lambda _: None)
    found = SimpleNamespace(processes=[{"devices": [{"peak_allocated_bytes": 7}]}])
    commands = []
    monkeypatch.setattr(headline, "emulate", lambda command, *_, **__: commands.append(command) or found)
    table = headline.peers()
    assert table["peak_allocated_bytes"].tolist()[:3] == [7, 7, 7]
    packages = ["trl", "unsloth", "unsloth"]
    assert table["source"].tolist()[-3:] == [f"not tried: pip install {package}" for package in packages]
    assert all((headline.SCRIPTS / command[1].split("/")[-1]).exists() for command in commands)


def test_a_program_that_is_a_package_is_named_with_its_version(monkeypatch):
    found = SimpleNamespace(processes=[])
    monkeypatch.setattr(headline, "find_spec", lambda _: True)
    monkeypatch.setattr(headline, "version", lambda package: f"1.2 of {package}")
    monkeypatch.setattr(headline, "emulate", lambda *_, **__: found)
    assert headline.peers()["program"].tolist()[2:4] == ["nanoGPT's step", "TRL's SFTTrainer, trl 1.2 of trl"]


def test_it_prints_and_writes_every_table(monkeypatch, tmp_path, capsys):
    one = pd.DataFrame({"techniques": ["baseline"], "held_out_loss": [4.0]})
    monkeypatch.setattr(headline, "headline", lambda: iter([("losses", one), ("again", one)]))
    headline.main(["--save", str(tmp_path / "tables")])
    assert capsys.readouterr().out.count("baseline") == 2
    assert len(list((tmp_path / "tables").glob("*.csv"))) == 2
