"""The search, in a made-up memory model where every answer can be found by hand; and the planner's surroundings."""

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import ClassVar

import pytest

import workbench
from workbench.__main__ import main
from workbench.advise import plan as planner
from workbench.advise.plan import Search, families, plan
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError, OutOfMemoryError
from workbench.gpus.catalogue import gpu
from workbench.journal.record import Status
from workbench.prediction.predict import predict
from workbench.recipe import Recipe, as_command
from workbench.techniques import REGISTRY, Capability, GradientAccumulation, GradientCheckpointing, Numerics, Technique
from workbench.training.run import run

MIB = 2**20
RECIPE = Recipe(model="gpt2-tiny", steps=10)


@dataclass(frozen=True)
class Needed:
    by_category: dict
    flops: int
    context_bytes: int = 0
    peak_reserved_bytes: int | None = None
    gpu: str = "cpu"
    more: dict = field(default_factory=dict)  # work besides

    @property
    def peak_allocated_bytes(self):
        return sum(self.by_category.values())

    @property
    def need_bytes(self):
        return (self.peak_reserved_bytes or self.peak_allocated_bytes) + self.context_bytes

    @property
    def work(self):
        return {"fp32_flops": self.flops, **self.more}


@dataclass(frozen=True)
class Fake(Technique):
    """Base of made-up techniques. `level` is their strength: 1 is the gentlest."""

    level: int = 1
    title: ClassVar[str] = "made up"
    costs: ClassVar[str] = "nothing real"
    numerics: ClassVar[Numerics] = Numerics.EXACT


@dataclass(frozen=True)
class Split(Fake):
    """Exact, no compute: activations and logits divided by 2 ** level."""

    name: ClassVar[str] = "split"
    title: ClassVar[str] = "Split"
    attacks: ClassVar[tuple] = (Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)


@dataclass(frozen=True)
class Recompute(Fake):
    """Exact, a third more compute: activations divided by 10."""

    name: ClassVar[str] = "recompute"
    attacks: ClassVar[tuple] = (Category.ACTIVATIONS,)


@dataclass(frozen=True)
class Chunk(Fake):
    """Exact, a tenth more compute: logits divided by 10."""

    name: ClassVar[str] = "chunk"
    title: ClassVar[str] = "Chunk"
    attacks: ClassVar[tuple] = (Category.LOGITS_AND_LOSS,)


@dataclass(frozen=True)
class Freeze(Fake):
    """Another model: no gradients, no states."""

    name: ClassVar[str] = "freeze"
    attacks: ClassVar[tuple] = (Category.GRADIENTS, Category.OPTIMIZER_STATES)
    numerics: ClassVar[Numerics] = Numerics.DIFFERENT
    brings: ClassVar[frozenset] = frozenset({Capability.ADAPTER})


@dataclass(frozen=True)
class Round(Fake):
    """Approximate: activations halved, less compute. Does not go with an adapter."""

    name: ClassVar[str] = "round"
    attacks: ClassVar[tuple] = (Category.ACTIVATIONS,)
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    forbids: ClassVar[frozenset] = frozenset({Capability.ADAPTER})


@dataclass(frozen=True)
class Small(Fake):
    """Approximate: weights divided by 4."""

    name: ClassVar[str] = "small"
    attacks: ClassVar[tuple] = (Category.WEIGHTS,)
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE


@dataclass(frozen=True)
class Useless(Fake):
    """Says that it attacks something, and does not."""

    name: ClassVar[str] = "useless"
    attacks: ClassVar[tuple] = (Category.ACTIVATIONS,)


@dataclass(frozen=True)
class Loader(Fake):
    """Nothing to do with the device's memory: a planner must not even predict it."""

    name: ClassVar[str] = "loader"
    attacks: ClassVar[tuple] = ()


