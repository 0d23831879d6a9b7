import errno
import gc
import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from every_step import EveryStep
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from workbench.__main__ import main
from workbench.advise.frame import records
from workbench.base.errors import ConfigurationError, OutOfMemoryError, UnavailableError, WorkbenchError
from workbench.journal.record import Record, Status, read_all
from workbench.measure.allocators import live_tensor_bytes
from workbench.models import load
from workbench.models.load import load_config, load_model, load_tokenizer
from workbench.models.source import locate
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, Lora, Technique
from workbench.techniques.base import Call, Stage
from workbench.texts import corpus
from workbench.training import job, watch
from workbench.training.execute import why_diverged
from workbench.training.run import run
from workbench.training.stopwatch import WARM_UP_STEPS


@dataclass(frozen=True)
class Spoil(Technique):
    """Test only: at the n-th training step something happens to the loss."""

    what: str = "nan"
    step: int = 3
    name: ClassVar[str] = "spoil"

    stage: ClassVar[Stage] = Stage.WRAP

    def trainer(self):
        return Call(spoil, self.settings())


def spoil(trainer, what, step):
    compute_loss, steps = trainer.compute_loss, iter(range(1, 1000))

    def spoiled(model, *args, **kwargs):
        loss = compute_loss(model, *args, **kwargs)
        if not model.training or next(steps) != step:
            return loss
        if what in ("nan", "inf"):
            return loss * float(what)
        raise {
            "oom": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
            "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
            "cpu": RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
            ),
            "interrupt": KeyboardInterrupt(),
            "failure": ZeroDivisionError("something broke"),
        }[what]

    trainer.compute_loss = spoiled


def only_record(folder):
    (record,) = read_all(folder)
    return record


@pytest.fixture(scope="module")
def three(recipe):
    """Enough for a record, and quick."""
    return replace(recipe, steps=3)


# ---- a run that goes well ----


def test_a_run_leaves_the_record_it_returns(recipe, fine_tuned):
    record = fine_tuned(recipe)
    folder = Path(record.model_path).parent.parent
    assert record in read_all(folder)
    assert record.status is Status.OK
    assert record.error == ""


def test_the_record_has_what_really_happened(recipe, fine_tuned):
    record = fine_tuned(recipe)
    assert record.model == recipe.model
    assert record.dtype == "float32"
    assert (record.rank, record.world_size) == (0, 1)
    assert (record.device_kind, record.threads) == ("cpu", torch.get_num_threads())
    assert record.device == f"{record.device_name} (cpu, {record.threads} threads)"
    assert (record.steps_done, record.micro_batch_size, record.gradient_accumulation_steps) == (6, 8, 1)
    assert record.tokens_seen == 6 * 8 * 32
    assert record.learning_rate == recipe.learning_rate
    assert record.data_sha256 == corpus.load_corpus(recipe.corpus).sha256
    assert record.memory_source == "cpu-tracker"
    c, layers = 64, 2
    assert record.parameters == 4096 * c + 128 * c + layers * (12 * c * c + 13 * c) + 2 * c


def test_it_learns_and_every_step_has_its_loss(recipe, fine_tuned):
    record = fine_tuned(recipe)
    assert len(record.losses) == 6
    assert record.losses[0] == pytest.approx(math.log(4096), rel=0.02)  # new weights know nothing
    assert record.held_out_loss_before == pytest.approx(math.log(4096), rel=0.02)
    assert record.held_out_loss < record.held_out_loss_before - 0.1


def test_the_held_out_loss_is_that_of_every_held_out_block(recipe, fine_tuned):
    """Not only of as many as fill whole batches: then it would depend on the batch."""
    record = fine_tuned(recipe)
    source = locate(record.model_path)
    model = load_model(source, load_config(source)).eval()
    blocks = corpus.make_blocks(corpus.load_corpus(recipe.corpus), load_tokenizer(source), recipe.sequence_length, 1)
    ids = torch.tensor(blocks.held_out["input_ids"])
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert record.held_out_loss == pytest.approx(loss, rel=1e-5)


