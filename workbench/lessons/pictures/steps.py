"""Pictures of a step over time: the kept bytes rise and fall."""

from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import WIDTH, Drawing
from workbench.lessons.pictures.by_hand import Stack, bytes_over_step, peak_bytes, token_bytes

GAP = 24  # units between two hills
LANE = 90  # units: the height of the fullest moment of a card or a host
# the bytes of one parameter
PARAMETER = (
    (4, Category.WEIGHTS, "weight: 4"),
    (4, Category.GRADIENTS, "gradient: 4"),
    (8, Category.OPTIMIZER_STATES, "AdamW's two averages: 8"),
)
OF_A_BATCH = (Category.GRADIENTS, Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)


def hill_of_a_step(config: Any, sequences: int, length: int) -> Drawing:
    """Lesson 00: draw a parameter and a token in bytes.

    Below them stand the steps of one sequence, of `sequences`, and of twice as many.
    """
    steps = {}
    for batch in sorted({1, sequences, 2 * sequences}):
        step = bytes_over_step(config, batch * length)
        steps[f"{batch} × {length}: {format_bytes(peak_bytes(step))}"] = step
    picture = Drawing(
        "A parameter has 16 bytes: 4 of weight, 4 of gradient, 8 of AdamW's averages. "
        "A token has activations and logits. The steps stand on the same floor, "
        f"and the hill on it grows with the tokens; peaks: {', '.join(steps)}."
    )
    picture.title("a parameter: 16 bytes")
    picture.bar(0, 0, 24, PARAMETER, WIDTH / 16)
    token = token_bytes(config)
    whole = sum(token.values())
    picture.title(f"a token: {format_bytes(whole)}")
    parts = []
    for category, size in token.items():
        parts.append((size, category, f"{category.partition('_')[0]}: {format_bytes(size)}"))
    picture.bar(0, 0, 24, parts, WIDTH / whole)
    picture.title("a step of so many tokens: forward → backward → AdamW")
    width = (WIDTH + GAP) / len(steps)
    scale = 176 / max(map(peak_bytes, steps.values()))
    for number, (label, step) in enumerate(steps.items()):
        picture.hill(number * width, 176, width - GAP, step, scale)
        picture.text(number * width, 194, label)
    return picture


def step_in_parts(config: Any, sequences: int, length: int, parts: int) -> Drawing:
    """Lesson 02: draw activations, logits and gradients over the time of one step, whole above and in `parts` below."""
    whole = _forward_and_back(config, sequences * length)
    first = _forward_and_back(config, sequences * length // parts)
    gradients = bytes_over_step(config, 1)[-1][Category.GRADIENTS]
    # after the first part all gradients are there
    later = [stack | {Category.GRADIENTS: max(gradients, stack[Category.GRADIENTS])} for stack in first]
    rows = {
        f"1 × {sequences} sequences": whole,
        f"{parts} × {sequences / parts:g} sequences; gradients wait for the end": first + (parts - 1) * later,
    }
    peaks = list(map(peak_bytes, rows.values()))
    picture = Drawing(
        f"With one batch of {sequences} sequences, "
        f"activations and logits rise to {format_bytes(peaks[0])} and fall while the gradients "
        f"come. In {parts} parts they rise {parts} times, to a part of that, "
        "and from the second part on all gradients lie under them: "
        f"{format_bytes(peaks[1])} at most."
    )
    scale = 104 / max(peaks)
    for (title, stacks), peak in zip(rows.items(), peaks, strict=True):
        picture.title(f"{title}: {format_bytes(peak)} at most")
        picture.hill(0, peak * scale, WIDTH, stacks, scale)
    picture.legend(*OF_A_BATCH)
    picture.text(WIDTH, 11, "weights and states are left out", anchor="end")
    return picture


def _forward_and_back(config: Any, tokens: int) -> list[Stack]:
    """Return the bytes of the categories that change while a batch is computed, without AdamW's step at the end."""
    stacks: list[Stack] = []
    for stack in bytes_over_step(config, tokens)[:-2]:
        stacks.append({category: stack[category] for category in OF_A_BATCH})
    return stacks


def offloaded_step(config: Any, sequences: int, length: int) -> Drawing:
    """Lesson 10: draw a step in two lanes, the card's and the host's, with what moves between them, to one scale."""
    layers = config.n_layer
    step = bytes_over_step(config, sequences * length)
    on_card: list[Stack] = []
    on_host: list[Stack] = []
    for stack in step:
        states = stack[Category.OPTIMIZER_STATES]
        activations = stack[Category.ACTIVATIONS]
        # the card has the activations of one block at most
        at_work = min(activations, step[0][Category.ACTIVATIONS])
        on_card.append(stack | {Category.ACTIVATIONS: at_work, Category.OPTIMIZER_STATES: 0})
        on_host.append({Category.OPTIMIZER_STATES: states, Category.ACTIVATIONS: activations - at_work})
    picture = Drawing(
        "Two lanes over the time of one step. In the forward pass the activations of each block "
        "leave the card and pile up on the host; in the backward pass they come back, "
        "those of the last block first. AdamW's states lie on the host all the time, "
        "and pass through the card piece by piece in the optimizer step."
    )
    scale = LANE / max(peak_bytes(on_card), peak_bytes(on_host))
    floor = 20 + peak_bytes(on_card) * scale
    host_floor = floor + 32 + peak_bytes(on_host) * scale
    picture.title("on the card; below it, on the host")
    picture.hill(0, floor, WIDTH, on_card, scale)
    picture.hill(0, host_floor, WIDTH, on_host, scale)
    column = WIDTH / len(step)
    for instant in range(2 * layers + 3):
        x = (instant + 0.5) * column
        if instant < layers or instant > 2 * layers:
            picture.line(x - 3, floor + 4, x - 3, floor + 28, "arrow")
        if instant > layers:
            picture.line(x + 3, floor + 28, x + 3, floor + 4, "arrow")
    for phase, instant in {"forward": 0, "loss, backward": layers, "step": 2 * layers + 1}.items():
        picture.line(instant * column, 0, instant * column, host_floor, "dashed")
        picture.text(instant * column + 4, 11, phase)
    colours = {}
    for category in step[0]:
        most = max(stack[category] for stack in step)
        colours[f"{category}, {format_bytes(most)}"] = category
    picture.legend(others=colours)
    return picture
