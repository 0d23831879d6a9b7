"""The CUDA path without a GPU: every technique on two emulated cards, and what becomes of memory when it ends.

PyTorch's own CUDA allocator keeps the books there, so memory is asserted to the byte; values do not exist. What a GPU
must show beside it stands in test_gpu.py, which an emulated one runs too.
"""

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from every_step import EveryStep
from pairs import pairs
from torch.utils._triton import has_triton_package

from workbench.advise.doctor import diagnose
from workbench.base.categories import Category, Phase
from workbench.base.errors import OutOfMemoryError, UnavailableError
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator.call import call_on
from workbench.journal.record import Status, read_all
from workbench.techniques import REGISTRY, ActivationOffloading, Dora, Lora, Padding, parse_technique
from workbench.training.run import run

pytestmark = pytest.mark.usefixtures("emulator")
MIB = 2**20
CARDS = ["t4", "h100"]
TECHNIQUES = [
    "activation_offloading", "activation_offloading=to:disk",
    "allocator",
    "attention",
    "batch_size",
    "chunked_cross_entropy",
    "data_loading", "data_loading=memory_mapped:false",
    "dora",
    "fused_gelu",
    "gradient_accumulation",
    "gradient_checkpointing", "gradient_checkpointing=use_reentrant:true", "gradient_checkpointing=offload:true",
    "ia3",
    "lora", "lora=targets:c_attn+c_fc+c_proj,dropout:0.1",
    "mixed_precision=dtype:bf16", "mixed_precision=dtype:fp16",
    "optimizer=kind:adamw_8bit", "optimizer=kind:adafactor", "optimizer=kind:sgd_momentum",
    "optimizer=kind:adamw_4bit_stochastic", "optimizer=kind:adamw_paged", "optimizer=kind:adamw_8bit_paged",
    "optimizer_offloading", "optimizer_offloading=to:disk",
    "padding", "padding=group_by_length:true",
    "prefix_tuning",
    "prompt_tuning",
    "pure_bf16",
    "qlora", "qlora=format:fp4,double_quantization:false", "qlora=compute:bfloat16",
    "selective_checkpointing",
    "sequence_length=tokens:48",
    "step_in_backward",
    "streaming",
    "torch_compile",
]  # fmt: skip
NEED_BF16 = ["mixed_precision=dtype:bf16", "pure_bf16", "qlora=compute:bfloat16"]


@pytest.fixture(scope="module")
def larger(recipe):
    """Large enough for the activations to matter beside the allocator's rounding."""
    return replace(recipe, effective_batch_size=16, sequence_length=96, steps=2)


@pytest.fixture(scope="module")
def on_card(tmp_path_factory):
    """`run` on a card; the same recipe once, however many tests look at it."""
    folder, done = tmp_path_factory.mktemp("emulated-runs"), {}

    def once(recipe, card):
        if (recipe, card) not in done:
            done[recipe, card] = run(recipe, device=f"emulated:{card}", folder=folder)
        return done[recipe, card]

    return once


def memory(record):
    return record.peak_allocated_bytes, record.peak_reserved_bytes, record.by_phase, record.by_category


# ---- techniques ----


@pytest.mark.parametrize("card", CARDS)
def test_a_technique_lowers_what_it_attacks(larger, on_card, card, subtests):
    assert {text.partition("=")[0] for text in TECHNIQUES} == set(REGISTRY)  # none is forgotten
    for text in TECHNIQUES:
        if text == "torch_compile" and not has_triton_package():
            continue  # its kernels are Triton's, which is not installed
        if card == "t4" and text in NEED_BF16:
            continue
        technique = parse_technique(text)
        with subtests.test(technique=text):
            plain, record = on_card(larger, card), on_card(larger | technique, card)
            assert (record.status, record.memory_source) == (Status.OK, f"emulated:{card}")
            assert record.before_bytes == 0  # nothing of the runs before it has stayed in the process
            assert sum(record.by_category.values()) == record.peak_allocated_bytes == max(record.by_phase.values())
            assert min(record.by_category.values()) >= 0
            assert record.peak_reserved_bytes >= record.peak_allocated_bytes
            for category in technique.attacks:
                assert record.maximum_by_category[category] < plain.maximum_by_category[category], category