FAMILIES = {
    "split": tuple(Split(level=n) for n in (1, 2, 3)),
    "recompute": (Recompute(),), "chunk": (Chunk(),), "freeze": (Freeze(),), "round": (Round(),), "small": (Small(),),
    "useless": (Useless(),), "loader": (Loader(),),
}  # fmt: skip


@dataclass
class Machine:
    """weights 100, gradients 100, states 200, activations 800, logits 400: 1600 MiB without changes."""

    asked: list = field(default_factory=list)

    def __call__(self, recipe):
        self.asked.append(recipe)
        parts = dict(zip(list(Category)[:5], (100.0, 100.0, 200.0, 800.0, 400.0), strict=True))
        flops = 1000.0
        for change in recipe.techniques:
            match change.name:
                case "split":
                    for category in change.attacks:
                        parts[category] /= 2**change.level
                case "recompute":
                    parts[Category.ACTIVATIONS] /= 10
                    flops += 333
                case "chunk":
                    parts[Category.LOGITS_AND_LOSS] /= 10
                    flops += 100
                case "freeze":
                    parts[Category.GRADIENTS] = parts[Category.OPTIMIZER_STATES] = 0
                    flops -= 300
                case "round":
                    parts[Category.ACTIVATIONS] /= 2
                    flops -= 100
                case "small":
                    parts[Category.WEIGHTS] /= 4
                case "loader":
                    pytest.fail("a technique that attacks nothing was predicted")
        return Needed({category: int(size * MIB) for category, size in parts.items()}, int(flops))


KEYS = {
    "label", "words", "recipe", "numerics", "needed_bytes", "headroom_bytes", "saved_bytes", "fits", "extra_compute",
    "extra_time", "gives_up", "command",
}  # fmt: skip


def planned(budget_mib, names=tuple(FAMILIES), machine=None, recipe=RECIPE, **options):
    chosen = {name: FAMILIES[name] for name in names}
    return Search(recipe, int(budget_mib * MIB), machine or Machine(), families=chosen, **options).plan()


def labels(result):
    return [candidate.label for candidate in result]


def test_what_fits_already_needs_no_change_and_one_prediction():
    machine = Machine()
    result = planned(1600, machine=machine)
    assert labels(result) == ["no change"]
    assert len(result.tried) == len(machine.asked) == 1
    assert result[0].headroom_bytes == 0
    assert result[0].numerics is Numerics.EXACT
    assert "It fits without any change" in str(result)


def test_single_changes_exact_first_then_by_compute():
    """At 1200: split needs 1000, recompute 880, chunk 1240 (too much), round 1200, freeze 1300."""
    result = planned(1200)
    assert labels(result) == ["split", "recompute", "round"]
    assert [c.extra_compute for c in result] == pytest.approx([0, 0.333, -0.1])
    assert [c.numerics for c in result] == [Numerics.EXACT, Numerics.EXACT, Numerics.APPROXIMATE]
    assert [c.needed_bytes for c in result] == [1000 * MIB, 880 * MIB, 1200 * MIB]
    assert result.closest.needed_bytes == 550 * MIB  # split at its strongest was looked at too


def test_the_gentlest_settings_that_fit_are_taken():
    levels = {1000: 1, 999: 2, 700: 2, 699: 3, 550: 3}
    assert {budget: planned(budget, ["split"])[0].changes for budget in levels} == {
        budget: (Split(level=level),) for budget, level in levels.items()
    }


def test_a_set_that_fits_is_not_extended():
    for result in (planned(1200), planned(600), planned(480)):
        sets = [{change.name for change in candidate.changes} for candidate in result]
        assert not any(one < other for one in sets for other in sets)


def test_pairs_where_no_single_change_is_enough():
    """520 without split: recompute and chunk leave 100 + 100 + 200 + 80 + 40."""
    result = planned(520, ["recompute", "chunk", "round", "useless"])
    assert labels(result) == ["chunk + recompute"]
    assert result[0].headroom_bytes == 0
    assert result[0].extra_compute == pytest.approx(0.433)
    assert len(result[0].gives_up) == 2
    assert result[0].gives_up[0] == "Chunk: nothing real (loss: exact)"


