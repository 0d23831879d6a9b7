"""The search for sets of changes, on a card that is a formula; and once on an emulated one."""

import platform
import re
import sys
import time
from dataclasses import replace

import pytest
from scripts import TRAINER_SCRIPT

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.fit import search
from workbench.fit.card import INTERRUPTED, Card, Use
from workbench.fit.program import Program, Trial, check_trial
from workbench.fit.search import fit
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator.report import TIMED_OUT
from workbench.techniques import Numerics, technique

GIB = 2**30
NOTHING = Use(0, 0, 0)
T4 = Card(find_gpu("t4"))
CALL = {"file": "", "line": 0, "parsed": False, "indirect": False}
SEEN = {
    "ended_by": "steps",
    "kind": "trainer",
    "steps": 3,
    "rows": 8,
    "tokens": 1024,
    "longest_row": 1024,
    "vocabulary": 2**16,
    "sizes": {"weights": GIB, "trained": GIB, "states": 2 * GIB, "peak": 15 * GIB},
    "arguments": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "activation_checkpointing": False,
        "activation_checkpointing_kwargs": None,
    },
    "model": "GPT2LMHeadModel",
    "arguments_call": CALL,
    "trainer_call": CALL,
    "arguments_class": "TrainingArguments",
    "trainer_class": "Trainer",
    "recomputes": False,
    "adapters": [],
    "trained_itemsizes": [4],
    "config": {"model_type": "gpt2", "n_layer": 1, "attn_implementation": "sdpa"},
    "also": [],
}
LEFT = {  # of 6 GiB of activations and 6 of logits
    "gradient_checkpointing": (0.1, 1.0),
    "chunked_cross_entropy": (1.0, 0.0),
    "fused_gelu": (0.8, 1.0),
    "activation_offloading": (0.1, 1.0),
    "mixed_precision": (0.6, 1.0),
}


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(TRAINER_SCRIPT)
    return ["python", str(file)]


@pytest.fixture
def card(monkeypatch):
    """The sets that were run on a card which is a formula."""
    sets = []

    def try_out(program, place, techniques, **_):
        activations, logits = 6.0, 6.0
        for entry in techniques:
            shares = LEFT.get(entry.name, (1.0, 1.0))
            if entry.name == "gradient_accumulation":
                shares = (1 / entry.steps, 1 / entry.steps)
            activations, logits = activations * shares[0], logits * shares[1]
        states = 0.0 if any(entry.name in ("optimizer_offloading", "lora") for entry in techniques) else 2.0
        needed = int((1 + states + max(activations + logits, 2.0)) * GIB)
        sets.append({entry.name for entry in techniques})
        fits = needed <= place.gpu.memory_bytes
        facts = {**SEEN, "ended_by": "steps" if fits else "out of memory"}
        return Trial(tuple(techniques), facts, Use(0, needed, 0), fits, 1.0)

    monkeypatch.setattr(search, "try_out", try_out)
    return sets


def names(answer):
    return set(answer.changes)


def test_what_fits_is_run_once(card, script):
    planned = fit(script, "a100-40gb")
    assert planned.fits
    assert card == [set()]
    assert "it fits, and needs" in str(planned)


def test_small_sets_come_first_and_none_is_extended(card, script):
    planned = fit(script, "t4", budget="14GiB")
    assert [names(answer) for answer in planned.candidates] == [
        {"fused_gelu"}, {"gradient_accumulation"}, {"chunked_cross_entropy"},
    ]  # fmt: skip
    assert card[:2] == [set(), set()]  # on the card, and with room for everything
    assert planned.candidates[1].changes["gradient_accumulation"] == {"steps": 2}  # the gentlest that does
    assert {answer.numerics for answer in planned.candidates} == {Numerics.EXACT}
    assert "batches of 8 × 1,024 tokens, the longest rows" in str(planned)


def test_sets_of_several_changes(card, script):
    planned = fit(script, "t4", budget="5.2GiB")
    assert planned.candidates
    for answer in planned.candidates:
        assert answer.needed_bytes <= 5.2 * GIB
        assert {"gradient_checkpointing", "gradient_accumulation", "activation_offloading"} & names(answer)
    assert len({len(answer.changes) for answer in planned.candidates if answer.numerics is Numerics.EXACT}) == 1


