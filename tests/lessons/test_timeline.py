"""The page of a step: what is in it is the timeline's, it is small, and nothing in it can break out of it."""

import base64
import html
import json
import re
import zlib
from dataclasses import replace

import numpy as np
import pytest

from workbench.base.categories import Category, Phase
from workbench.base.errors import ConfigurationError
from workbench.base.operations import operation_in_words
from workbench.gpus.catalogue import GPUS
from workbench.lessons import timeline as page
from workbench.measure.timeline import LIVES, TensorTimeline
from workbench.prediction.prediction import Prediction

MIB = 2**20
ROWS = {category: row for row, category in enumerate(Category)}
HOSTILE = "aten.mm.default in </script><script>document.title='broken'</script><!-- \" ' & \u2028"


def told(tensors, phases, operations=("given", "aten.mm.default in transformer.h.0.mlp")) -> TensorTimeline:
    """From (bytes, born, died, category, maker) of each tensor."""
    lives = dict(zip(LIVES, map(np.array, zip(*tensors, strict=True)), strict=True))
    change = np.zeros((len(Category), len(phases)), dtype=np.int64)
    np.add.at(change, (lives["category"], lives["born"]), lives["nbytes"])
    ended = lives["died"] >= 0
    np.add.at(change, (lives["category"][ended], lives["died"][ended]), -lives["nbytes"][ended])
    return TensorTimeline(change.cumsum(axis=1), tuple(phases), lives, tuple(operations))


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
        recipe_settings={"sequence_length": 1024}, recipe_id="r", label="baseline", model="gpt2", gpu="t4",
        source="predicted:t4", peak_allocated_bytes=peak + MIB, peak_reserved_bytes=peak + 2 * MIB, by_category={},
        maximum_by_category={}, by_phase={}, peak_phase="backward", peak_operation="", work={},
        context_bytes=gpu.context_bytes_estimate, workspace_bytes=0, capacity_bytes=gpu.memory_bytes, padding=False,
        micro_batch_size=8, gradient_accumulation_steps=1, parameters=0, trainable_parameters=0, has_experts=False,
        timeline=timeline,
    )  # fmt: skip
    return replace(found, **changes)


def unpacked(frame):
    """What the page will find in itself: the steps, the colours, the limit that was given."""
    source = html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])
    return json.loads(zlib.decompress(base64.b64decode(re.search(r'PACKED = "([^"]*)"', source)[1])))


def test_the_timeline_can_be_made_again_from_the_page():
    timeline = one_step()
    (step,), _, _ = unpacked(page.scrubber([prediction(timeline)]))
    live = np.zeros_like(timeline.live)
    born = np.cumsum(step["born"])
    for size, row, begin, life in zip(step["nbytes"], step["category"], born, step["died"], strict=True):
        live[row, begin : None if life < 0 else begin + life] += size
    np.testing.assert_array_equal(live, timeline.live)
    assert step["phases"] == [phase and str(phase) for phase in timeline.phases]
    assert [step["operations"][i] for i in step["maker"]] == [timeline.operations[i] for i in (0, 1, 1, 2, 1)]
    assert step["words"] == ["there before the step", "matrix product", "gradient of tanh"]


def test_what_the_page_says_of_a_prediction_is_the_predictions():
    found = prediction(one_step())
    (step,), colours, limit = unpacked(page.scrubber([found], 10 * MIB))
    assert limit == 10 * MIB
    assert list(colours) == [str(category) for category in Category]
    assert {name: step[name] for name in page.FACTS} == {name: getattr(found, name) for name in page.FACTS}
    assert step["card"] == "NVIDIA T4"


def test_a_hundred_thousand_events_are_less_than_300_kb():
    timeline = repeated(micro_batches=44, layers=96)
    assert len(timeline.phases) > 100_000
    assert len(page.scrubber([prediction(timeline)])) < 300_000


def test_hostile_names_stay_text():
    hostile = one_step(operations=("given", HOSTILE, "x"))
    frame = page.scrubber([prediction(hostile, label='"><script>x</script>', model="<!--")])
    assert unpacked(frame)[0][0]["operations"][1] == HOSTILE
    assert frame.count("<") == frame.count(">") == 4  # <div><iframe …></iframe></div>
    assert "broken" not in html.unescape(frame)


def test_what_cannot_be_shown_is_said():
    for nothing in ([], [prediction(None)]):
        with pytest.raises(ConfigurationError, match="has no timeline. Pass what `predict` returned"):
            page.scrubber(nothing)


def test_operations_have_words_and_one_without_keeps_its_name():
    known = {
        "aten.mm.default": "matrix product",
        "aten._log_softmax_backward_data.default": "gradient of log-softmax of the logits",
        "aten._foreach_sqrt_.default": "square root over many tensors",
        "aten.roll.default": "roll",
        "given": "there before the step",
        "flex_attention in model.layers.0": "flex attention",
    }
    assert {operation: operation_in_words(operation) for operation in known} == known
