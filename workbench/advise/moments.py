"""The moment of a run in which an out-of-memory message came, told from the functions that its traceback names."""

import re
from typing import NamedTuple

from workbench.measure.out_of_memory import find_all

PAGE = "docs/symptoms.md"
LOADING = ("Loading the model",)
STEPPING = ("The first step", "Later, or more than before")
AROUND = ("Evaluating, saving, resuming, running again",)

# A frame, as Python, IPython and rich write it: `trainer.py", line 9, in train`, `trainer.py:9, in Trainer.train(`.
FRAME = re.compile(r"([^\s\"]*)\.py\"?(?:, line \d+|:\d+)?,? in ([\w.]+)")
MESSAGES = (rb"out\s+of\s+memory", rb"not enough memory")
TRACEBACK = "Traceback (most recent call last)"
LONGEST_TRACEBACK = 2**17  # bytes before the message that are searched for one


class Moment(NamedTuple):
    """A moment of a run.

    Attributes:
        doing: what the run does then, as the end of a sentence.
        functions: the functions that are called for it, of PyTorch, transformers, PEFT and TRL: one of them is enough.
        sections: the sections of the page of symptoms that go on from there.
    """

    doing: str
    functions: frozenset[str]
    sections: tuple[str, ...]


# The first of these that fits counts: the forward pass of an evaluation is an evaluation.
MOMENTS = (
    Moment(
        "while a model was prepared for QLoRA",
        frozenset({"prepare_model_for_kbit_training", "prepare_model_for_int8_training"}),
        LOADING,
    ),
    Moment("while the best checkpoint was loaded", frozenset({"_load_best_model"}), AROUND),
    Moment(
        "while a checkpoint was loaded, to resume",
        frozenset({"_load_from_checkpoint", "_load_optimizer_and_scheduler"}),
        AROUND,
    ),
    Moment("while an adapter was merged", frozenset({"merge_and_unload", "merge_adapter"}), AROUND),
    Moment(
        "while it was saving",
        frozenset({"_save_checkpoint", "_save_optimizer_and_scheduler", "_save_to_state_dict", "save_model"}),
        AROUND,
    ),
    Moment("while the model was loaded", frozenset({"from_pretrained", "_move_model_to_device"}), LOADING),
    Moment("while it generated", frozenset({"generate", "_generate_and_score_completions"}), AROUND),
    Moment("while it evaluated", frozenset({"evaluate", "evaluation_loop", "prediction_step"}), AROUND),
    Moment("in the optimizer's step", frozenset({"step"}), STEPPING),
    Moment("in the backward pass", frozenset({"backward"}), STEPPING),
    Moment("in the forward pass", frozenset({"forward"}), STEPPING),
)


def moment_of(text: str) -> str:
    """Return a sentence about the moment of a text's first message, told from the traceback before it, with the
    sections of the page of symptoms that go on from there. It is empty where no traceback says it."""
    content = text.encode("utf-8", "replace")
    end = find_all(MESSAGES, content.lower())[:1] or [len(content)]
    before = content[max(end[0] - LONGEST_TRACEBACK, 0) : end[0]].decode("utf-8", "replace").rpartition(TRACEBACK)[2]
    functions = set()
    for path, name in FRAME.findall(before):
        function = name.rpartition(".")[2]
        # A program's own `step` may be a whole pass; only an optimizer's counts.
        if function != "step" or "optim" in path:
            functions.add(function)
    for moment in MOMENTS:
        if moment.functions & functions:
            sections = ", or, if it ran for a while, ".join(f"“{section}”" for section in moment.sections)
            return f"It died {moment.doing}: {PAGE}, {sections}."
    return ""
