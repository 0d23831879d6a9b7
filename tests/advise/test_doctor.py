"""The doctor: the cause is read off the record, and its changes are predicted to fit, run, and keep their promise."""

import json
import shlex
from dataclasses import dataclass, replace

import pytest
import torch

from workbench.__main__ import main
from workbench.advise import doctor
from workbench.advise.doctor import diagnose, newest_out_of_memory
from workbench.base.categories import Category, Phase
from workbench.base.errors import ConfigurationError, OutOfMemoryError
from workbench.gpus.catalogue import GPUS
from workbench.journal.record import Record, Status, find_equal, read_all
from workbench.measure.out_of_memory import Refusal
from workbench.measure.tracker import StorageTracker
from workbench.prediction.predict import predict
from workbench.recipe import Recipe
from workbench.techniques import Allocator, GradientAccumulation, GradientCheckpointing, Padding, Streaming
from workbench.training.run import run
from workbench.training.trainer import MeteredTrainer
from workbench.training.world import World

MIB, GIB = 2**20, 2**30
RECIPE = Recipe(model="gpt2-tiny", effective_batch_size=8, steps=10)
A10 = {"device_kind": "cuda", "device_name": "NVIDIA A10"}
CUDA_WORDS = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 21.99 GiB of "
    "which 10.50 MiB is free. Including non-PyTorch memory, this process has 21.97 GiB memory in use. Of the allocated "
    "memory 20.00 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)

OLDER_WORDS = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB (GPU 0; 21.99 GiB total capacity; 20.00 GiB "
    "already allocated; 10.50 MiB free; 21.50 GiB reserved in total by PyTorch)"
)


@dataclass(frozen=True)
class Needed:
    by_category: dict
    flops: int = 1000
    context_bytes: int = 0
    peak_reserved_bytes: int | None = None
    gpu: str = "cpu"

    @property
    def peak_allocated_bytes(self):
        return sum(self.by_category.values())

    @property
    def need_bytes(self):
        return (self.peak_reserved_bytes or self.peak_allocated_bytes) + self.context_bytes

    @property
    def work(self):
        return {"fp32_flops": self.flops}


class Machine:
    """100 MiB of weights and 100 MiB of activations for each sequence at once; a tenth of them with checkpointing."""

    def __init__(self):
        self.asked = []

    def __call__(self, recipe, gpu):
        self.asked.append((recipe, gpu))
        names = {technique.name for technique in recipe.techniques}
        sequences = recipe.training_arguments()["per_device_train_batch_size"]
        activations = 100 * MIB * sequences // (10 if "gradient_checkpointing" in names else 1)
        flops = 1333 if "gradient_checkpointing" in names else 1000
        context = 0 if gpu == "cpu" else GPUS[gpu].context_bytes_estimate
        return Needed({Category.WEIGHTS: 100 * MIB, Category.ACTIVATIONS: activations}, flops, context, gpu=gpu)


AMONG = ("gradient_accumulation", "gradient_checkpointing", "lora")


KEYS = {
    "record_id", "cause", "phase", "operation", "largest_category", "largest_bytes", "room_bytes", "requested_bytes",
    "before_bytes", "fragmented", "predicted_for", "predicted_bytes", "changes", "closest", "plan_command", "note",
    "checklist",
}  # fmt: skip
CHANGE_KEYS = {
    "words", "recipe", "command", "needed_bytes", "saved_bytes", "fits", "numerics", "extra_compute", "extra_time",
    "gives_up",
}  # fmt: skip


def failure(recipe=RECIPE, **facts):
    known = {
        "device_kind": "cpu",
        "memory_cap_bytes": 500 * MIB,
        "peak_phase": "backward",
        "peak_allocated_bytes": 600 * MIB,
        "by_category": {"weights": 100 * MIB, "activations": 500 * MIB},
        "failed_operation": "aten.mm.default",
        "requested_bytes": 120 * MIB,
        "allocated_at_failure_bytes": 480 * MIB,
    }
    known["status"] = Status.OOM
    return replace(Record.start(recipe, model=recipe.model), **known | facts)


def diagnosed(machine=None, among=AMONG, **facts):
    return diagnose(failure(**facts), among=among, predict=machine or Machine())


# ---- the cause ----


def test_the_cause_names_phase_operation_request_and_the_largest_part():
    cause = diagnosed(steps_done=2).cause
    assert "ran out of memory in the backward phase, after 2 whole steps" in cause
    assert "matrix product (aten.mm.default) asked for 120 MiB more while 480 MiB were in use" in cause
    assert "; the memory cap is 500 MiB" in cause
    assert "The largest part of the peak was activations: 500 MiB, 83% of 600 MiB." in cause
    assert "Fragmentation" not in cause


