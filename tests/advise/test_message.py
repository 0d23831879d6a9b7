"""PyTorch's out-of-memory messages, as people posted them: their numbers, and the causes that these allow."""

import io
import json
import tomllib
from pathlib import Path

import pytest

from workbench.__main__ import main
from workbench.advise.message import RULES, ErrorMessage, read_message, two_digits
from workbench.base.errors import ConfigurationError

MIB, GIB = 2**20, 2**30
MESSAGES = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))
READ = {name: read_message(message["text"]) for name, message in MESSAGES.items()}


def gib(number):
    return int(number * GIB)


def test_the_numbers_of_a_message_of_torch_2():
    assert READ["gaps"] == ErrorMessage(
        requested_bytes=gib(1.99),
        capacity_bytes=gib(23.56),
        free_bytes=gib(1.23),
        process_bytes=gib(22.27),
        allocated_bytes=gib(14.73),
        unallocated_bytes=gib(6.39),
    )
    assert READ["gaps"].reserved_bytes == gib(14.73) + gib(6.39)
    assert READ["gaps"].elsewhere_bytes == pytest.approx(1.21 * GIB, abs=MIB)


def test_the_numbers_of_a_message_of_torch_1():
    old = READ["others, old"]
    assert (old.requested_bytes, old.capacity_bytes, old.free_bytes) == (60 * MIB, gib(11.17), int(12.5 * MIB))
    assert old.unallocated_bytes == pytest.approx((530 - 505.96) * MIB, abs=1)
    older = READ["free, old"]  # where cached is what later versions call unallocated
    assert older.unallocated_bytes == int(4.68 * MIB)
    assert READ["checkpoint"].free_bytes == 0


def test_other_processes_limits_and_graphs_are_read_too():
    assert READ["others"].others_bytes == (414 * MIB,) * 4
    assert READ["others"].process_bytes == gib(37.46)
    assert (READ["cap"].allowed_bytes, READ["cap"].private_bytes) == (gib(1.05), 17 * MIB)
    assert READ["cap"].room_bytes < READ["cap"].free_bytes
    assert (READ["mac"].allowed_bytes, READ["mac"].requested_bytes) == (gib(9.07), int(6.25 * MIB))
    assert (READ["host"].requested_bytes, READ["host"].host) == (128 * GIB, True)


@pytest.mark.parametrize("name", MESSAGES)
def test_the_causes_are_those_that_the_numbers_allow(name):
    causes = READ[name].causes
    assert {cause.name for cause in causes} == {*MESSAGES[name]["causes"]}
    assert all(cause.because and cause.cure and cause.lesson for cause in causes)
    assert len(READ[name].cause.splitlines()) == (1 if len(causes) == 1 else 1 + len(causes))


def test_every_rule_has_a_message_that_it_speaks_of():
    for rule in RULES:
        assert [name for name, message in READ.items() if rule(message)], rule.__name__


def test_a_cause_tells_its_arithmetic_in_the_digits_of_the_message():
    (gaps,) = READ["gaps"].causes
    assert gaps.because.startswith("1.23 GiB free and 6.39 GiB of gaps are 7.62 GiB: enough for the 1.99 GiB asked for")
    assert "30% of what PyTorch has reserved" in gaps.because
    assert "allocator" in gaps.cure
    full = READ["full"].cause
    assert "43.67 GiB of tensors and the 16.00 GiB asked for are 59.67 GiB, more than all of 44.53 GiB." in full
    assert full.startswith("Possible, as far as the numbers tell:\n1. too much")
    assert "12.50 MiB" not in READ["others, old"].cause
    assert "Windows" in READ["windows"].cause


def test_numbers_of_a_process_that_wsl_does_not_know_are_none():
    text = MESSAGES["gaps"]["text"].replace("22.27 GiB memory in use", "17179869184.00 GiB memory in use")
    assert read_message(text).process_bytes is None
    assert {cause.name for cause in read_message(text).causes} == {"fragmentation"}


def test_in_a_log_the_first_message_is_read_however_it_is_wrapped():
    first, second = MESSAGES["gaps"]["text"], MESSAGES["full"]["text"]
    wrapped = first.replace(" ", "\n   ")
    log = f"train.py, line 3\n{wrapped}\nDuring handling, another exception occurred:\n{second}\nE: out of memory"
    assert read_message(log) == READ["gaps"]


def test_a_message_that_says_little_names_no_cause():
    little = read_message("XPU out of memory. Tried to allocate 2.00 GiB.")
    assert little == ErrorMessage(requested_bytes=2 * GIB)
    assert little.cause == "The numbers that the message has name no cause."
    assert little.cause in str(little)


def test_a_text_without_a_message_is_refused():
    with pytest.raises(ConfigurationError, match="no out-of-memory message in the text"):
        read_message("ZeroDivisionError: division by zero")


def test_two_digits_as_pytorch_writes_them():
    assert [two_digits(size) for size in (0, 1024, 1536, 20 * MIB, GIB, 16 * GIB)] == [
        "0 bytes", "1024 bytes", "1.50 KiB", "20.00 MiB", "1024.00 MiB", "16.00 GiB",
    ]  # fmt: skip


# ---- the command line ----


def test_the_doctor_reads_a_file_and_standard_input(tmp_path, monkeypatch, capsys):
    log = tmp_path / "crash.log"
    log.write_bytes(MESSAGES["gaps"]["text"].encode() + b"\xff")
    assert main(["doctor", str(log)]) == 0
    out = capsys.readouterr().out
    for part in (
        "gaps (reserved by PyTorch, unallocated)",
        "6.39 GiB",
        "fragmentation",
        "Lesson: 15_out_of_memory",
    ):
        assert part in out
    monkeypatch.setattr("sys.stdin", io.StringIO(MESSAGES["cap"]["text"]))
    assert main(["doctor", "-", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["allowed_bytes"] == gib(1.05)
    assert [cause["name"] for cause in data["causes"]] == ["a cap"]


def test_the_doctor_says_what_a_file_lacks(tmp_path, capsys):
    log = tmp_path / "crash.log"
    log.write_text("nothing")
    assert main(["doctor", str(log)]) == 2
    assert "error: message: there is no out-of-memory message" in capsys.readouterr().err


# simplescaling/s1 #106
NEARLY_FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.46 GiB. GPU 0 has a total capacity of 139.72 GiB "
    "of which 3.02 GiB is free. Process 3373672 has 136.69 GiB memory in use. Of the allocated memory 119.21 GiB is "
    "allocated by PyTorch, and 14.04 GiB is reserved by PyTorch but unallocated."
)


def test_what_would_have_fitted_in_one_piece_is_not_said_not_to_fit():
    message = read_message(NEARLY_FULL)
    because = {cause.name: cause.because for cause in message.causes}
    assert "do not fit" not in because["too much"]
    assert "91% of 139.72 GiB. In one piece it would have fitted" in because["too much"]
    assert "3.02 GiB free and 14.04 GiB of gaps are 17.06 GiB" in because["fragmentation"]


def test_a_process_that_the_card_has_no_room_for_beside_this_one_is_this_one():
    told = "The process with 136.69 GiB is this one: beside PyTorch's 133.25 GiB"
    assert told in str(read_message(NEARLY_FULL))
    assert told in read_message(NEARLY_FULL)._repr_html_()
    small = NEARLY_FULL.replace("119.21", "1.21").replace("14.04", "0.04")
    assert read_message(small).note == ""