def test_fewer_held_out_blocks_than_a_batch_are_enough(three, text_file, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(text_file.read_text(encoding="utf-8")[:3000], encoding="utf-8")
    record = run(replace(three, corpus=str(short)), device="cpu")
    assert record.status is Status.OK
    assert record.held_out_loss > 0


def test_memory_adds_up(recipe, fine_tuned):
    record = fine_tuned(recipe)
    assert sum(record.by_category.values()) == record.peak_allocated_bytes
    assert record.by_category["unattributed"] == 0
    assert record.maximum_by_category["weights"] == 4 * record.parameters
    assert record.maximum_by_category["gradients"] == 4 * record.parameters
    assert record.peak_allocated_bytes > 16 * record.parameters


def test_speed_leaves_the_warm_up_out(recipe, fine_tuned, three):
    record = fine_tuned(recipe)
    assert record.timed_steps == recipe.steps - WARM_UP_STEPS
    assert record.tokens_per_s == pytest.approx(8 * 32 / record.step_time_s)
    short = fine_tuned(three)
    assert (short.timed_steps, short.step_time_s, short.tokens_per_s) == (0, None, None)


def test_the_same_recipe_gives_the_same_numbers_and_leaves_no_tensors_behind(three, fine_tuned):
    first = fine_tuned(three)
    torch.manual_seed(12345)
    gc.collect()
    before = live_tensor_bytes("cpu")
    second = run(three, device="cpu")
    gc.collect()
    assert live_tensor_bytes("cpu") <= before
    assert first.id != second.id
    assert first.losses == second.losses
    assert first.held_out_loss == second.held_out_loss
    assert first.peak_allocated_bytes == second.peak_allocated_bytes
    assert first.by_category == second.by_category


def test_another_seed_gives_other_numbers(three, fine_tuned):
    assert fine_tuned(three).losses != fine_tuned(replace(three, seed=1)).losses


def test_sampling_text_changes_no_loss(three, fine_tuned):
    record = run(three, device="cpu", sample_tokens=8)
    assert record.losses == fine_tuned(three).losses
    assert record.text_before != record.text_after
    prompt = corpus.prompt(corpus.load_corpus(three.corpus))
    assert record.text_before.startswith(prompt)
    assert record.text_after.startswith(prompt)


# ---- saving ----


def test_the_fine_tuned_model_is_kept_and_loads(recipe, fine_tuned):
    """A run that starts from the saved model starts where the other ended."""
    record = fine_tuned(recipe)
    further = run(replace(recipe, model=record.model_path, steps=1), device="cpu")
    assert further.held_out_loss_before == pytest.approx(record.held_out_loss, rel=1e-6)


def test_an_adapter_is_kept_and_loads(recipe, tmp_path):
    record = run(recipe | Lora(), device="cpu", save="adapter")
    further = run(replace(recipe, model=record.model_path, steps=1), device="cpu")
    assert (Path(record.model_path) / "adapter_model.safetensors").exists()
    assert further.held_out_loss_before == pytest.approx(record.held_out_loss, rel=1e-6)


def test_an_unknown_form_is_refused_before_anything_happens(three, runs_folder):
    with pytest.raises(ConfigurationError, match="save must be one of merged, adapter or None, got 'whole'"):
        run(three, device="cpu", save="whole")
    assert not runs_folder.exists()


def test_an_adapter_of_a_recipe_without_one_is_refused_before_training(three, runs_folder):
    with pytest.raises(ConfigurationError, match="trains no adapter"):
        run(three, device="cpu", save="adapter")
    assert not list(runs_folder.glob("*.json"))


# ---- reuse ----


@pytest.fixture
def answered(monkeypatch):
    """The record with which `run` answers from what is on record; None where it would load a model and train."""

    class LoadedError(Exception):
        pass

    def loading(*_, **__):
        raise LoadedError

    def answer(recipe, **options):
        with monkeypatch.context() as patch:
            patch.setattr(load, "load_model", loading)
            try:
                return run(recipe, device="cpu", **{"reuse": True, **options})
            except LoadedError:
                return None

    return answer


@pytest.fixture
def one_step(recipe):
    return replace(recipe, steps=1)


def test_a_run_that_was_done_is_reused_and_another_is_not(
    one_step, answered, runs_folder, text_file, tmp_path, monkeypatch
):
    path = tmp_path / "mine.txt"
    path.write_text(text_file.read_text(encoding="utf-8"), encoding="utf-8")
    mine = replace(one_step, corpus=str(path))
    done = run(mine, device="cpu")
    assert answered(mine) == done
    assert read_all(runs_folder) == [done]
    assert answered(replace(mine, corpus=str(text_file))) is None  # another name, although the text is the same
    assert answered(replace(mine, seed=1)) is None
    assert answered(mine, reuse=False) is None
    assert answered(mine, save="merged") is None
    assert answered(mine, sample_tokens=4) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 64)
        assert answered(mine) is None
    assert answered(mine) == done
    path.write_text(text_file.read_text(encoding="utf-8") + " One word more.", encoding="utf-8")
    assert answered(mine) is None


