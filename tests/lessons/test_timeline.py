"""The page of a step: what is in it is the timeline's, it is small, and nothing in it can break out of it."""

import base64
import html
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest

from workbench.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS
from workbench.lessons import timeline as page
from workbench.measure.categories import Category, Phase
from workbench.predict.prediction import Prediction
from workbench.predict.tensors import TensorTimeline

MIB = 2**20
ROWS = {category: row for row, category in enumerate(Category)}
HOSTILE = "aten.mm.default in </script><script>document.title='broken'</script><!-- \" ' & \u2028"


def told(tensors, phases, operations=("given", "aten.mm.default in transformer.h.0.mlp")) -> TensorTimeline:
    """From (bytes, born, died, category, maker) of each tensor."""
    columns = zip(*tensors, strict=True)
    nbytes, born, died, category, maker = (np.array(column) for column in columns)
    lives = {"nbytes": nbytes, "born": born, "died": died, "category": category, "maker": maker}
    return TensorTimeline.of(tuple(phases), tuple(operations), **lives)


def one_step(operations=("given", "aten.mm.default in transformer.h.0.mlp", "aten.tanh_backward.default")):
    """Weights, two activations until their backward, a gradient until the optimizer step; then an evaluation."""
    weights, activations, gradients = ROWS[Category.WEIGHTS], ROWS[Category.ACTIVATIONS], ROWS[Category.GRADIENTS]
    tensors = [
        (4 * MIB, 0, -1, weights, 0),
        (8 * MIB, 1, 5, activations, 1),
        (8 * MIB, 2, 4, activations, 1),
        (4 * MIB, 3, 6, gradients, 2),
        (2 * MIB, 7, 8, ROWS[Category.TEMPORARIES], 1),
    ]
    forward, backward, evaluation = [Phase.FORWARD] * 2, [Phase.BACKWARD] * 3, [Phase.EVALUATION] * 2
    return told(tensors, [None, *forward, *backward, Phase.OPTIMIZER_STEP, *evaluation], operations)


def repeated(micro_batches, layers) -> TensorTimeline:
    """A step of many micro-batches: in each layer of each a dozen tensors, of sizes that differ a little."""
    operations = [f"aten.op{i}.default in transformer.h.{k}.mlp" for k in range(layers) for i in range(12)]
    random, tensors, phases, clock = np.random.default_rng(0), [], [None], 1
    tensors.append((500 * MIB, 0, -1, ROWS[Category.WEIGHTS], 0))
    for _ in range(micro_batches):
        made = [
            (int(random.choice((6, 8, 24))) * MIB, clock + i, maker) for i, maker in enumerate(range(len(operations)))
        ]
        clock += 2 * len(made)
        ends = [(size, born, clock - 1 - i, 3, maker) for i, (size, born, maker) in enumerate(made)]
        tensors += ends
        phases += [Phase.FORWARD] * len(made) + [Phase.BACKWARD] * len(made)
    phases[-1] = Phase.OPTIMIZER_STEP
    return told(tensors, phases, operations)


def prediction(timeline, **changes) -> Prediction:
    peak = int(timeline.total.max()) if timeline else 0
    gpu = GPUS["t4"]
    found = Prediction(
        recipe={"sequence_length": 1024}, recipe_id="r", label="baseline", model="gpt2", gpu="t4",
        source="predicted:t4", peak_allocated_bytes=peak + MIB, peak_reserved_bytes=peak + 2 * MIB, by_category={},
        maximum_by_category={}, by_phase={}, peak_phase="backward", peak_operation="", flops=0,
        context_bytes=gpu.context_bytes_estimate, workspace_bytes=0, capacity_bytes=gpu.memory_bytes, padding=False,
        micro_batch_size=8, gradient_accumulation_steps=1, parameters=0, trainable_parameters=0, timeline=timeline,
    )  # fmt: skip
    return replace(found, **changes)


def unpacked(frame):
    """What the page will find in itself."""
    source = html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])
    return json.loads(zlib.decompress(base64.b64decode(re.search(r'PACKED = "([^"]*)"', source)[1])))


def live_of(step):
    """Live bytes by category after every event of the page, from its tensors alone."""
    events, born = len(step["phase"]), np.cumsum(step["born"]) - 1
    change = np.zeros((len(Category), events + 1), dtype=np.int64)
    for size, row, begin, life in zip(step["nbytes"], step["category"], born.tolist(), step["life"], strict=True):
        change[row, max(begin, 0)] += size
        change[row, begin + life] -= size
    return change.cumsum(axis=1)[:, :events]