def test_pairs_take_the_gentlest_settings_too():
    """split and recompute below 600: 400 + 800 / 10 / 2**n + 400 / 2**n is 640, 520, 460."""
    assert planned(540, ["split", "recompute"])[0].changes == (Recompute(), Split(level=2))


def test_nothing_useless_is_in_an_answer():
    for budget in (1200, 700, 520, 300, 200):
        for candidate in planned(budget):
            assert "useless" not in {change.name for change in candidate.changes}
            for change in candidate.changes:
                fewer = tuple(other for other in candidate.changes if other is not change)
                assert sum(Machine()(replace(RECIPE, techniques=fewer)).by_category.values()) > budget * MIB


def test_techniques_that_exclude_each_other_are_never_put_together():
    machine = Machine()
    planned(210, machine=machine)
    assert not any({"freeze", "round"} <= {t.name for t in recipe.techniques} for recipe in machine.asked)


def test_where_the_loss_cannot_stay_the_same_the_best_of_the_others_is_found():
    """Below 400 gradients or states must go: freeze, then split or recompute or chunk."""
    result = planned(300)
    assert result.candidates
    assert all(candidate.numerics is Numerics.DIFFERENT for candidate in result)
    assert all("freeze" in {change.name for change in candidate.changes} for candidate in result)


def test_with_an_approximate_answer_exact_ones_are_still_looked_for():
    """1100: round alone 1200 does not, small alone does not; chunk + round 840 would, but recompute is exact."""
    result = planned(900, ["round", "small", "chunk", "recompute"])
    assert labels(result)[0] == "recompute"
    pair = planned(500, ["freeze", "chunk", "recompute", "split"])
    assert pair[0].numerics is Numerics.EXACT


def test_nothing_fits_and_it_is_said_with_what_dominates():
    result = planned(150, ["split", "chunk"])
    assert not result.candidates
    assert result.closest.label == "split(level=3) + chunk" or result.closest.label == "chunk + split(level=3)"
    assert result.closest.needed_bytes == 505 * MIB
    assert result.closest.dominant == (Category.OPTIMIZER_STATES, 200 * MIB)
    words = str(result)
    assert "Nothing was found that fits. Closest: Turn on Chunk with level=1; Turn on Split with level=3" in words
    assert "needs 505 MiB, 355 MiB too much; optimizer states dominate with 200 MiB." in words


def test_a_budget_below_the_weights_is_refused_unless_a_technique_shrinks_them():
    with pytest.raises(ConfigurationError) as caught:
        planned(80, ["split", "freeze"])
    assert str(caught.value) == (
        "budget: 80.0 MiB is below the weights of gpt2-tiny alone, 100 MiB; the least that a technique makes of them "
        "is 100 MiB. Choose a smaller model or a larger budget."
    )
    with pytest.raises(ConfigurationError, match="the least that a technique makes of them is 25.0 MiB"):
        planned(24)
    assert not planned(99, ["small", "freeze", "split"]).candidates  # refused by no rule, and still nothing fits
    # weights 25, activations 800 / 8 / 10, logits 400 / 8: 85 with four changes
    four = {"small", "freeze", "split", "recompute"}
    assert [{c.name for c in candidate.changes} for candidate in planned(85, [*four, "chunk"])] == [four]
    assert not planned(84, [*four, "chunk"]).candidates  # it would take five
    assert planned(84, [*four, "chunk"], most_changes=5).candidates


def test_techniques_that_are_on_stay_on_and_are_not_offered_again():
    result = planned(520, recipe=RECIPE | Chunk())
    assert all(Chunk() in candidate.recipe.techniques for candidate in result)
    assert all("chunk" not in {change.name for change in candidate.changes} for candidate in result)
    assert result.baseline.needed_bytes == 1240 * MIB


