"""What a terminal shows is text, whatever a label, a model, an error or an argument holds; and every end has a code."""

import io
import os
import subprocess
import sys
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.__main__ import main
from workbench.base.categories import Category
from workbench.base.command_line import print_visibly
from workbench.base.errors import ConfigurationError, OutOfMemoryError, visible
from workbench.journal.record import Record, Status
from workbench.recipe import Recipe
from workbench.techniques import Lora

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\u202egnp.exe\u2066\x00"
SHOWN = r"\x1b[31mred\x1b]0;title\x07\x9b2J\r\u202egnp.exe\u2066\x00"


@given(st.text(st.characters()))
def test_no_text_has_a_control_left(text):
    left = visible(text)
    assert not {unicodedata.category(c) for c in left if c not in "\n\t"} & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(c) for c in left} & {
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
        "PDI",
    }
    assert visible(left) == left
    left.encode()


def test_words_of_any_language_stay(subtests):
    for text in ("", "a\tb\n", "Zürich → 5 × 3 ± 1", "中文\u3000空格", "👩‍👩‍👧", "می‌خواهم", "שלום", "e\u0301"):
        with subtests.test(text):
            assert visible(text) == text


def test_an_error_says_what_it_holds_without_doing_it():
    for error in (ConfigurationError, OutOfMemoryError):
        assert str(error(f"corpus: {HOSTILE} is not there.")) == f"corpus: {SHOWN} is not there."


@pytest.fixture
def hostile_records(runs_folder):
    """A baseline, a run and a failed run, all of whose texts are hostile."""
    facts = {
        "status": Status.OK, "model": HOSTILE, "device_name": HOSTILE, "memory_source": "cpu-tracker",
        "learning_rate": 1e-3, "peak_allocated_bytes": 7, "by_category": dict.fromkeys(map(str, Category), 1),
        "trainable_parameters": 1, "held_out_loss": 2.0, "tokens_per_s": 5.0, "peak_phase": "backward",
    }  # fmt: skip
    base = replace(Record.start(Recipe(model="gpt2-tiny")), **facts)
    lora = replace(Record.start(Recipe(model="gpt2-tiny") | Lora()), **facts)
    failed = replace(base, id="failed", status=Status.FAILED, label=f"failed {HOSTILE}", error=HOSTILE)
    for record in (base, replace(lora, label=HOSTILE), failed):
        record.save(runs_folder)


def test_tables_and_sentences_show_them(hostile_records, capsys, subtests):
    for command in ("records", "compare"):
        with subtests.test(command):
            assert main([command]) == 0
            shown = capsys.readouterr().out
            assert visible(shown) == shown
            assert SHOWN[-20:] in shown


def test_a_file_of_a_hostile_name_is_named(runs_folder, capsys):
    runs_folder.mkdir()
    (runs_folder / "\x1b[31m\u202e.json").touch()
    (runs_folder / os.fsdecode(b"\xff.json")).touch()
    assert main(["records"]) == 0
    warned = capsys.readouterr().err
    assert r"\x1b[31m\u202e.json is not a record" in warned
    assert r"\udcff.json is not a record" in warned
    assert "\x1b" not in warned


HOSTILE_ARGUMENTS = (
    ["run", HOSTILE], ["run", "gpt2-tiny", "--corpus", HOSTILE], ["run", "gpt2-tiny", "--technique", HOSTILE],
    ["run", "gpt2-tiny", "--technique", f"lora={HOSTILE}:3"], ["run", "gpt2-tiny", "--steps", HOSTILE],
    ["run", "gpt2-tiny", "--memory-cap", HOSTILE], ["doctor", HOSTILE], ["records", "--export", HOSTILE],
    ["notebooks", HOSTILE], ["predict", "gpt2", "--gpu", HOSTILE], ["records", "--last", HOSTILE], [HOSTILE],
    ["run", "gpt2-tiny", f"--{HOSTILE}"],
)  # fmt: skip


def test_an_argument_is_quoted_and_refused_with_2(capsys, subtests):
    for arguments in HOSTILE_ARGUMENTS:
        with subtests.test(arguments=arguments):
            try:
                code = main([text.replace("\x00", "") for text in arguments])
            except SystemExit as end:  # of argparse
                code = end.code
            output = capsys.readouterr()
            assert code == 2
            assert visible(output.err) == output.err
            assert r"\x1b" in output.err
            assert not output.out