def test_the_numbers_in_the_page_are_the_timelines():
    timeline = one_step()
    (step,) = unpacked(page.scrubber([prediction(timeline)]))["steps"]
    np.testing.assert_array_equal(live_of(step), timeline.live[:, 1:])  # without what was there before
    assert [step["phases"][code] for code in step["phase"]] == [str(phase) for phase in timeline.phases[1:]]
    assert [step["operations"][i] for i in step["operation"]][:3] == [
        *timeline.operations[1:2] * 2,
        timeline.operations[2],
    ]
    assert step["born"][0] == 0  # the weights: born -1, there before
    assert step["operations"][step["ender"][1]] == "aten.tanh_backward.default"  # what the first activation waits for


def test_small_tensors_are_merged_and_the_bytes_that_remain_are_exact():
    rng = np.random.default_rng(1)
    sizes = [int(size) for size in rng.choice((4, 512, 3000, MIB, 40 * MIB), 400)]
    tensors = [(size, i + 1, -1 if i % 9 == 0 else 801 - i, i % 7, i % 2) for i, size in enumerate(sizes)]
    last = 801
    clock = {born for _, born, _, _, _ in tensors} | {died for _, _, died, _, _ in tensors}
    spare = [(4, event, -1, 5, 0) for event in range(last + 1) if event not in clock]
    phases = [None] + [Phase.FORWARD] * 400 + [Phase.BACKWARD] * (last - 400)
    timeline = told(tensors + spare, phases)
    step = page.step_of(timeline)
    live, wanted = live_of(step), timeline.live[:, 1:]
    assert live.shape[1] < 0.7 * wanted.shape[1]
    assert live.sum(axis=0).max() == timeline.total.max()
    at = 0
    for column in live.T:  # each stands in the timeline, in its order
        found = np.flatnonzero((wanted[:, at:] == column[:, None]).all(axis=0))
        assert found.size
        at += int(found[0])
    np.testing.assert_array_equal(live[:, -1], wanted[:, -1])


def test_of_several_steps_the_last_is_shown_and_the_evaluation_after_it():
    step = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP]
    phases = [None, Phase.EVALUATION, None, *step, None, *step, None, Phase.EVALUATION, None]
    found = page.step_of(told([(MIB, event, -1, 3, 1) for event in range(len(phases))], phases))
    names = ["between" if code < 0 else found["phases"][code] for code in found["phase"]]
    assert names == [*map(str, step), "between", "evaluation"]
    assert live_of(found)[3, 0] == 11 * MIB  # ten were there before


def test_without_an_optimizer_step_all_is_shown():
    found = page.step_of(told([(MIB, 0, -1, 3, 1), (MIB, 1, 2, 3, 1)], [None] * 3))
    assert live_of(found)[3].tolist() == [MIB, 2 * MIB, MIB]


def test_a_hundred_thousand_events_are_less_than_300_kb():
    timeline = repeated(micro_batches=44, layers=96)
    assert len(timeline.phases) > 100_000
    assert len(page.scrubber([prediction(timeline)])) < 300_000


def test_hostile_names_stay_text():
    hostile = one_step(operations=("given", HOSTILE, "x"))
    frame = page.scrubber([prediction(hostile, label='"><script>x</script>', model="<!--")])
    assert unpacked(frame)["steps"][0]["operations"][1] == HOSTILE
    assert frame.count("<") == frame.count(">") == 2  # <iframe …></iframe>
    assert "broken" not in html.unescape(frame)


def test_the_limit_is_the_cards_without_its_context_or_what_is_given():
    found = prediction(one_step())
    (card,) = unpacked(page.scrubber([found]))["steps"]
    assert card["limit"] == found.capacity_bytes - found.context_bytes
    assert "14.6 GiB of NVIDIA T4 less 512 MiB" in card["limit_words"]
    (given,) = unpacked(page.scrubber([found], 10 * MIB))["steps"]
    assert (given["limit"], given["limit_words"]) == (10 * MIB, "the limit of 10.0 MiB")
    on_cpu = prediction(one_step(), gpu="cpu", capacity_bytes=None, peak_reserved_bytes=None)
    assert unpacked(page.scrubber([on_cpu]))["steps"][0]["limit"] is None


def test_what_cannot_be_shown_is_said():
    for nothing in ([], [prediction(None)]):
        with pytest.raises(ConfigurationError, match="has no timeline. Pass what `predict` returned"):
            page.scrubber(nothing)
