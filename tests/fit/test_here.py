"""Programs on the card of this machine. No test here has one: PyTorch's answers are written down, or emulated."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from scripts import TRAINER_SCRIPT
from test_search import SEEN

from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.fit import card as cards
from workbench.fit import inside, search
from workbench.fit.card import Card, CardHere, Use, card_here
from workbench.fit.program import Program, Trial, try_out
from workbench.fit.search import fit
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator.launch import emulate
from workbench.techniques import technique

GIB = 2**30
FACTS = {
    "count": 1,
    "name": "Tesla T4",
    "capability": [7, 5],
    "multiprocessors": 40,
    "total_bytes": 15 * GIB,
    "free_bytes": 14 * GIB,
}
SAVED = {"chunked_cross_entropy": 6 * GIB, "fused_gelu": GIB, "gradient_checkpointing": 5 * GIB}
HERE = CardHere(replace(gpu("t4"), title="Tesla T4"), free_bytes=14 * GIB)


def answered(monkeypatch, **facts):
    answer = subprocess.CompletedProcess([], 0, stdout=json.dumps({**FACTS, **facts}))
    monkeypatch.setattr(cards.subprocess, "run", lambda *_, **__: answer)


def test_the_card_is_what_pytorch_says_of_it(monkeypatch):
    answered(monkeypatch)
    card = card_here(sys.executable, None)
    assert (card.gpu.memory_bytes, card.gpu.context_bytes) == (15 * GIB, gpu("t4").context_bytes)
    assert card.name == "Tesla T4"
    assert card.share == 1
    assert "of which 14.0 GiB were free" in card.room
    assert "measured on Tesla T4" in card.source
    answered(monkeypatch, name="Somebody's 9000", capability=[9, 9])
    assert card_here(sys.executable, None).gpu.name == "here"


def test_a_budget_is_the_share_that_the_allocator_gets(monkeypatch):
    answered(monkeypatch)
    card = card_here(sys.executable, "8GiB")
    assert card.gpu.memory_bytes == 8 * GIB
    assert card.share * 15 * GIB == pytest.approx(8 * GIB - card.gpu.context_bytes_estimate)
    assert "CUDA's context, an estimate" in card.source
    with pytest.raises(ConfigurationError, match=r"budget: a Tesla T4 has 15.0 GiB"):
        card_here(sys.executable, "16GiB")


def test_without_a_card_and_with_several_it_is_refused_by_name(monkeypatch):
    answered(monkeypatch, count=0, torch="2.13.0+cpu")
    with pytest.raises(UnavailableError, match=r"--here needs a card with CUDA.*2.13.0\+cpu sees none.*--gpu t4"):
        card_here(sys.executable, None)
    answered(monkeypatch, count=2)
    with pytest.raises(UnavailableError, match=r"sees 2 cards.*CUDA_VISIBLE_DEVICES=0"):
        card_here(sys.executable, None)


def test_an_interpreter_without_pytorch_is_told(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(UnavailableError, match="cannot be asked for the card.*No module named torch"):
        card_here(str(python), None)


def test_what_a_run_took_is_what_it_reports(tmp_path):
    report = tmp_path / "report.json"
    used = {"card": {"reserved": 5 * GIB, "refusals": 1, "beside": GIB}}
    command = [sys.executable, "-c", f"open({str(report)!r}, 'w').write({json.dumps(used)!r})"]
    assert HERE.run(command, report, 60, history=False) == Use(0, 5 * GIB, GIB, 1)
    with_budget = replace(HERE, budget_bytes=8 * GIB).run(command, report, 60, history=False)
    assert with_budget.beside_bytes == HERE.gpu.context_bytes_estimate
    report.unlink()
    too_long = HERE.run([sys.executable, "-c", "import time; time.sleep(60)"], report, 0.2, history=False)
    assert too_long.timed_out
    assert not too_long.used_a_gpu


def test_ctrl_c_ends_a_run(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cards.subprocess, "run", interrupted)
    assert HERE.run(["python"], tmp_path / "report.json", 60, history=False).interrupted


def test_what_the_program_reports_of_its_card(monkeypatch):
    """Peaks that the program counts anew are kept; its allocator gets its share; a step is timed."""
    run = inside.Run({"share": 0.5, "timed": True, "steps": 3, "life": False})
    shares = []
    memory = SimpleNamespace(reset_peak_memory_stats=lambda: None, max_memory_reserved=lambda: 7 * GIB)
    run.keep_peaks(memory)
    memory.reset_peak_memory_stats()
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        mem_get_info=lambda: (8 * GIB, 15 * GIB),
        max_memory_reserved=lambda: 5 * GIB,
        memory_reserved=lambda: 4 * GIB,
        memory_stats=lambda: {"num_ooms": 2},
        synchronize=lambda: None,
        _lazy_call=lambda call: call(),
        set_per_process_memory_fraction=shares.append,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert run.measure_card() == {"reserved": 7 * GIB, "refusals": 2, "beside": 3 * GIB}
    run.limit_memory(cuda)
    assert shares == [0.5]
    run.on_step(1)
    assert "step_time_s" not in run.facts
    run.on_step(2)
    assert run.facts["step_time_s"] >= 0


# ---- the search ----


@pytest.fixture
def planned_here(monkeypatch, tmp_path):
    """Plans for a card with 8 GiB, on which 6 GiB of activations and 6 of logits want to be."""

    def try_out(program, card, techniques, **_):
        needed = 15 * GIB - sum(SAVED[entry.name] for entry in techniques)
        fits = needed <= card.gpu.memory_bytes
        facts = {**SEEN, "step_time_s": 2.0 - needed / (15 * GIB)}
        if not fits:
            message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
            sizes = {"weights": GIB, "trained": GIB, "states": 0, "peak": 7 * GIB}
            facts |= {"ended_by": "out of memory", "steps": 0, "message": message, "sizes": sizes}
        return Trial(tuple(techniques), facts, Use(0, min(needed, card.gpu.memory_bytes), 0), fits, 1.0)

    here = replace(HERE, gpu=replace(HERE.gpu, memory_bytes=8 * GIB))
    monkeypatch.setattr(search, "try_out", try_out)
    monkeypatch.setattr(search, "list_choices", lambda *_, **__: [(technique(name),) for name in SAVED])
    monkeypatch.setattr(search, "card_here", lambda *_: here)
    monkeypatch.setattr(CardHere, "enlarge", lambda *_: None)
    (tmp_path / "train.py").write_text(TRAINER_SCRIPT)
    return lambda **options: fit(["python", str(tmp_path / "train.py")], here=True, **options)


def test_what_it_had_when_it_died_decides_what_is_tried(planned_here):
    lines = []
    planned = planned_here(say=lines.append)
    assert "out of memory; what it had by then decides what is tried first" in lines
    assert [set(answer.changes) for answer in planned.candidates] == [
        {"chunked_cross_entropy", "fused_gelu"}, {"chunked_cross_entropy", "gradient_checkpointing"},
    ]  # fmt: skip
    assert planned.is_least
    assert "it needs more than" in str(planned)


def test_nothing_that_was_measured_is_called_emulated(planned_here):
    planned = planned_here()
    assert "emulated" not in str(planned)
    assert "measured on Tesla T4" in str(planned)
    assert planned.device == "Tesla T4"
    times = [answer.step_time_s for answer in planned.candidates]
    assert times == sorted(times)
    assert f"{times[0]:.3g} s a step" in str(planned)


def test_what_room_an_emulated_card_has_is_called_so(planned_here, monkeypatch):
    monkeypatch.setattr(CardHere, "enlarge", lambda *_: Card(replace(gpu("t4"), memory_bytes=80 * GIB)))
    assert "it needs 15.0 GiB, on an emulated card" in str(planned_here())


@pytest.mark.usefixtures("emulator")
def test_an_emulated_card_in_place_of_a_real_one(tmp_path, capfd):
    """Under `emulate` a card is here; what is said of the script is what the emulator says of it."""
    file = tmp_path / "train.py"
    file.write_text(TRAINER_SCRIPT.replace("use_cpu=True, ", "").replace("vocab_size=97", "vocab_size=32000"))
    emulated = try_out(Program.parse(["python", str(file)]), Card(gpu("t4")), steps=3, time_limit_s=300)
    capfd.readouterr()
    plan = [sys.executable, "-m", "workbench", "plan", "--here", "--json", "--", "python", str(file)]
    assert emulate(plan, gpu("t4"), history=False).exit_status == 0
    planned = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert planned["fits"]
    assert planned["device"] == "Tesla T4 (emulated)"
    assert planned["needed_bytes"] == emulated.needed_bytes