def test_whatever_a_result_holds_is_printed_without_being_done():
    stream = io.StringIO()
    print_visibly(f"{HOSTILE}\n\x1b[A\x1b[2J", stream)
    assert stream.getvalue() == f"{SHOWN}\n\\x1b[A\\x1b[2J\n"
    print_visibly("to a stream that is closed", None)


# ---- how commands end ----


NO_NUMBERS = (
    (["notebooks", "--at-once", "-5"], "argument --at-once: '-5' is not a number of at least 1."),
    (["notebooks", "--at-once", "0"], "argument --at-once: '0' is not a number of at least 1."),
    (["emulate", "--timeout", "-5", "--", "x"], "argument --timeout: '-5' is not a number of at least 0."),
    (["emulate", "--timeout", "nan", "--", "x"], "argument --timeout: 'nan' is not a number of at least 0."),
    (["emulate", "--ranks", "0", "--", "x"], "argument --ranks: '0' is not a number of at least 1."),
    (["records", "--last", "-1"], "argument --last: '-1' is not a number of at least 1."),
    (["run", "--checkpoint-every", "0"], "argument --checkpoint-every: '0' is not a number of at least 1."),
    (["run", "--sample-tokens", "-1"], "argument --sample-tokens: '-1' is not a number of at least 0."),
    (["plan", "--most-changes", "9" * 5000], "argument --most-changes: '9999"),
)


def test_a_number_that_makes_no_sense_is_refused(capsys, subtests):
    for arguments, message in NO_NUMBERS:
        with subtests.test(message):
            with pytest.raises(SystemExit, match="2"):
                main(arguments)
            assert message in capsys.readouterr().err


BAD_INPUT = (
    (["notebooks", "-p", "steps", "1", "-p", "steps", "2"], "notebooks: steps is given twice. Keep one of the two"),
    (["notebooks", "-p", "x", "[" * 100_000], "notebooks has no parameter 'x'. Known: "),
    (["run", "gpt2-tiny", "--corpus", ""], "recipe: corpus must be a text, not empty"),
    (["run", ""], "recipe: model must be a text, not empty"),
    (["run", "gpt2-tiny", "--corpus", "caf\udce9.txt"], "(rename a file whose name is not), got 'caf\\udce9.txt'."),
    (["run", "gpt2-tiny", "--memory-cap", "99999999999GiB"], "its unit, less than 2^63 bytes in all: 8GiB"),
    (["run", "gpt2-tiny", "--memory-cap", "9" * 400], "is not an amount of memory"),
    (["run", "gpt2-tiny", "--steps", "9" * 19], "recipe: steps must be an integer of at least 1 and below 2^63"),
    (["records", "--export", "/dev/null/runs.csv"], "error: /dev/null: it cannot be a folder (File exists)."),
)


def test_bad_input_is_refused_with_2_before_anything_is_loaded(capsys, monkeypatch, subtests):
    for arguments, message in BAD_INPUT:
        with subtests.test(message), monkeypatch.context() as patch:
            no_text = (lambda _: None) if "--memory-cap" in arguments else (lambda _: pytest.fail("the text was read"))
            patch.setattr("workbench.texts.corpus.load_corpus", no_text)
            assert main(arguments) == 2
            output = capsys.readouterr()
            assert message in output.err
            assert "Traceback" not in output.err
            assert not output.out


def ended(redirection):
    """The exit code of `list` and what it says on standard error, with standard output elsewhere."""
    shell = f'{sys.executable} -m workbench list {redirection}; exit "${{PIPESTATUS[0]}}"'
    process = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    return process.returncode, process.stderr


def test_nobody_who_reads_on_is_no_error(subtests):
    for redirection in ("| head -1", "| true", ">&-", "--help | true"):
        with subtests.test(redirection):
            assert ended(redirection) == (0, "")


def test_an_output_that_is_full_is():
    message = "error: the output: No space left on device. Make room, or name another place.\n"
    assert ended(">/dev/full") == (1, message)
