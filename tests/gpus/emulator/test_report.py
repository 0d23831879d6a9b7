"""What is said of an emulation, whose numbers are made up here."""

import json
from pathlib import Path

import pytest

from workbench.gpus.catalogue import GPUS, gpu
from workbench.gpus.emulator.inside import _emulated_history as history
from workbench.gpus.emulator.report import NOT_MEASURED, TIMED_OUT, Emulation, banner

MIB, GIB = 2**20, 2**30


def device(index=0, reserved=20 * GIB, refusals=0, in_history=15 * GIB):
    return {
        "index": index, "peak_allocated_bytes": 15 * GIB, "peak_reserved_bytes": reserved, "refusals": refusals,
        "peak_in_history_bytes": in_history, "lines": [{"bytes": 9 * GIB, "line": "train.py:7 in step"}],
    }  # fmt: skip


def process(rank, *devices):
    return {"rank": rank, "process": 100 + rank, "peak_host_bytes": 512 * MIB, "devices": list(devices)}


def emulation(*processes, exit_status=0, **changes):
    return Emulation(gpu("a100-40gb"), ("python", "train.py"), exit_status, processes, **changes)


def test_the_banner_names_the_card_and_says_that_nothing_is_computed():
    text = banner(gpu("t4"))
    assert text.startswith("emulated GPU: NVIDIA T4, 14.6 GiB. PyTorch's own allocator keeps the books; values are not")
    assert "times, speeds and MFU that the program prints are not the card's" in text
    assert text.endswith(f"{NOT_MEASURED}.")


def test_a_program_that_fits_is_told_with_its_peak_its_holders_and_the_cards_that_have_room():
    lines = str(emulation(process(0, device()))).splitlines()
    title = gpu("a100-40gb").title
    assert lines[0].startswith(f"emulated {title} (")
    assert lines[0].endswith(f"GiB): {NOT_MEASURED}")
    assert lines[1] == "  device 0: peak 15.0 GiB allocated, 20.0 GiB reserved; host 512 MiB"
    assert lines[2] == "  who holds most at the peak, by the innermost line of the program"
    assert lines[3].split() == ["9.0", "GiB", "train.py:7", "in", "step"]
    assert lines[4] == "  needs 20.0 GiB and 491 MiB to 553 MiB of context, by the kernels of this card"
    assert lines[5].startswith("  fits on          ")
    assert "a100-40gb, " in lines[5]
    assert lines[6].startswith("  does not fit on  t4, ")
    assert len(lines) == 7


def test_a_card_has_room_for_what_was_reserved_and_its_context_to_the_byte():
    t4 = gpu("t4")
    room = t4.memory_bytes - t4.context_bytes_estimate
    assert emulation(process(0, device(reserved=room))).fits["t4"]
    assert not emulation(process(0, device(reserved=room + 1))).fits["t4"]
    assert set(emulation(process(0, device())).fits) == set(GPUS)


def test_where_the_context_is_a_range_it_is_told_and_a_card_must_have_room_for_the_most_of_it():
    a100 = gpu("a100-40gb")
    low, high = a100.context_bytes
    assert low < high
    beside_the_least = emulation(process(0, device(reserved=a100.memory_bytes - low)))
    beside_the_most = emulation(process(0, device(reserved=a100.memory_bytes - high)))
    assert (beside_the_least.fits[a100.name], beside_the_most.fits[a100.name]) == (False, True)
    assert "491 MiB to 553 MiB of context" in str(beside_the_most)
    assert beside_the_most.to_dict()["context_bytes"] == [low, high]
    known_by_guess = Emulation(gpu("t4"), ("python", "train.py"), 0, (process(0, device()),))
    assert "and about 512 MiB of context" in str(known_by_guess)