def test_a_run_on_another_processor_is_not_reused(one_step, answered, runs_folder):
    done = run(one_step, device="cpu")
    replace(done, device_name="another processor").save(runs_folder)
    assert answered(one_step) is None


def test_a_run_with_sample_texts_is_reused_where_they_are_asked_for(one_step, answered):
    sampled = run(one_step, device="cpu", sample_tokens=4)
    assert answered(one_step, sample_tokens=4) == sampled


def test_a_model_in_a_folder_may_have_changed_and_is_not_reused(one_step, answered, fine_tuned):
    from_folder = replace(one_step, model=fine_tuned(one_step).model_path)
    run(from_folder, device="cpu")
    assert answered(from_folder) is None


# ---- runs that go wrong ----


def test_weights_that_are_no_numbers_are_named_and_not_the_rate(one_step, fine_tuned, tmp_path):
    folder = shutil.copytree(fine_tuned(one_step).model_path, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.0.mlp.c_fc.weight"][0, 0] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    record = run(replace(one_step, model=str(folder)), device="cpu")
    assert record.status is Status.DIVERGED
    assert "the loss of the model as it was loaded is not a finite number" in record.error
    assert "learning rate" not in record.error


def test_a_loss_that_is_no_number_ends_the_run_as_diverged(three, tmp_path, subtests):
    for what in ("nan", "inf"):
        with subtests.test(what=what):
            folder = tmp_path / what
            record = run(three | Spoil(what, step=3), device="cpu", folder=folder)
            assert record.status is Status.DIVERGED
            assert record == only_record(folder)
            assert record.steps_done == 3
            assert len(record.losses) == 2
            assert all(loss > 1 for loss in record.losses)  # and never a zero
            assert record.held_out_loss is None
            assert "2 good steps" in record.error


def test_diverged_at_the_first_step_the_record_is_still_json_and_a_row(three, runs_folder):
    record = run(three | Spoil("nan", step=1), device="cpu")
    assert (record.status, record.losses, record.held_out_loss) == (Status.DIVERGED, [], None)
    (path,) = runs_folder.glob("*.json")
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert records(runs_folder)["status"].tolist() == ["diverged"]


@pytest.mark.values
def test_a_learning_rate_that_is_far_too_large_is_a_divergence_with_its_cure(recipe, answered):
    too_fast = replace(recipe, learning_rate=10.0)
    record = run(too_fast, device="cpu")
    assert record.status is Status.DIVERGED
    assert "Lower the learning rate, which was 10." in record.error
    assert (
        record.held_out_loss is None
        or f"the held-out loss rose from {record.held_out_loss_before:.3f} to " in record.error
    )
    assert all(loss > 0 for loss in record.losses)
    assert records()["status"].tolist() == ["diverged"]
    assert answered(too_fast) is None


LOSSES = (  # held-out loss before and after, size of the vocabulary, whether that is a divergence
    (5.9, 15_589.0, 4096, True),
    (5.9, 8.5, 4096, True),  # a blind guess has 8.318
    (5.9, 8.3, 4096, False),  # bad, and no worse than knowing nothing
    (5.454, 6.282, 4096, False),  # one step of a trained model at the customary rate
    (3.4, 11.0, 50_257, True),
    (10.97, 10.99, 50_257, False),  # new weights begin a little above the 10.825 of a blind guess
    (10.825, 10.92, 50_257, False),
    (10.9, 12.0, 50_257, True),
    (14.0, 14.1, 50_257, False),  # virtual tokens of new weights may begin high
    (14.0, 9.0, 50_257, False),
    (14.0, 15.0, 50_257, True),
    (5.9, math.nan, 4096, True),
    (5.9, math.inf, 4096, True),
    (5.9, -math.inf, 4096, True),
    (None, math.nan, 4096, True),
    (None, 0.0, 4096, False),  # an emulated GPU computes nothing
    (None, 99.0, 4096, False),
    (0.0, 0.0, 1, False),
    (1e30, 2e30, 4096, True),
)


def test_the_rule_of_a_divergence(subtests):
    for before, after, vocabulary, diverged in LOSSES:
        with subtests.test(before=before, after=after, vocabulary=vocabulary):
            record = replace(Record.start(Recipe()), held_out_loss_before=before, learning_rate=3e-3, losses=[6.0, 5.0])
            reason = ""
            if diverged and math.isfinite(after):
                guessing = math.log(vocabulary)
                reason = f"the held-out loss rose from {before:.3f} to {after:,.3f}; blind guessing has {guessing:.3f}."
            elif diverged:
                reason = "the loss was not a finite number after 2 good steps."
            cure = " Lower the learning rate, which was 0.003." if diverged else ""
            assert why_diverged(record, after, vocabulary) == reason + cure


@pytest.mark.values
def test_an_honest_short_run_of_new_weights_has_not_diverged(recipe, subtests):
    for steps, rate in ((1, None), (2, 1e-9), (5, None)):
        with subtests.test(steps=steps, rate=rate):
            assert run(replace(recipe, steps=steps, learning_rate=rate), device="cpu").status is Status.OK


@pytest.mark.values
def test_what_diverged_is_named_and_never_ranked(three, fine_tuned, runs_folder, capsys):
    fine_tuned(three).save(runs_folder)
    run(replace(three, learning_rate=10.0) | GradientCheckpointing(), device="cpu")
    assert read_all(runs_folder)[-1].status is Status.DIVERGED
    assert main(["compare"]) == 0
    output = capsys.readouterr().out
    assert "not ranked: gradient_checkpointing: diverged. the " in output
    assert "gradient_checkpointing" not in output.partition("not ranked")[0]


def test_running_out_of_memory_is_recorded_and_said_with_a_cure_and_the_error_holds_none_of_it(
    three, tmp_path, subtests
):
    message = "spoil.* did not fit into the memory of .* Use a smaller effective_batch_size .* fused_gelu, .* doctor$"
    gc.collect()
    before = live_tensor_bytes("cpu")
    for what in ("oom", "cublas", "cpu"):
        with subtests.test(what=what):
            folder = tmp_path / what
            with pytest.raises(OutOfMemoryError, match=message) as caught:
                run(three | Spoil(what, step=2), device="cpu", folder=folder)
            record = only_record(folder)
            assert record.status is Status.OOM
            assert record.error
            assert record.held_out_loss_before > 0
            assert sum(record.by_category.values()) == record.peak_allocated_bytes > 0
            gc.collect()
            assert caught.value.__context__ is None
            assert live_tensor_bytes("cpu") - before < 100_000  # the model alone has 1.5 MB
            assert _get_current_dispatch_mode_stack() == []


def test_an_interrupted_run_is_recorded(three, runs_folder):
    with pytest.raises(KeyboardInterrupt):
        run(three | Spoil("interrupt", step=2), device="cpu")
    assert only_record(runs_folder).status is Status.INTERRUPTED
    assert _get_current_dispatch_mode_stack() == []


def test_a_failure_is_recorded_with_its_reason_and_raised_and_harms_no_later_run(three, fine_tuned, runs_folder):
    failing = three | Spoil("failure")
    with pytest.raises(ZeroDivisionError):
        run(failing, device="cpu")
    record = only_record(runs_folder)
    assert record.status is Status.FAILED
    assert record.error == "ZeroDivisionError: something broke"
    assert _get_current_dispatch_mode_stack() == []
    with pytest.raises(ZeroDivisionError):
        run(failing, device="cpu", reuse=True)
    assert run(three, device="cpu", reuse=True).losses == fine_tuned(three).losses
    assert [record.status for record in read_all(runs_folder)] == [Status.FAILED, Status.FAILED, Status.OK]


# ---- what is refused before the model loads, with nothing recorded ----


@pytest.fixture
def no_loading(monkeypatch):
    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("the weights were loaded"))