def test_another_training_is_the_last_resort(card, script):
    planned = fit(script, "t4", budget="3.1GiB")
    numerics = [answer.numerics for answer in planned.candidates]
    assert numerics == sorted(numerics, key=list(Numerics).index)


def test_another_kind_of_model_is_changed_by_arguments_alone(card, script, monkeypatch):
    """Its batch stays whole: whether the loss is one of single rows, nobody can say."""
    for name in ("model", "vocabulary", "config"):
        monkeypatch.delitem(SEEN, name)
    fit(script, "t4", budget="8GiB")
    tried = set().union(*card)
    assert tried <= {"allocator", "gradient_checkpointing", "mixed_precision", "optimizer"}
    assert "gradient_checkpointing" in tried


def test_without_the_workbench_functions_are_there_to_be_pasted(card, script, monkeypatch):
    monkeypatch.setattr(search, "find_missing_packages", lambda _: ("no peft",))
    planned = fit(script, "t4", budget="8GiB")
    by_arguments = {"allocator", "gradient_accumulation", "gradient_checkpointing", "mixed_precision", "optimizer"}
    assert set().union(*card) <= by_arguments
    functions = planned.to_dict()["functions"]
    assert "trainer" in functions["chunked_cross_entropy"].splitlines()[-1]
    assert not by_arguments & functions.keys()


def test_smaller_batches_of_a_loss_of_ones_own_are_exact_with_a_condition(card, script, monkeypatch):
    """KTO's loss compares the rows of a batch with each other; TRL's others do not."""
    condition = "only if   the loss of KTOTrainer is a mean over rows or tokens"
    assert condition not in str(fit(script, "t4", budget="14GiB"))
    monkeypatch.setitem(SEEN, "own_loss", "KTOTrainer")
    planned = fit(script, "t4", budget="14GiB")
    with_condition = [names(answer) for answer in planned.candidates if condition in "\n".join(answer.instructions)]
    assert with_condition == [{"gradient_accumulation"}]


def test_a_loop_with_a_model_of_its_own_is_told_what_it_needs(card, script, monkeypatch):
    for name in ("model", "sizes"):
        monkeypatch.delitem(SEEN, name)
    monkeypatch.setitem(SEEN, "kind", "loop")
    planned = fit(script, "t4", budget="8GiB")
    assert planned.needed_bytes == 15 * GIB
    assert "no causal language model" in str(planned)


def test_what_is_there_already_is_not_offered(card, script, monkeypatch):
    monkeypatch.setitem(SEEN, "recomputes", True)
    monkeypatch.setitem(SEEN["arguments"], "fp16", True)
    monkeypatch.setitem(SEEN["config"], "activation_function", "gelu_pytorch_tanh")
    fit(script, "t4", budget="8GiB")
    assert not {"fused_gelu", "gradient_checkpointing", "mixed_precision"} & set().union(*card)


def test_a_loop_has_no_evaluation_that_we_could_run(card, script, monkeypatch):
    monkeypatch.setitem(SEEN, "kind", "loop")
    with pytest.raises(ConfigurationError, match="--life is for scripts with a Trainer"):
        fit(script, "t4", life=True)


def test_nothing_fits(card, script):
    planned = fit(script, "t4", budget="1GiB")
    assert not planned.candidates
    assert "Nothing was found that fits" in str(planned)


def test_what_is_known_when_the_time_is_up_or_it_is_interrupted(card, script, monkeypatch):
    plain = search.try_out

    def slow(*args, **kwargs):
        trial = plain(*args, **kwargs)
        status = INTERRUPTED if len(card) == 4 else 0
        return replace(trial, use=replace(trial.use, exit_status=status), fits=trial.fits and not status)

    monkeypatch.setattr(search, "try_out", slow)
    planned = fit(script, "t4", budget="14GiB")
    assert planned.ended == "interrupted"
    assert len(planned.candidates) == 1
    assert "ended early: interrupted" in str(planned)