def test_fragmentation_is_what_a_request_would_have_fitted_into(subtests):
    for reserved, fragmented in ((600 * MIB, True), (599 * MIB, False), (None, False)):
        with subtests.test(reserved=reserved):
            facts = {"reserved_at_failure_bytes": reserved}
            diagnosis = diagnosed(**A10, **facts)
            words = "Fragmentation: 120 MiB more were reserved"
            assert diagnosis.fragmented is (words in diagnosis.cause) is fragmented
            assert diagnosed(**facts).fragmented is False  # nothing caches on a CPU


def test_what_was_alive_before_takes_its_part_on_a_gpu_but_not_of_a_cap_on_the_cpu():
    on_gpu, on_cpu = diagnosed(**A10, before_bytes=50 * MIB), diagnosed(before_bytes=50 * MIB)
    assert "50.0 MiB of tensors were alive before the run began; they took their part" in on_gpu.cause
    assert "the cap does not count them" in on_cpu.cause
    assert "alive before" not in diagnosed(before_bytes=MIB).cause


def test_of_an_emulated_gpu_the_commands_run_on_it_too():
    found = diagnosed(device_kind="cuda", device_name="NVIDIA A10 (emulated)", among=("gradient_checkpointing",))
    assert found.changes[0].command.endswith(" --device emulated:a10 --memory-cap 500MiB")
    assert found.checklist == ("An emulated GPU is the run's own: nothing else takes its memory.",)


def test_after_the_last_step_it_failed_in_the_evaluation_wherever_the_peak_was():
    found = diagnosed(steps_done=10, peak_phase="backward", among=("lora",))
    assert found.phase == Phase.EVALUATION
    assert "in the evaluation phase, after 10 whole steps" in found.cause


def test_an_evaluation_that_ran_out_is_cured_by_fewer_sequences_at_once(recipe):
    recipe = replace(recipe, effective_batch_size=1, evaluation_batch_size=32, steps=1)
    cap = 35 * MIB
    with pytest.raises(OutOfMemoryError) as failed:
        run(recipe, device="cpu", memory_cap=cap)
    found = diagnose(newest_out_of_memory(failed.value.record_id), among=("lora",))
    assert found.phase == Phase.EVALUATION
    best = found.changes[0]
    assert best.words == "Set evaluation_batch_size to 16"
    assert " --evaluation-batch-size 16 " in best.command
    assert found.to_dict()["changes"][0]["gives_up"] == ["an evaluation takes longer; training stays as it is"]
    assert "an evaluation takes longer" in str(found)
    assert run(best.recipe, device="cpu", memory_cap=cap).status is Status.OK


def test_before_anything_was_measured_the_devices_own_words_stand():
    nothing = {"peak_phase": "", "peak_allocated_bytes": None, "by_category": {}, "failed_operation": ""}
    found = diagnosed(**nothing, requested_bytes=None, allocated_at_failure_bytes=None, error="CUDA error: no memory")
    assert "in loading, before training" in found.cause
    assert "CUDA error: no memory" in found.cause
    assert (found.largest_category, found.largest_bytes) == ("", None)


# ---- the changes ----


def test_the_gentlest_single_changes_that_fit_exact_and_cheap_first():
    """At 500 MiB 4 sequences fit; recomputing all 8 of them needs 180 MiB; an adapter alone shrinks nothing here."""
    found = diagnosed()
    assert [c.words for c in found.changes] == [
        "Turn on Gradient accumulation with steps=2",
        "Turn on Gradient checkpointing with every_n_layers=4",
    ]
    assert [(c.needed_bytes, c.saved_bytes) for c in found.changes] == [
        (500 * MIB, 400 * MIB),
        (180 * MIB, 720 * MIB),
    ]
    assert [c.extra_compute for c in found.changes] == pytest.approx([0, 0.333])
    assert found.changes[0].recipe == RECIPE | GradientAccumulation(steps=2)
    assert found.predicted_bytes == 900 * MIB
    assert found.closest is None
    assert all(change.fits for change in found.changes)


def test_a_command_runs_the_change_on_the_same_device_under_the_same_cap():
    command = diagnosed().changes[1].command
    assert command == (
        "python -m workbench run gpt2-tiny --steps 10 --technique gradient_checkpointing=every_n_layers:4 "
        "--device cpu --memory-cap 500MiB"
    )