def test_a_verdict_that_hangs_on_the_context_is_close():
    """Of an A100 a range is known; of a T4 none, so that what other cards took decides."""
    a100, t4 = gpu("a100-40gb"), gpu("t4")
    low, high = a100.context_bytes
    between = emulation(process(0, device(reserved=a100.memory_bytes - (low + high) // 2)))
    assert (between.fits[a100.name], between.close) == (False, [a100.name])
    assert "a100-40gb (close)" in str(between).split("does not fit on")[1]
    assert "  close            CUDA's context decides" in str(between)
    assert emulation(process(0, device(reserved=a100.memory_bytes - high))).close == []
    assert emulation(process(0, device(reserved=a100.memory_bytes - low + 1))).close == []

    fits_by_guess = emulation(process(0, device(reserved=t4.memory_bytes - 600 * MIB)))
    assert fits_by_guess.fits["t4"]
    assert "t4" in fits_by_guess.to_dict()["close"]
    assert "t4 (close)" in str(fits_by_guess).split("does not fit on")[0]
    assert emulation(process(0, device(reserved=t4.memory_bytes - 600 * MIB)), without_kernels=("t4",)).close == []


def test_the_rank_that_reserves_most_decides():
    both = emulation(process(0, device()), process(1, device(index=1, reserved=60 * GIB)))
    assert both.peak_reserved_bytes == 60 * GIB
    assert [reported["index"] for reported in both.devices] == [1, 0]
    assert "  rank 1, device 1: peak 15.0 GiB allocated, 60.0 GiB reserved; host" in str(both)
    assert not both.fits["a100-40gb"]


def test_where_it_ran_out_of_memory_nothing_is_known_of_other_cards():
    refused = emulation(process(0, device(refusals=1)), exit_status=1)
    assert refused.fits == {}
    assert "20.0 GiB reserved; ran out of memory; host" in str(refused)
    assert refused.lower_bound == ["it ran out of memory, so that nobody knows what it would have taken next"]
    assert emulation(process(0, device(refusals=1)), exit_status=0).lower_bound == []
    assert "it needs more than that, and how much is not known. Run it with enough, such as" in str(refused)


def test_what_is_missing_or_was_cut_short_is_said(tmp_path):
    assert "  no process used the GPU" in str(emulation())
    killed = str(emulation(processes_without_report=2))
    assert "  2 processes that used the GPU were killed and left no report" in killed
    assert "no process used the GPU" not in killed
    short = str(emulation(process(0, device(in_history=10 * GIB))))
    assert "(of the history's end, 10.0 GiB; the peak was before)" in short
    stuck = str(emulation(process(0, device()), stuck_at="line 4 in wait\nline 5 in <module>"))
    assert "perhaps waiting for a value that is never computed:\n    line 4 in wait\n    line 5 in <module>" in stuck
    path = Path("step.pickle")
    assert "  snapshot  step.pickle (open it at https" in str(emulation(snapshots=(path,)))


@pytest.mark.parametrize("stuck_at", ["", "line 4 in wait"])
def test_as_json_bytes_are_integers_and_nothing_is_left_out(stuck_at):
    found = emulation(
        process(0, device()),
        exit_status=TIMED_OUT,
        stuck_at=stuck_at,
        snapshots=(Path("a"),),
        processes_without_report=1,
    )
    facts = found.to_dict()
    assert json.loads(json.dumps(facts)) == facts
    assert facts == {
        "memory_source": "emulated:a100-40gb",
        "measured_on_a_gpu": False,
        "gpu": "a100-40gb",
        "capacity_bytes": gpu("a100-40gb").memory_bytes,
        "context_bytes_estimate": gpu("a100-40gb").context_bytes_estimate,
        "context_bytes": list(gpu("a100-40gb").context_bytes),
        "command": ["python", "train.py"],
        "exit_status": 124,
        "timed_out": bool(stuck_at),
        "stuck_at": stuck_at,
        "peak_reserved_bytes": 20 * GIB,
        "reserved_at_once_bytes": 20 * GIB,
        "need_bytes": 20 * GIB + 553 * MIB,
        "processes_at_once": 1,
        "lower_bound": found.lower_bound,
        "host_was_full": "",
        "without_kernels": [],
        "processes": [process(0, device())],
        "processes_without_report": 1,
        "fits": found.fits,
        "close": found.close,
        "not_measured": [],
        "sizes_by_values": [],
        "snapshots": ["a"],
    }


def test_what_nobody_has_measured_makes_it_a_lower_bound():
    known = process(0, device())
    both = emulation(known, {**process(1, device(index=1)), "not_measured": ["cuDNN's workspace of convolutions"]})
    assert both.not_measured == ["cuDNN's workspace of convolutions"]
    text = str(both)
    assert "needs at least 20.0 GiB" in text
    assert "may fit on" in text
    assert text.endswith("a lower bound: nobody has measured cuDNN's workspace of convolutions")
    assert "at least" not in str(emulation(known))


def test_processes_that_are_on_a_card_at_once_need_the_sum_and_each_a_context():
    """Two ranks of a script that takes device 0, and a third process that began when they had ended."""
    first = {**process(0, device(reserved=4 * GIB)), "began": 1.0, "ended": 9.0}
    second = {**process(1, device(reserved=5 * GIB)), "began": 2.0, "ended": 8.0}
    later = {**process(2, device(reserved=8 * GIB)), "began": 10.0, "ended": 11.0}
    both = emulation(first, second, later)
    assert both.reserved_at_once_bytes == 9 * GIB
    assert both.context_bytes == (2 * 491 * MIB, 2 * 553 * MIB)
    assert both.need_bytes == 9 * GIB + 2 * 553 * MIB
    assert both.fits["rtx3070"] is False
    assert "  device 0 is shared: ranks 0, 1 are on it at once, so their peaks are added" in str(both)
    assert "needs 9.0 GiB and 982 MiB to 1.1 GiB of context" in str(both)
    elsewhere = {**second, "devices": [{**device(reserved=5 * GIB), "card": 1}]}  # by CUDA_VISIBLE_DEVICES
    assert emulation(first, elsewhere).reserved_at_once_bytes == 5 * GIB
    assert "is shared" not in str(emulation(first, elsewhere))


def test_who_was_killed_or_ended_early_leaves_a_lower_bound():
    killed = emulation({**process(0, device()), "was_killed": True}, exit_status=137)
    assert killed.lower_bound == ["what a killed process would have taken later is not known"]
    assert "needs at least 20.0 GiB" in str(killed)
    full = emulation(process(0, device()), exit_status=137, host_was_full="ended, since the machine was full")
    assert full.lower_bound == ["it was ended before it was over"]
    assert "  ended, since the machine was full" in str(full)


def test_a_card_that_pytorch_has_no_kernels_for_is_not_said_to_fit():
    found = emulation(process(0, device(reserved=GIB)), without_kernels=("rtx5090", "v100-32gb"))
    assert not found.fits["rtx5090"]
    assert not found.fits["v100-32gb"]
    assert "  no kernels for   rtx5090 in this PyTorch" in str(found)
    assert "v100" not in str(found)  # its tables are those of the common cards; all are in `fits`


def test_no_line_of_ours_or_of_a_compiler_stands_for_one_of_the_program():
    ours = {"filename": "/x/workbench/gpus/emulator/inside/_emulated_sizes.py", "line": 9, "name": "read_mask"}
    library = {"filename": "/x/site-packages/transformers/loading.py", "line": 5, "name": "load"}
    program = {"filename": "/home/train.py", "line": 3, "name": "main"}
    compiled = {"filename": "/tmp/torchinductor_root/ab/cab.py", "line": 40, "name": "call"}
    assert history.program_line([ours, library, program]) == "/home/train.py:3 in main"
    assert history.program_line([ours, library]) == "/x/site-packages/transformers/loading.py:5 in load"
    assert history.program_line([compiled, library]) == "what torch.compile made of the backward pass"
    elsewhere = compiled | {"filename": "/cache/sg/csg2s7qmtp5grx7kslpmyltriz3qfpfaz32vyl7iyguly4sjkkzh.py"}
    assert history.program_line([elsewhere, program]) == "/home/train.py:3 in main"
    assert history.program_line([elsewhere, library]) == "what torch.compile made of the backward pass"