def test_a_set_that_the_program_cannot_have_is_told(card, script, monkeypatch):
    plain = search.try_out

    def without_fused(program, place, techniques, **options):
        if "fused_gelu" in {entry.name for entry in techniques}:
            return Trial(tuple(techniques), {"ended_by": "refusal", "refusal": "no"}, NOTHING, False, 1.0)
        return plain(program, place, techniques, **options)

    monkeypatch.setattr(search, "try_out", without_fused)
    planned = fit(script, "t4", budget="14GiB")
    assert dict(planned.skipped) == {"fused_gelu": "no"}
    assert "fused_gelu" not in {name for answer in planned.candidates for name in answer.changes}


def test_what_is_refused_among_others_is_not_tried_again(script, monkeypatch):
    chunked = technique("chunked_cross_entropy")
    fused = technique("fused_gelu")
    facts = {"ended_by": "refusal", "refusal": "chunked_cross_entropy: here compute_loss() makes the loss"}
    monkeypatch.setattr(search, "try_out", lambda *_, **__: Trial((chunked, fused), facts, NOTHING, False, 1.0))
    ends_at = time.monotonic() + 60
    programs = search.ProgramSearch(Program.parse(script), Card(find_gpu("t4")), 3, False, ends_at, lambda _: None)
    programs.run((chunked, fused))
    assert list(programs.skipped) == ["chunked_cross_entropy"]
    assert programs.is_hopeless((chunked, technique("allocator")))
    assert not programs.is_hopeless((fused,))


def test_a_written_script_that_does_not_come_to_its_end_is_not_verified(card, script, monkeypatch):
    planned = fit(script, "t4", budget="14GiB")
    monkeypatch.setattr(search, "write_program", lambda planned, _: (planned.program, []))
    monkeypatch.setattr(search, "try_out", lambda *_, **__: Trial((), {}, Use(TIMED_OUT, 0, 0), False, 1.0))
    ends_at = time.monotonic() + 60
    programs = search.ProgramSearch(Program.parse(script), Card(find_gpu("t4")), 3, False, ends_at, lambda _: None)
    written = search.write_beside(planned, programs)
    assert "not verified, since it did not come to the end of its steps: the time was up" in str(written)
    assert "NOT fit" not in str(written)
    assert written.written_reserved_bytes is None


# ---- programs that do not come to train ----

PROGRAMS = {
    (): "name a program after --",
    ("torchrun", "train.py"): "torchrun may start several processes",
    ("python", "-m", "torch.distributed.run", "train.py"): "may start several processes",
    ("bash", "train.sh"): "'bash' is not Python",
    ("python", "-c", "pass"): "given no script",
    ("python", "-W", "ignore"): "given no script",
    ("python", "nowhere.py"): "no file 'nowhere.py'",
}


@pytest.mark.parametrize("command", PROGRAMS, ids=lambda command: " ".join(command) or "nothing")
def test_a_command_that_is_no_script_of_python(command):
    with pytest.raises(ConfigurationError, match=PROGRAMS[command]):
        Program.parse(command)


def test_the_interpreters_own_options_are_not_the_script(script):
    program = Program.parse(["python", "-W", "ignore", "-u", *script[1:], "-m", "2"])
    assert program.options == ("-W", "ignore", "-u")
    assert program.script == (script[1], "-m", "2")
    assert program.python == sys.executable