def test_other_settings_of_what_is_there_already_are_changes_too():
    recipe = RECIPE | GradientAccumulation(steps=2)
    found = diagnosed(recipe=recipe, memory_cap_bytes=300 * MIB)
    assert found.changes[0].words == "Set Gradient accumulation steps to 4 (now 2)"
    assert found.changes[0].recipe == RECIPE | GradientAccumulation(steps=4)
    assert found.changes[0].saved_bytes == 200 * MIB
    assert found.changes[1].recipe == recipe | GradientCheckpointing(every_n_layers=4)


def test_what_other_settings_cost_is_against_the_recipe_as_it_was():
    class Recomputing(Machine):
        def __call__(self, recipe, gpu):
            found = super().__call__(recipe, gpu)
            settings = {t.name: t.settings() for t in recipe.techniques}.get("gradient_accumulation", {"steps": 1})
            return replace(found, flops=1000 * settings["steps"])

    found = diagnosed(Recomputing(), recipe=RECIPE | GradientAccumulation(steps=2), memory_cap_bytes=300 * MIB)
    (change,) = [change for change in found.changes if change.words.startswith("Set")]
    assert change.extra_compute == 1.0
    assert change.saved_bytes == 200 * MIB


def test_where_no_single_change_fits_the_closest_and_a_plan():
    found = diagnosed(memory_cap_bytes=150 * MIB)
    assert found.changes == ()
    assert found.closest.recipe == RECIPE | GradientCheckpointing()
    assert found.closest.fits is False
    words = shlex.split(found.plan_command)
    assert words[3:5] == ["plan", "gpt2-tiny"]
    assert words[-4:] == ["--gpu", "cpu", "--budget", f"{150 * MIB}B"]
    assert f"No single change is enough. The closest:\n\n  {found.closest.words}" in str(found)
    assert found.plan_command in str(found)


def test_below_the_weights_no_prediction_helps_and_it_says_why():
    found = diagnosed(memory_cap_bytes=50 * MIB)
    assert found.changes == ()
    assert "50.0 MiB is below the weights of gpt2-tiny alone" in found.note
    assert found.note in str(found)


def test_a_recipe_that_cannot_be_predicted_still_gets_its_cause():
    def refuse(recipe, gpu):
        raise ConfigurationError("model: the folder is gone.")

    found = diagnosed(machine=refuse)
    assert found.note == "No prediction helps: model: the folder is gone."
    assert "aten.mm.default" in str(found)


def test_predicted_to_fit_but_did_not_says_so_and_looks_for_less():
    found = diagnosed(memory_cap_bytes=1000 * MIB)
    assert "Predicted to fit as it is, with 100 MiB to spare" in found.note
    assert found.changes
    assert all(change.needed_bytes <= 0.9 * 900 * MIB for change in found.changes)


# ---- which device ----


NAMES = [
    ("NVIDIA A10", 22, "a10"),
    ("NVIDIA A10G", 22, "a10"),
    ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
    ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
    ("NVIDIA L40S", 44.4, "l40s"),
    ("Tesla T4", 14.6, "t4"),
    ("NVIDIA GeForce RTX 4060 Ti", 15.6, "rtx4060ti-16gb"),
    ("NVIDIA GeForce RTX 4090", None, "rtx4090"),
    ("Quadro RTX 8000", 44.5, "l40s"),  # unknown: the nearest memory
]


def test_predictions_are_for_the_gpu_of_that_name_or_memory(subtests):
    for device, gigabytes, name in NAMES:
        with subtests.test(device=device):
            machine, size = Machine(), gigabytes and int(gigabytes * GIB)
            diagnosis = diagnosed(machine, device_kind="cuda", device_name=device, device_bytes=size)
            assert {gpu for _, gpu in machine.asked} == {name}
            assert diagnosis.predicted_for == GPUS[name].title


def test_a_gpus_room_is_its_own_and_a_cap_leaves_the_context_out():
    context = GPUS["a10"].context_bytes_estimate
    whole = diagnosed(**A10, memory_cap_bytes=None, device_bytes=500 * MIB + context)
    capped = diagnosed(**A10, memory_cap_bytes=500 * MIB, device_bytes=22 * GIB)
    for found in (whole, capped):
        assert found.changes[0].needed_bytes == 500 * MIB + context
    before = diagnosed(**A10, memory_cap_bytes=500 * MIB, before_bytes=100 * MIB)
    assert before.changes[0].words == "Turn on Gradient accumulation with steps=4"


def test_an_unknown_gpu_of_unknown_memory_is_not_guessed():
    found = diagnosed(device_kind="cuda", device_name="Some Card", memory_cap_bytes=None)
    assert (found.changes, found.plan_command) == ((), "")
    assert found.note.startswith("Nobody knows how much memory there was")