def test_what_cannot_be_predicted_is_left_out_and_said():
    machine = Machine()

    def broken(recipe):
        if any(technique.name == "recompute" for technique in recipe.techniques):
            raise ConfigurationError("predict: cannot be traced")
        return machine(recipe)

    result = Search(RECIPE, 1200 * MIB, broken, families=FAMILIES).plan()
    assert labels(result) == ["split", "round"]
    assert result.skipped["recompute"] == "predict: cannot be traced"
    assert "not predicted: recompute: predict: cannot be traced" in str(result)


def test_the_search_is_frugal():
    """Seven families with nine settings have 4 · 2 ** 6 sets; a minute of predictions, and none twice."""
    for budget in (1200, 600, 480, 300, 210):
        machine = Machine()
        result = planned(budget, machine=machine)
        assert len(machine.asked) == len(set(machine.asked)) == len(result.tried) <= 60


def every_set(machine, most_changes=4):
    """(numerics, bytes) of every possible set of at most so many changes, by brute force."""
    strongest = [family[-1] for name, family in FAMILIES.items() if name != "loader"]
    for size in range(most_changes + 1):
        for changes in combinations(strongest, size):
            with suppress(ConfigurationError):
                recipe = replace(RECIPE, techniques=changes)
                worst = max((planner.NUMERICS.index(c.numerics) for c in changes), default=0)
                yield worst, machine(recipe).peak_allocated_bytes


def test_against_brute_force():
    """Wherever a set of at most four changes fits, one is found, and none with a better loss is overlooked."""
    sets = list(every_set(Machine()))
    for budget in range(30, 1610, 10):
        best = min((worst for worst, needed in sets if needed <= budget * MIB), default=None)
        found = None
        with suppress(ConfigurationError):
            found = next((planner.NUMERICS.index(candidate.numerics) for candidate in planned(budget)), None)
        assert found == best, f"{budget} MiB"


def test_the_context_and_what_is_cached_count_as_needed():
    def on_gpu(recipe):
        predicted = Machine()(recipe)
        reserved = predicted.peak_allocated_bytes + 100 * MIB
        return Needed(predicted.by_category, predicted.flops, context_bytes=50 * MIB, peak_reserved_bytes=reserved)

    assert Search(RECIPE, 1750 * MIB, on_gpu, families=FAMILIES).plan().baseline.fits
    assert not Search(RECIPE, 1749 * MIB, on_gpu, families=FAMILIES).plan().baseline.fits