@pytest.mark.parametrize("card", CARDS)
def test_nothing_is_said_of_values_and_speed(larger, on_card, card):
    record = on_card(larger, card)
    assert (record.losses, record.held_out_loss, record.held_out_loss_before) == ([], None, None)
    assert (record.timed_steps, record.step_time_s, record.tokens_per_s) == (0, None, None)
    assert "emulated GPU: nothing was computed" in record.warnings[0]
    assert record.device_name == f"{gpu(card).title} (emulated)"


def test_what_is_offloaded_is_accounted_for(larger, on_card):
    moved = on_card(larger | parse_technique("activation_offloading"), "h100")
    kept = on_card(larger, "h100").maximum_by_category
    activations, logits = kept[Category.ACTIVATIONS], kept[Category.LOGITS_AND_LOSS]
    assert 0.9 * activations < moved.peak_host_bytes <= activations + logits  # some of which wait there too
    states = on_card(larger | parse_technique("optimizer_offloading=to:disk"), "h100")
    assert states.peak_disk_bytes == 8 * states.parameters


def test_padding_is_seen_in_the_batches_and_the_longest_come_first(larger, runs_folder):
    record = run(larger | Padding(), device="emulated:t4", longest_first=True, folder=runs_folder)
    assert record.status is Status.OK
    assert record.tokens_seen > 0
    assert record.padding_tokens is None  # the masks are on the card, and read as zero


@pytest.mark.parametrize("save", ["merged", "adapter"])
def test_a_model_is_saved_and_no_text_is_waited_for(larger, runs_folder, save):
    record = run(larger | Lora(), device="emulated:t4", save=save, sample_tokens=20, folder=runs_folder)
    assert (record.status, record.text_before, record.text_after) == (Status.OK, "", "")
    assert list((runs_folder / record.id / "model").glob("*.safetensors"))


def test_pairs_are_measured_there(larger, runs_folder):
    table = pairs(larger, ["gradient_accumulation", "lora", "qlora"], device="emulated:h100", folder=runs_folder)
    assert table["verdict"].tolist() == ["emulated"] * 5 + ["refused"]
    assert (table["saved_fraction"].dropna() > 0).all()


def refusals(recipes, folder):
    """Of each, in the process with the card, as all functions below that are not tests."""
    messages = []
    for recipe in recipes:
        with pytest.raises(UnavailableError) as caught:
            run(recipe, device="cuda", folder=folder)
        messages.append(str(caught.value))
    return messages


def test_what_needs_bf16_is_refused_on_a_card_without_it(larger, runs_folder):
    recipes = [larger | parse_technique(text) for text in NEED_BF16]
    for text, refusal in zip(NEED_BF16, call_on(gpu("t4"), refusals, recipes, runs_folder), strict=True):
        assert refusal.startswith(f"{text} needs compute capability 8.0 or newer.")


# ---- one run after another ----


def run_twice(recipe, folder):
    return [run(recipe, device="cuda", folder=folder) for _ in range(2)]


@pytest.mark.parametrize("card", CARDS)
def test_a_second_run_measures_the_same(larger, on_card, runs_folder, card):
    first, second = call_on(gpu(card), run_twice, larger, runs_folder)
    assert memory(first) == memory(second) == memory(on_card(larger, card))


def test_nothing_stays_of_what_no_backward_pass_visits(larger, runs_folder):
    """DoRA's norm is a constant of the gradient; with hooks on what is saved, its graph once kept itself alive."""
    first, second = call_on(gpu("h100"), run_twice, larger | Dora() | ActivationOffloading(), runs_folder)
    assert first.before_bytes == second.before_bytes == 0


def run_out_and_go_on(recipe, folder, cap):
    """Memory in use before, after a run that fails under a cap, and what the fraction is then; and another run."""
    before = torch.cuda.memory_allocated()
    with pytest.raises(OutOfMemoryError):
        run(recipe, device="cuda", memory_cap=cap, folder=folder)
    after, fraction = torch.cuda.memory_allocated(), torch.cuda.get_per_process_memory_fraction()
    return before, after, fraction, run(recipe, device="cuda", folder=folder)