def test_fragmented_the_allocators_settings_are_a_change():
    """With 1000 MiB the recipe's 900 fit; what fails is the one piece of 120 MiB among 130 that are free."""
    facts = {"memory_cap_bytes": 1000 * MIB, "reserved_at_failure_bytes": 610 * MIB, "among": (*AMONG, "allocator")}
    assert RECIPE | Allocator() in [change.recipe for change in diagnosed(**A10, **facts).changes]
    assert RECIPE | Allocator() not in [change.recipe for change in diagnosed(**facts).changes]


# ---- what cannot be diagnosed ----


def test_only_a_record_that_ran_out_of_memory():
    with pytest.raises(ConfigurationError, match="has the status ok; only one that ran out of memory"):
        diagnose(failure(status=Status.OK), predict=Machine())
    with pytest.raises(ConfigurationError, match="there is no technique 'magic'"):
        diagnosed(among=["magic"])


def test_newest_is_the_last_that_ran_out_of_memory(runs_folder):
    with pytest.raises(ConfigurationError, match="no run that ran out of memory on record"):
        newest_out_of_memory()
    first, second = failure(), failure()
    for record in (first, second, replace(failure(), status=Status.OK)):
        record.save()
    assert newest_out_of_memory() == second
    assert newest_out_of_memory(first.id) == first
    with pytest.raises(ConfigurationError, match="no record 'nothing'"):
        newest_out_of_memory("nothing")


def test_of_many_records_only_the_one_is_read(runs_folder, monkeypatch):
    asked = [failure() for _ in range(3)]
    for record in (*asked, *(replace(failure(), status=Status.OK) for _ in range(9))):
        record.save()
    read = []
    monkeypatch.setattr(Record, "read", lambda path, read_one=Record.read: read.append(path.stem) or read_one(path))
    newest_out_of_memory()
    newest_out_of_memory(asked[0].id)
    assert read == [asked[2].id, asked[0].id]


# ---- the command line ----


@pytest.fixture
def with_machine(monkeypatch):
    monkeypatch.setattr(doctor.prediction, "predict", Machine())