ENDINGS = {
    "an error": ({"message": "ValueError: no"}, "failed by itself.*ValueError: no.*Make it run first"),
    "a gated model": (
        {"ended_by": "an error", "message": "OSError: huggingface.co cannot be reached"},
        "network or a login.*HF_HUB_OFFLINE",
    ),
    "a question": (
        {"ended_by": "an error", "message": "EOFError: EOF when reading a line"},
        "somebody at the keyboard.*log in before",
    ),
    "FSDP": (
        {"ended_by": "an error", "message": "ValueError: Using fsdp only works in distributed training."},
        "made for several processes",
    ),
    "an older script": (
        {
            "ended_by": "an error",
            "message": "TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'",
        },
        "older version: tokenizer is processing_class now",
    ),
    "its own exit": ({"exit": "2"}, "ended by itself with '2'.*arguments"),
    "its own end": ({"kind": "", "steps": 0}, "without a Trainer of transformers and without an optimizer"),
    "a Trainer alone": ({"ended_by": "its own end", "kind": "trainer", "steps": 0}, "never called train"),
    "an optimizer alone": ({"ended_by": "its own end", "kind": "loop", "steps": 0}, "never took a step"),
    "several ranks": ({"several": "deepspeed"}, "uses deepspeed"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_does_not_train_is_told_why(ending):
    facts, reason = ENDINGS[ending]
    with pytest.raises(ConfigurationError, match=reason):
        check_trial(Trial((), {"ended_by": ending, "kind": "", **facts}, NOTHING, False, 1.0), 600)


def test_a_model_that_alone_is_too_large_is_no_failure_of_the_program():
    check_trial(Trial((), {"ended_by": "out of memory", "kind": "", "steps": 0}, Use(0, GIB, 0), False, 1.0), 60)


def test_the_other_ends_of_a_program():
    with pytest.raises(ConfigurationError, match="within 60 s"):
        check_trial(Trial((), {}, Use(TIMED_OUT, 0, 0), False, 1.0), 60)
    with pytest.raises(ConfigurationError, match="on the CPU"):
        check_trial(Trial((), SEEN, Use(0, 0, 0, used_a_gpu=False), True, 1.0), 60)
    with pytest.raises(UnavailableError, match="ended from outside"):
        check_trial(Trial((), {}, NOTHING, False, 1.0), 60)


COMMANDS = {
    "plan --technique lora -- python train.py": "technique belongs to a recipe",
    "plan --batch-size 4 -- python train.py": "effective-batch-size belongs to a recipe",
    "plan gpt2 --apply": "--apply, --here, --timeout and --trial-steps belong to a program",
    "plan gpt2 --here": "--apply, --here, --timeout and --trial-steps belong to a program",
    "plan --here --gpu t4 -- python train.py": "--here is the card of this machine, and --gpu another",
    "plan --gpu t4 --budget 20GiB -- python tests/fit/scripts.py": "a NVIDIA T4 has 14.6 GiB",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_says_what_belongs_to_what(command, capsys):
    assert main(command.split()) == 2
    assert re.search(COMMANDS[command], capsys.readouterr().err)


@pytest.mark.parametrize("machine", ["arm64", "AMD64"])
def test_where_there_is_no_emulator_it_is_said_where_there_is(machine, script, monkeypatch, capsys):
    """A Mac, and Windows."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "system", lambda: "Elsewhere")
    assert main(["plan", "--gpu", "t4", "--", *script]) == 3
    complaint = capsys.readouterr().err
    assert f"needs Linux on x86-64; this is Elsewhere on {machine}" in complaint
    assert "on Colab or in a container" in complaint
    assert "plan --here" in complaint


# ---- on an emulated card ----


@pytest.mark.usefixtures("emulator")
def test_the_written_script_takes_the_printed_peak(tmp_path, monkeypatch):
    """To the byte: the file is run by itself, and nothing is put into it from outside."""
    source = TRAINER_SCRIPT.replace("use_cpu=True, ", "").replace("vocab_size=97", "vocab_size=32000")
    source = source.replace("range(16)", "range(512)").replace("n_positions=16", "n_positions=512")
    file = tmp_path / "train.py"
    file.write_text(source)
    monkeypatch.setitem(search.ANSWERS, Numerics.EXACT, 1)
    monkeypatch.setattr(search, "list_choices", lambda *_, **__: [(technique("chunked_cross_entropy"),)])
    planned = fit(["python", str(file)], "t4", budget="1.2GiB", write=True, say=lambda _: None)
    (answer,) = planned.candidates
    assert planned.written_reserved_bytes == answer.reserved_bytes
    assert answer.needed_bytes < 1.2 * GIB < planned.needed_bytes
    assert "apply(Trainer(" in (tmp_path / "train_fits_t4.py").read_text()
    assert not (tmp_path / "somewhere").exists()