REFUSED = (
    ({"corpus": "nope.txt"}, "there is no file 'nope.txt'"),
    ({"model": "./nope"}, "'./nope' is neither an existing folder nor a hub id"),
    ({"sequence_length": 129}, "sequence_length 129 is beyond the 128 positions"),
    ({"effective_batch_size": 100_000}, "a batch needs 100000"),
)


@pytest.mark.usefixtures("no_loading")
def test_bad_input_is_refused_before_the_model_loads(three, runs_folder, subtests):
    for change, message in REFUSED:
        with subtests.test(change=change):
            with pytest.raises(ConfigurationError) as caught:
                run(replace(three, **change), device="cpu")
            assert message in str(caught.value)
            assert not runs_folder.exists()


def test_a_device_that_is_not_there_is_refused(no_loading, three, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="PyTorch sees no cuda device"):
        run(three, device="cuda")


def test_more_sample_tokens_than_the_model_has_positions_are_refused(no_loading, three, runs_folder):
    with pytest.raises(ConfigurationError, match="positions"):
        run(three, device="cpu", sample_tokens=128)
    assert not runs_folder.exists()


def test_auto_is_recorded_as_what_it_stands_for(text_file):
    asked = Recipe(model="auto", corpus=str(text_file), effective_batch_size=4, sequence_length=128, steps=1)
    record = run(asked, device="cpu")
    assert record.model == record.recipe.model == "gpt2-tiny"