def test_the_command_line(with_machine, capsys):
    assert main(["doctor"]) == 2
    assert "error: doctor: there is no run that ran out of memory" in capsys.readouterr().err
    record = failure()
    record.save()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in ("Cause", "(aten.mm.default) asked for", "1. Turn on Gradient accumulation", "workbench.release()"):
        assert part in out
    assert main(["doctor", record.id, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) >= KEYS
    (change, *_) = data["changes"]
    assert set(change) >= CHANGE_KEYS
    assert change["gives_up"] == [f"Gradient accumulation: {GradientAccumulation.costs} (loss: exact)"]
    assert (change["needed_bytes"], change["saved_bytes"]) == (500 * MIB, 400 * MIB)
    assert change["words"] == "Turn on Gradient accumulation with steps=2"
    assert change["command"].endswith(" --device cpu --memory-cap 500MiB")
    assert data["changes"][0]["recipe"] == (RECIPE | GradientAccumulation(steps=2)).to_dict()
    assert data["largest_category"] == "activations"


# ---- where the facts come from ----


def test_the_tracker_notes_what_a_cap_refused():
    tracker = StorageTracker("cpu", cap_bytes=6000)
    tracker.enter_phase(Phase.FORWARD)
    with tracker:
        kept = torch.ones(1000)
        pair = [kept @ kept]
        with pytest.raises(torch.OutOfMemoryError):
            pair.append(kept.exp())
    assert tracker.failed_operation == "aten.exp.default"
    assert tracker.refusal == Refusal(requested_bytes=4000, allocated_bytes=4004)


def test_the_tracker_notes_what_a_device_refused():
    class Full(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "exp" in str(func):
                raise torch.OutOfMemoryError("full")
            return func(*args, **(kwargs or {}))

    tracker = StorageTracker("cpu")
    with pytest.raises(torch.OutOfMemoryError), Full(), tracker:
        torch.ones(2).exp()
    assert (tracker.failed_operation, tracker.refusal) == ("aten.exp.default", Refusal())


# ---- true runs ----


@pytest.mark.usefixtures("predicted_once")
def test_the_error_carries_its_record_and_every_advised_change_runs_where_the_recipe_did_not(recipe):
    short = replace(recipe, steps=2)
    cap = int(0.6 * predict(short, "cpu").peak_allocated_bytes)
    with pytest.raises(OutOfMemoryError) as caught:
        run(short, device="cpu", memory_cap=cap)
    (record,), error = read_all(), caught.value
    assert error.record_id == record.id
    assert record.failed_operation.startswith("aten.")
    needed_bytes = record.requested_bytes + record.allocated_at_failure_bytes
    assert needed_bytes == record.peak_allocated_bytes > record.memory_cap_bytes
    assert record.reserved_at_failure_bytes is None
    assert str(error).endswith("python -m workbench doctor")

    found = diagnose(record, among=["gradient_accumulation", "gradient_checkpointing"])
    assert found.changes
    for change in found.changes:
        done = run(change.recipe, device="cpu", memory_cap=record.memory_cap_bytes)
        assert done.status is Status.OK
        assert done.peak_allocated_bytes == pytest.approx(change.needed_bytes, rel=0.01)


@pytest.mark.parametrize("words", [CUDA_WORDS, OLDER_WORDS])
def test_a_cuda_message_reaches_the_record(recipe, monkeypatch, words):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError(words.removeprefix("OutOfMemoryError: "))

    monkeypatch.setattr(MeteredTrainer, "training_step", refuse)
    with pytest.raises(OutOfMemoryError):
        run(recipe, device="cpu")
    record = read_all()[-1]
    assert (record.requested_bytes, record.reserved_at_failure_bytes) == (96 * MIB, int(21.5 * GIB))
    assert (record.allocated_at_failure_bytes, record.error) == (20 * GIB, words)


# ---- the longest first ----


def batches_of(recipe, monkeypatch, **options):
    from workbench.training.trainer import MeteredTrainer

    seen, whole = [], MeteredTrainer.training_step

    def training_step(self, model, inputs, *args, **kwargs):
        seen.append(inputs["input_ids"].shape[1])
        return whole(self, model, inputs, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MeteredTrainer, "training_step", training_step)
        record = run(recipe, device="cpu", **options)
    return seen, record


def test_every_early_batch_has_the_longest_example(recipe, monkeypatch):
    padded = replace(recipe, steps=4, sequence_length=120) | Padding() | GradientAccumulation(steps=4)
    usual, one = batches_of(replace(padded, steps=3), monkeypatch)
    seen, other = batches_of(padded, monkeypatch, longest_first=True)
    assert seen[:12] == [120] * 12
    assert usual[:12] != [120] * 12
    assert (one.longest_first, other.longest_first) == (False, True)
    assert (one.warnings, other.warnings) == ([], [])
    assert batches_of(padded, monkeypatch, longest_first=True)[1].losses == other.losses


def test_it_comes_again_and_again_and_then_the_others_follow():
    from workbench.training.trainer import LongestFirst

    order = LongestFirst(3, range(8), size=2, until=4)
    assert list(order) == [3, 0, 3, 1, 2, 4, 5, 6]
    assert len(order) == 8


def test_it_says_where_it_changes_nothing(recipe, fine_tuned, subtests):
    for techniques, words in (((), "all examples have 32 tokens"), ((Streaming(),), "a stream")):
        with subtests.test(techniques=techniques):
            short = replace(recipe, steps=2, techniques=techniques)
            record = run(short, device="cpu", longest_first=True)
            assert len(record.warnings) == 1
            assert record.warnings[0].startswith("longest_first: ")
            assert words in record.warnings[0]
            assert record.losses == fine_tuned(short).losses


def test_it_is_not_mixed_with_other_orders(recipe):
    short = replace(recipe, steps=1)
    record = run(short, device="cpu", longest_first=True)
    facts = {**World.find("cpu").facts(), "data_sha256": record.data_sha256}
    assert find_equal(Record.start(short, model=short.model, **facts)) is None
    assert find_equal(Record.start(short, model=short.model, longest_first=True, **facts)) == record
    for options in ({"resume": True}, {"checkpoint_every": 1}):
        with pytest.raises(ConfigurationError, match="longest_first: it changes the order"):
            run(short, device="cpu", longest_first=True, **options)


@pytest.mark.usefixtures("predicted_once")
def test_lora_is_offered_where_states_are_the_largest_part(recipe):
    """With true predictions: of a cap that leaves too little for the optimizer, an adapter is one way out."""
    alone = predict(recipe, "cpu")
    states = alone.maximum_by_category[Category.OPTIMIZER_STATES]
    record = failure(recipe, memory_cap_bytes=alone.peak_allocated_bytes - states // 2)
    (change,) = diagnose(record, among=["lora"]).changes
    assert change.words.startswith("Turn on LoRA")
    assert change.needed_bytes == predict(change.recipe, "cpu").peak_allocated_bytes <= record.memory_cap_bytes
    assert change.numerics == "different"
