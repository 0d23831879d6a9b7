"""Sequence length: the text is cut into shorter pieces, and more steps see as many tokens."""

from dataclasses import dataclass, replace
from typing import Any

from workbench.base.settings import setting
from workbench.techniques.base import Call, Capability, Shape, Stage, Technique, equal_parts


def cut_rows(dataset: Any, length: int) -> Any:
    """Cut the rows of a dataset, in every column, into rows of at most `length` tokens.

    Rows without a label to predict, all of them -100 but the first, are left out.
    """

    def cut(columns: Any) -> Any:
        shorter: dict[str, list[Any]] = {}
        for name, rows in columns.items():
            shorter[name] = []
            for row in rows:
                shorter[name] += [row[start : start + length] for start in range(0, len(row), length)]
        return shorter

    rows = dataset.map(cut, batched=True, keep_in_memory=True)
    if "labels" not in rows.column_names:  # every token is a label
        return rows
    predicted = [index for index, labels in enumerate(rows["labels"]) if set(labels[1:]) - {-100}]
    return rows.select(predicted)


@dataclass(frozen=True)
class SequenceLength(Technique):
    """The training blocks are cut into equal pieces. Evaluation keeps the recipe's blocks, so held-out losses compare.

    Training losses do not: a piece begins without context, and of its n tokens only n − 1 are predicted. The model
    learns for short contexts: with `gpt2-tiny` and 32 instead of 128 tokens, the held-out loss is better within
    the first 32 tokens of a block than with a smaller batch, and worse beyond. The customary learning rate falls with
    the square root of the length, and has to: the held-out loss was 4.32 so, and 4.40 at the full rate (three seeds).
    """

    tokens: int = setting(64, "tokens per training sequence, instead of the recipe's", minimum=2)

    stage = Stage.EXAMPLES
    # A planner keeps the training that was asked for, and does not choose how far back a model looks.
    worth_trying = ()
    forbids = frozenset({Capability.TRAINING_SET})  # it cuts packed blocks

    def shape(self, shape: Shape) -> Shape:
        parts = equal_parts(shape.tokens, self.tokens, 2, f"{self.name}: pieces", "sequence_length")
        return replace(shape, tokens=self.tokens, steps=shape.steps * parts)

    def dataset(self) -> Call:
        return Call(cut_rows, {"length": self.tokens})