def test_what_a_killed_run_has_measured_is_on_disk_by_then(three, tmp_path, monkeypatch):
    """A kill leaves no word: what is read while the run goes on is all that would be there."""
    monkeypatch.setattr(watch, "WRITE_EVERY_S", 0.0)
    monkeypatch.setattr(watch, "WRITE_SHARE", math.inf)
    on_disk = []
    looking = EveryStep(lambda: on_disk.append(only_record(tmp_path)))
    run(three, device="cpu", callbacks=[looking], folder=tmp_path)
    assert [(record.status, record.steps_done) for record in on_disk] == [
        (Status.RUNNING, steps) for steps in (1, 2, 3)
    ]
    assert len(on_disk[-1].losses) == 2  # that of a step is logged after its end
    assert on_disk[-1].peak_allocated_bytes > 0


def test_a_disk_that_fills_up_in_the_middle_is_told_with_folder_and_cure(three, tmp_path, subtests):
    for number, words in ((errno.ENOSPC, "No space left on device"), (errno.EDQUOT, "Disk quota exceeded")):

        def fail(number=number, words=words):
            raise OSError(number, words)

        with subtests.test(words=words):
            folder = tmp_path / str(number)
            with pytest.raises(WorkbenchError) as caught:
                run(three, device="cpu", callbacks=[EveryStep(fail)], folder=folder)
            assert str(caught.value) == (
                f"run: nothing can be written into {folder} ({words}). Free some space, or set WORKBENCH_RUNS to "
                "another folder."
            )
            assert caught.value.__context__ is None
            record = only_record(folder)
            assert (record.status, record.error) == (Status.FAILED, str(caught.value))


def test_another_errors_own_words_are_kept(three, runs_folder):
    def fail():
        raise FileNotFoundError(2, "No such file or directory", "/my/file")

    with pytest.raises(FileNotFoundError):
        run(three, device="cpu", callbacks=[EveryStep(fail)])
    assert only_record(runs_folder).error == "FileNotFoundError: [Errno 2] No such file or directory: '/my/file'"


@pytest.mark.usefixtures("no_loading")
def test_a_folder_that_cannot_be_written_to_is_refused_before_the_text_is_read(three, subtests):
    for folder in ("/proc/nope", "/dev/null", "/dev/null/runs"):
        message = f"^folder: nothing can be written into {folder} .*set WORKBENCH_RUNS"
        with subtests.test(folder=folder), pytest.raises(ConfigurationError, match=message):
            run(replace(three, corpus="nope.txt"), device="cpu", folder=Path(folder))


def test_what_lacks_a_package_leaves_the_unfinished_run_as_it_was(three, runs_folder, monkeypatch):
    """It could not be resumed any more if it were marked as unavailable."""
    unfinished = replace(Record.start(three), status=Status.INTERRUPTED)
    unfinished.save(runs_folder)
    monkeypatch.setattr(job, "why_not_on_device", lambda *_: "lora needs a package.")
    with pytest.raises(UnavailableError):
        run(three, device="cpu", resume=True)
    assert [record.status for record in read_all(runs_folder)] == [Status.INTERRUPTED, Status.UNAVAILABLE]