@pytest.mark.parametrize("card", CARDS)
def test_running_out_gives_the_memory_back_and_lifts_the_cap(larger, on_card, runs_folder, card):
    plain = on_card(larger, card)
    cap = int(0.7 * plain.peak_reserved_bytes)
    before, after, fraction, record = call_on(gpu(card), run_out_and_go_on, larger, runs_folder, cap)
    assert after <= before
    assert fraction == 1.0
    assert memory(record) == memory(plain)


@pytest.mark.parametrize("card", CARDS)
def test_under_a_cap_the_record_tells_where_and_how_much(larger, on_card, runs_folder, card):
    cap = int(0.7 * on_card(larger, card).peak_reserved_bytes)
    with pytest.raises(OutOfMemoryError, match="did not fit into the memory cap of"):
        run(larger, device=f"emulated:{card}", memory_cap=cap, folder=runs_folder)
    (record,) = read_all(runs_folder)
    assert (record.status, record.memory_cap_bytes) == (Status.OOM, cap)
    assert record.memory_source == f"emulated:{card}"
    assert record.peak_phase in set(Phase)
    assert record.failed_operation
    assert record.allocated_at_failure_bytes <= record.reserved_at_failure_bytes <= cap
    assert record.reserved_at_failure_bytes + record.requested_bytes > cap
    assert sum(record.by_category.values()) == record.peak_allocated_bytes <= cap


def test_a_card_that_is_too_small_is_told_with_what_would_fit_on_it(larger, runs_folder):
    """Logits of 3.8 GiB, three times; the doctor proposes what runs on the same emulated card."""
    huge = replace(larger, corpus="shakespeare", effective_batch_size=2560)
    with pytest.raises(OutOfMemoryError, match=r"did not fit into the memory of NVIDIA T4 \(emulated\)"):
        run(huge, device="emulated:t4", folder=runs_folder)
    (record,) = read_all(runs_folder)
    assert record.requested_bytes > 2**30
    diagnosis = diagnose(record, among=["gradient_checkpointing"])
    assert diagnosis.room_bytes == gpu("t4").memory_bytes
    assert diagnosis.changes
    assert all("--device emulated:t4" in change.command for change in diagnosis.changes)


def run_interrupted_and_resume(recipe, folder):
    """Stopped at the end of the fourth of six steps, before its checkpoint; there is one of the second."""
    steps = []

    def stop():
        steps.append(0)
        if len(steps) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe, device="cuda", checkpoint_every=2, callbacks=[EveryStep(stop)], folder=folder)
    return run(recipe, device="cuda", resume=True, callbacks=[EveryStep()], folder=folder)


@pytest.mark.parametrize("techniques", ["", "optimizer=kind:adamw_8bit", "lora"])
def test_a_run_is_resumed_on_the_card(larger, runs_folder, techniques):
    recipe = replace(larger, steps=6, techniques=tuple(map(parse_technique, techniques.split())))
    record = call_on(gpu("h100"), run_interrupted_and_resume, recipe, runs_folder)
    assert (record.status, record.steps_done, record.resumed_at_steps) == (Status.OK, 6, [2])
    assert record.memory_source == "emulated:h100"


@pytest.mark.xdist_group("the tests of a GPU")  # a process of its own: it may run beside the others
def test_the_tests_of_a_gpu_pass_on_an_emulated_one():
    here = Path(__file__).parent
    emulated = [sys.executable, "-m", "workbench", "emulate", "--no-history", "--gpu", "t4", "--", "python"]
    tests = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", here / "test_gpu.py", here / "techniques"]
    done = subprocess.run([*emulated, *tests], cwd=here.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


# ---- the host ----


def offload_more_than_there_is(gigabytes):
    """What this process takes of the machine, in MiB, for so much pinned memory; and bytes from its two ends."""
    data = torch.empty(gigabytes * 2**30, dtype=torch.uint8, device="cuda")
    waiting = torch.empty(5 + len(data), dtype=torch.uint8, pin_memory=True)
    waiting[:9], waiting[-9:] = 1, 1
    waiting[5:].copy_(data)
    ends = waiting[:9].tolist(), waiting[-9:].tolist()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, ends


def test_what_waits_in_pinned_memory_takes_none_of_this_machine():
    taken, ends = call_on(gpu("h100"), offload_more_than_there_is, 64)
    assert taken < 3000
    assert ends == ([1] * 5 + [0] * 4, [0] * 9)