def test_compute_is_that_of_the_whole_run():
    """A technique that doubles the steps and halves the work of each costs nothing."""

    @dataclass(frozen=True)
    class Halves(Fake):
        name: ClassVar[str] = "halves"
        attacks: ClassVar[tuple] = (Category.ACTIVATIONS,)

        def training_arguments(self, arguments):
            return {**arguments, "max_steps": 2 * arguments["max_steps"]}

    def predict(recipe):
        half = 2 if recipe.techniques else 1
        return Needed({Category.ACTIVATIONS: 1000 // half}, 1000 // half)

    (candidate,) = Search(RECIPE, 600, predict, families={"halves": (Halves(),)}).plan()
    assert candidate.extra_compute == candidate.extra_time == 0


# ---- time ----


@dataclass(frozen=True)
class Away(Fake):
    """Exact, no compute: activations wait elsewhere, and 100 GB a step cross the bus."""

    name: ClassVar[str] = "away"
    attacks: ClassVar[tuple] = (Category.ACTIVATIONS,)


def on(card):
    """As `Machine`, with 10¹³ operations and 10¹¹ bytes a step, in half precision where it rounds."""
    machine = Machine()

    def predict(recipe):
        names = {change.name for change in recipe.techniques}
        found = machine(recipe)
        found.by_category[Category.ACTIVATIONS] //= 10 if "away" in names else 1
        operations, moved = found.flops * 10**10, {"bus_bytes": 10**11} if "away" in names else {}
        more = {"memory_bytes": 10**11, "half_flops": operations if "round" in names else 0, **moved}
        return replace(found, gpu=card, flops=0 if "round" in names else operations, more=more)

    return predict


OFFERED = {name: FAMILIES[name] for name in ("recompute", "round")} | {"away": (Away(),)}


def test_a_transfer_costs_time_and_no_operations():
    """An H100 computes 10¹³ operations in 149 ms, reads 10¹¹ bytes in 30, and moves as many over its bus in 1,587."""
    found = {
        candidate.label: candidate for candidate in Search(RECIPE, 1200 * MIB, on("h100"), families=OFFERED).plan()
    }
    assert found["away"].extra_compute == 0
    assert found["away"].extra_time == pytest.approx(1587 / (149 + 30), rel=0.01)
    assert found["recompute"].extra_time == pytest.approx(0.333 * 149 / (149 + 30), rel=0.01)
    assert found["round"].extra_compute == pytest.approx(-0.1)
    assert found["round"].extra_time == pytest.approx((9 + 30) / (149 + 30) - 1, rel=0.01)
    assert found["away"].cost == "+0% operations, about +886% time (estimate), 93.1 GiB moved a step"
    assert found["recompute"].cost == "+33% operations, about +28% time (estimate)"
    assert found["away"].to_dict()["extra_time"] == found["away"].extra_time


def test_exact_ones_first_and_of_them_the_fastest():
    assert labels(Search(RECIPE, 1200 * MIB, on("h100"), families=OFFERED).plan()) == ["recompute", "away", "round"]


def test_the_card_decides_which_is_faster():
    """A T4 needs 1,235 ms for the operations and 6,349 for the bus; a bus ten times as wide would turn the order."""
    (recompute, away, _) = Search(RECIPE, 1200 * MIB, on("t4"), families=OFFERED).plan()
    assert away.extra_time == pytest.approx(6349 / (1235 + 312), rel=0.01)
    assert recompute.extra_time == pytest.approx(0.333 * 1235 / (1235 + 312), rel=0.01)


def test_of_a_cpu_the_rates_are_measured_ones_and_the_bus_is_a_disk():
    """10¹³ operations take two cores 55.6 s, 10¹¹ bytes of memory 14.3 s, and of the disk 83.3 s."""
    (recompute, away, rounded) = Search(RECIPE, 1200 * MIB, on("cpu"), families=OFFERED).plan()
    assert away.extra_time == pytest.approx(83.3 / (55.6 + 14.3), rel=0.01)
    assert recompute.extra_time == pytest.approx(0.333 * 55.6 / (55.6 + 14.3), rel=0.01)
    assert rounded.extra_time == pytest.approx((0.9 * 12.8 + 14.3) / (55.6 + 14.3) - 1, rel=0.01)
    assert away.cost == "+0% operations, about +119% time (estimate), 93.1 GiB moved a step"


def test_gentler_settings_that_alter_the_loss_less_are_looked_for():
    """Another model fits by itself. Of the optimizers the strongest is another one, and the gentlest only rounds."""

    def predict(recipe):
        states = {"adamw_8bit": 50, "adafactor": 25}
        kinds = [technique.kind for technique in recipe.techniques if technique.name == "optimizer"]
        names = {technique.name for technique in recipe.techniques}
        activations = 10 if "freeze" in names else 100 if "recompute" in names else 300
        parts = {Category.OPTIMIZER_STATES: states[kinds[0]] if kinds else 180, Category.ACTIVATIONS: activations}
        return Needed({category: size * MIB for category, size in parts.items()}, 1000)

    offered = {"optimizer": families(None)["optimizer"], **{n: FAMILIES[n] for n in ("freeze", "recompute")}}
    found = Search(RECIPE, 200 * MIB, predict, families=offered).plan()
    assert labels(found) == ["optimizer(kind=adamw_8bit) + recompute", "freeze"]
    assert [candidate.numerics for candidate in found] == [Numerics.APPROXIMATE, Numerics.DIFFERENT]


# ---- with the registered techniques ----


def test_every_technique_offers_settings_of_its_own_and_every_gpu_has_some():
    for capability in (None, (7, 5), (8, 0), (9, 0), (12, 0)):
        offered = families(capability)
        assert set(offered) == set(REGISTRY)
        for name, family in offered.items():
            assert all(type(variant) is REGISTRY[name] for variant in family)
            assert len(set(family)) == len(family)


def test_on_an_old_gpu_mixed_precision_is_offered_in_the_type_it_has():
    assert [variant.dtype for variant in families(gpu("t4").compute_capability)["mixed_precision"]] == ["fp16"]
    assert [variant.dtype for variant in families(gpu("l4").compute_capability)["mixed_precision"]] == ["bf16"]
    assert [variant.dtype for variant in families(None)["mixed_precision"]] == ["bf16"]


def halving(recipe, gpu_name):
    """A predictor in which the micro-batch is all that matters."""
    micro_batch = recipe.training_arguments()["per_device_train_batch_size"]
    return Needed({Category.WEIGHTS: 100 * MIB, Category.ACTIVATIONS: 100 * MIB * micro_batch}, 1000, gpu=gpu_name)


def test_settings_that_do_not_suit_the_batch_are_not_tried():
    result = plan(
        model="gpt2-tiny", budget="400MiB", gpu="cpu", effective_batch_size=6, predict=halving, most_changes=1
    )
    assert result[0].changes == (GradientAccumulation(steps=2),)
    assert plan(model="gpt2-tiny", budget="400MiB", gpu="cpu", effective_batch_size=7, predict=halving).skipped == {}


def test_a_choice_among_some_techniques():
    offered = ["gradient_checkpointing", "lora"]
    result = plan(model="gpt2-tiny", budget="400MiB", gpu="cpu", among=offered, predict=halving)
    assert not result.candidates
    assert len(result.tried) == 3


def test_a_plan_is_runnable():
    result = plan(
        model="gpt2-tiny", budget="300MiB", gpu="l4", effective_batch_size=8, sequence_length=64, dropout=0.0,
        techniques=(GradientCheckpointing(use_reentrant=True),), predict=halving,
    )  # fmt: skip
    words = shlex.split(as_command(result[0].recipe))
    assert words[:6] == ["python", "-m", "workbench", "run", "gpt2-tiny", "--sequence-length"]
    assert as_command(result[0].recipe) == (
        "python -m workbench run gpt2-tiny --sequence-length 64 --dropout 0.0 --technique gradient_accumulation "
        "--technique gradient_checkpointing=use_reentrant:true"
    )
    assert result.predicted_for == "NVIDIA L4"


def test_by_default_the_budget_is_the_memory_of_the_gpu():
    assert plan(model="gpt2-tiny", gpu="t4", predict=halving).budget_bytes == gpu("t4").memory_bytes


def test_a_budget_above_the_card_is_the_card():
    result = plan(model="gpt2-tiny", budget="16GB", gpu="T4", predict=halving)
    assert result.budget_bytes == gpu("t4").memory_bytes < result.asked_bytes
    assert "budget 14.6 GiB (all there is, less than the 14.9 GiB asked for), predicted for NVIDIA T4" in str(result)
    assert "asked for" not in str(plan(model="gpt2-tiny", budget="14GB", gpu="t4", predict=halving))


REFUSED = [
    ({"budget": "8"}, "budget: '8' is not an amount of memory"),
    ({"budget": "8Gb"}, "budget: '8Gb' is not an amount of memory"),
    ({"budget": 0}, "budget: 0 is not an amount"),
    ({"budget": "8GiB", "gpu": "gtx480"}, "gpu: there is no 'gtx480'. Known: t4"),
    ({"gpu": "cpu"}, "budget: a CPU has none of its own"),
    ({"budget": "8GiB", "among": ["magic"]}, "among: there is no technique 'magic'. Known: "),
    ({"budget": "8GiB", "batch": 3}, "recipe has no field 'batch'. Known: arguments, callbacks, corpus, dropout"),
    ({"budget": "8GiB", "effective_batch_size": 0}, "effective_batch_size must be an integer of at least 1"),
]


def test_what_cannot_be_planned_is_refused(subtests):
    for asked, message in REFUSED:
        with subtests.test(asked=asked):
            with pytest.raises(ConfigurationError) as caught:
                plan(**{"model": "gpt2-tiny", "predict": halving, **asked})
            assert message in str(caught.value)


@pytest.fixture
def with_halving(monkeypatch):
    """At the front door, which remembers what it has found: a name that is replaced behind it would stay there."""
    real = workbench.plan
    monkeypatch.setattr(workbench, "plan", lambda **fields: real(predict=halving, **fields))


def test_the_command_line(with_halving, capsys):
    arguments = ["plan", "gpt2-tiny", "--budget", "500MiB", "--gpu", "l4", "--batch-size", "8"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "budget 500 MiB, predicted for NVIDIA L4" in out
    assert "1. Turn on Gradient accumulation with steps=2" in out
    assert "   needs 500 MiB, 0 B to spare; loss exact; +0% operations, about +0% time (estimate)" in out
    assert "gives up  Gradient accumulation: speed, where" in out
    assert "python -m workbench run gpt2-tiny --technique gradient_accumulation=steps:2" in out
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) >= {"budget_bytes", "predicted_for", "baseline", "candidates", "closest", "predictions", "skipped"}
    assert KEYS <= set(data["candidates"][0]) == set(data["baseline"]) == set(data["closest"])
    assert data["candidates"][0]["recipe"]["techniques"] == {"gradient_accumulation": {"steps": 2}}
    assert data["candidates"][0]["needed_bytes"] == data["budget_bytes"] == 500 * MIB


def test_the_command_line_when_nothing_fits_or_the_budget_is_unclear(with_halving, capsys):
    assert main(["plan", "gpt2-tiny", "--budget", "150MiB", "--gpu", "l4"]) == 1
    assert "Nothing was found that fits" in capsys.readouterr().out
    for budget in ("8", "8G", "90MiB"):
        assert main(["plan", "gpt2-tiny", "--budget", budget, "--gpu", "l4"]) == 2
        assert capsys.readouterr().err.startswith("error: budget: ")


# ---- with true predictions ----


@pytest.mark.usefixtures("predicted_once")
def test_a_true_plan_runs_under_its_budget_and_the_baseline_does_not(recipe):
    short = replace(recipe, steps=2)
    asked = {f.name: getattr(short, f.name) for f in fields(short)}
    budget = int(0.5 * predict(short, "cpu").peak_allocated_bytes)
    result = plan(budget=budget, gpu="cpu", among=["gradient_accumulation", "gradient_checkpointing"], **asked)
    assert not result.baseline.fits
    record = run(result[0].recipe, device="cpu", memory_cap=budget)
    assert record.status is Status.OK
    assert record.peak_allocated_bytes == pytest.approx(result[0].needed_bytes, rel=0.01)
    with pytest.raises(OutOfMemoryError):
        run(short, device="cpu", memory_cap=budget)


@pytest.mark.usefixtures("predicted_once")
def test_on_a_gpu_the_context_is_part_of_what_is_needed(recipe):
    recipe = replace(recipe, steps=1)
    asked = {f.name: getattr(recipe, f.name) for f in fields(recipe)}
    predicted = predict(recipe, "l4")
    needed = predicted.peak_reserved_bytes + predicted.context_bytes
    assert plan(budget=needed, gpu="l4", among=[], **asked)[0].headroom_bytes == 0
    assert not plan(budget=needed - 1, gpu="l4", among=[], **asked).candidates
