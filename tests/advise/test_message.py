"""Out-of-memory messages as people posted them: their numbers, the causes these allow, and what the threads found."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from workbench.advise.causes import RULES
from workbench.advise.message import ErrorMessage, read_message
from workbench.base.errors import ConfigurationError
from workbench.measure.out_of_memory import Kind, two_digits

MIB, GIB = 2**20, 2**30
MESSAGES = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))
READ = {name: read_message(message["text"]) for name, message in MESSAGES.items()}
PAGE = Path(__file__).parents[2] / "docs" / "message.md"
# who says one of these says too much, and of what
KINDS_OF_TOO_MUCH = {
    "a request larger than the card", "eager attention", "logits", "predictions kept by the evaluation",
}  # fmt: skip
OUTCOMES = ("right", "among others", "left open", "wrong")


def gib(number):
    return int(number * GIB)


# ---- the threads ----


@pytest.mark.parametrize("name", MESSAGES)
def test_each_message_has_the_causes_that_are_written_beside_it(name):
    message = READ[name]
    assert [cause.name for cause in message.causes] == MESSAGES[name]["told"]
    assert all(cause.because and cause.cure and cause.lesson for cause in message.causes)
    assert ("The message alone cannot tell" in str(message)) == (not message.causes)


def outcome(message):
    """Of what the doctor says, against what the thread established."""
    told, cause = message["told"], message["cause"]
    named = {*told} | ({"too much"} if KINDS_OF_TOO_MUCH & {*told} else set())
    wanted = {cause} | ({"too much"} if cause in KINDS_OF_TOO_MUCH and len(told) > 1 else set())
    if not told:
        return "left open"
    if not named & wanted:
        return "wrong"
    return "right" if len(told) == 1 else "among others"


def score(*, later):
    return Counter(outcome(row) for row in MESSAGES.values() if row["cause"] and row.get("later", False) == later)


def test_no_cause_is_wrong_and_the_page_has_the_score():
    rows = [message for message in MESSAGES.values() if message["cause"]]
    assert len(rows) >= 40
    assert all(row["by"] and row["address"].startswith("https://") for row in rows)
    for title, later in (("for these the rules were mended", False), ("collected afterwards", True)):
        counts = score(later=later)
        assert counts["wrong"] == 0
        cells = " | ".join(str(counts[name]) for name in OUTCOMES)
        assert f"| {counts.total()}: {title} | {cells} |" in PAGE.read_text(encoding="utf-8")
    assert f"{len(MESSAGES) - len(rows)} more" in PAGE.read_text(encoding="utf-8")


def test_an_outcome_is_wrong_where_no_cause_is_the_threads():
    assert outcome({"told": ["fragmentation"], "cause": "too much"}) == "wrong"
    assert outcome({"told": ["too much"], "cause": "logits"}) == "wrong"
    assert outcome({"told": ["eager attention"], "cause": "too much"}) == "right"
    assert outcome({"told": ["too much", "fragmentation"], "cause": "logits"}) == "among others"


def test_every_rule_has_a_message_that_it_speaks_of():
    for rule in RULES:
        assert [name for name, message in READ.items() if rule(message)], rule.__name__


# ---- the numbers ----


def test_the_numbers_of_a_message_of_torch_2():
    kohya = READ["kohya 2029"]
    assert kohya == ErrorMessage(
        requested_bytes=gib(1.99),
        capacity_bytes=gib(23.56),
        free_bytes=gib(1.23),
        process_bytes=gib(22.27),
        allocated_bytes=gib(14.73),
        unallocated_bytes=gib(6.39),
    )
    assert kohya.reserved_bytes == gib(14.73) + gib(6.39)
    assert kohya.elsewhere_bytes == pytest.approx(1.21 * GIB, abs=MIB)


def test_the_numbers_of_a_message_of_torch_1():
    old = READ["pytorch 40863"]
    assert (old.requested_bytes, old.capacity_bytes, old.free_bytes) == (60 * MIB, gib(11.17), int(12.5 * MIB))
    assert old.unallocated_bytes == pytest.approx((530 - 505.96) * MIB, abs=1)
    older = READ["pytorch 16417"]  # where cached is what later versions call unallocated
    assert older.unallocated_bytes == int(4.68 * MIB)
    assert READ["nanogpt 236"].free_bytes == 0


def test_other_processes_limits_graphs_and_the_host_are_read_too():
    assert READ["keys values 92"].others_bytes == (414 * MIB,) * 4
    assert READ["keys values 92"].process_bytes == gib(37.46)
    assert (READ["therock 2118"].allowed_bytes, READ["therock 2118"].private_bytes) == (gib(1.05), 17 * MIB)
    assert (READ["fooocus 1139"].allowed_bytes, READ["fooocus 1139"].requested_bytes) == (gib(9.07), int(6.25 * MIB))
    assert (READ["vrt 49"].requested_bytes, READ["vrt 49"].kind) == (116813856768, Kind.HOST)
    assert READ["liger 47"].process_bytes is None  # which WSL does not know


def test_the_other_allocators_wording():
    message = read_message(
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 3.47 GiB\nRequested               : 768.00 MiB\nDevice limit            : 4.00 GiB\n"
        "Free (according to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 17179869184.00 GiB"
    )
    assert message == ErrorMessage(768 * MIB, 4 * GIB, 0, allocated_bytes=gib(3.47))
    assert [cause.name for cause in message.causes] == ["too much", "something left from before"]


def test_a_cause_tells_its_arithmetic_in_the_digits_of_the_message():
    (gaps,) = READ["kohya 2029"].causes
    assert gaps.because.startswith("1.23 GiB free and 6.39 GiB of gaps are 7.62 GiB: enough for the 1.99 GiB asked for")
    assert "30% of what PyTorch has reserved" in gaps.because
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in gaps.cure
    full, _ = READ["vllm 7721"].causes
    assert "43.67 GiB of tensors and the 16.00 GiB asked for are 59.67 GiB" in full.because
    assert "Gradient checkpointing" in full.cure
    assert "Windows" in str(READ["meshgen 7"])


def test_a_process_that_the_card_has_no_room_for_beside_this_one_is_this_one():
    assert "The process with 44.34 GiB is this one: beside PyTorch's 44.00 GiB" in str(READ["vllm 7721"])
    assert READ["keys values 92"].note == ""


def test_two_digits_as_pytorch_writes_them():
    assert [two_digits(size) for size in (0, 1024, 1536, 20 * MIB, GIB, 16 * GIB)] == [
        "0 bytes", "1024 bytes", "1.50 KiB", "20.00 MiB", "1024.00 MiB", "16.00 GiB",
    ]  # fmt: skip


# ---- texts ----


def test_in_a_log_the_first_message_is_read_however_it_is_wrapped_and_coloured():
    first, second = MESSAGES["kohya 2029"]["text"], MESSAGES["vllm 7721"]["text"]
    wrapped = "\n[rank0]: ".join(first[start : start + 37] for start in range(0, len(first), 37))
    log = f"train.py, line 3\n\x1b[31m{wrapped}\x1b[0m\nDuring handling, another exception occurred:\n{second}"
    message = read_message(f"{log}\nE: out of memory")
    assert (message.requested_bytes, message.unallocated_bytes, message.messages) == (gib(1.99), gib(6.39), 2)
    assert "(the first of 2 such messages)" in str(message)


ATTENTION = """
  File "transformers/models/gpt2/modeling_gpt2.py", line 415, in forward
    attn_output, attn_weights = attention_interface(
                                ^^^^^^^^^^^^^^^^^^^^
  File "transformers/models/gpt2/modeling_gpt2.py", line 60, in {function}
    {line}
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 14.74 GiB of which
1.10 GiB is free. Including non-PyTorch memory, this process has 13.64 GiB memory in use. Of the allocated memory 13.20
GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.
"""


@pytest.mark.parametrize(
    ("function", "line", "place"),
    [
        ("eager_attention_forward", "attn_weights = attn_weights + causal_mask", "eager attention"),
        ("eager_attention_forward", "attn_output = torch.matmul(attn_weights, value)", "eager attention"),
        ("sdpa_attention_forward", "attn_output = torch.nn.functional.scaled_dot_product_attention(", ""),
        ("forward", "logits = self.lm_head(hidden_states[:, slice_indices, :])", "logits"),
        ("fixed_cross_entropy", "loss = nn.functional.cross_entropy(source, target)", "logits"),
        ("_nested", "return torch_pad_and_concatenate(tensors, new)", "predictions kept by the evaluation"),
    ],
)
def test_the_line_that_asked_says_what_it_makes(function, line, place):
    text = ATTENTION.format(function=function, line=line)
    message = read_message(text)
    assert message.place == place
    assert [cause.name for cause in message.causes][:1] == [place or "too much"]
    small = read_message(text.replace("allocate 3.00 GiB", "allocate 20.00 MiB"))
    assert place not in [cause.name for cause in small.causes]  # the last straw, whoever lays it


def test_a_line_beside_the_one_that_failed_says_nothing():
    text = "     86     logits = self.lm_head(hidden)\n---> 88     return self.transform(hidden)\n"
    assert read_message(text + MESSAGES["kohya 2029"]["text"]).place == ""


@pytest.mark.parametrize(
    "text",
    [
        "Loading checkpoint shards\nKilled",
        "./train.sh: line 3: 12345 Killed                  python train.py",
        "zsh: killed     python train.py",
        "exitcode: -9 (pid: 27) of binary: python\nSignal 9 (SIGKILL) received by PID 27",
        "Your session crashed after using all available RAM.",
        "Your notebook tried to allocate more memory than is available. It has restarted.",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with shape (2, 3)",
        "OSError: [WinError 1455] The paging file is too small for this operation to complete.",
    ],
)
def test_of_the_computers_own_memory(text):
    assert [cause.name for cause in read_message(text).causes] == ["the computer's own memory"]


@pytest.mark.parametrize(
    "text",
    [
        "ZeroDivisionError: division by zero",
        "[ERROR] [launch.py:434:sigkill_handler] ['python', 'train.py'] exits with return code = 1",
        "exit code: 1370",
        "",
    ],
)
def test_a_text_without_a_message_is_refused(text):
    with pytest.raises(ConfigurationError, match="no out-of-memory message in the text"):
        read_message(text)


def test_the_allocators_message_without_its_numbers_is_not_cudas_own():
    cut = read_message("    output = eval_loop(\ntorch.cuda.OutOfMemoryError: CUDA out of memory.")
    assert (cut.kind, cut.messages, cut.causes) == (Kind.CUT, 1, ())
    assert "give the whole message" in str(cut)
    whole = "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert read_message(whole).kind is Kind.CARD
    assert read_message("RuntimeError: CUDA error: out of memory").kind is Kind.CUDA


def test_a_message_that_says_little_names_no_cause():
    little = read_message("XPU out of memory. Tried to allocate 2.00 GiB.")
    assert little == ErrorMessage(requested_bytes=2 * GIB)
    assert "The whole message has five numbers" in str(little)
