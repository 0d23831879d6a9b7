"""Sequence length: the same text in shorter pieces, and more steps, so that as many tokens are seen."""

from dataclasses import dataclass, replace
from typing import Any

from workbench.settings import setting
from workbench.techniques.base import Call, Capability, Shape, Stage, Technique, equal_parts


def cut_rows(dataset: Any, length: int) -> Any:
    """Rows of `length` tokens, cut from longer ones in their order, in every column; without those in which no label is
    predicted."""

    def cut(rows: Any) -> Any:
        return {name: [r[i : i + length] for r in of for i in range(0, len(r), length)] for name, of in rows.items()}

    rows = dataset.map(cut, batched=True, keep_in_memory=True)
    if "labels" not in rows.column_names:  # all count
        return rows
    return rows.select([i for i, labels in enumerate(rows["labels"]) if {*labels[1:]} != {-100}])


@dataclass(frozen=True)
class SequenceLength(Technique):
    """Trains on blocks that are cut into equal pieces. Evaluation keeps the recipe's blocks: held-out losses compare.

    Training losses do not: a piece begins without context, and of its n tokens only n − 1 are predicted. What is
    learned is for short contexts: with `gpt2-tiny` and 32 instead of 128 tokens, the held-out loss is better within
    the first 32 tokens of a block than with a smaller batch, and worse beyond. The customary learning rate falls with
    the square root of the length, and has to: the held-out loss was 4.32 so, and 4.40 at the full rate (three seeds).
    """

    tokens: int = setting(64, "tokens per training sequence, instead of the recipe's", unit="tokens", minimum=2)

    stage = Stage.EXAMPLES
    worth_trying = ()  # a planner fits the training that was asked for: how far back a model looks is not its choice
    forbids = frozenset({Capability.TRAINING_SET})  # it cuts packed blocks

    def shape(self, shape: Shape) -> Shape:
        given = f"{self.name}: pieces of {self.tokens} tokens", "sequence_length", "lengths", "use a longer one"
        return replace(shape, tokens=self.tokens, steps=shape.steps * equal_parts(shape.tokens, self.tokens, 2, *given))

    def dataset(self) -> Call:
        return Call(cut_rows, {"length": self.tokens})
