"""The names of PyTorch's operations in words for people: `aten.mm.default` is a matrix product."""

import re

from workbench.base.paths import read_beside

WORDS: dict[str, str] = read_beside(__file__, "operations.json")


def operation_in_words(operation: str) -> str:
    """Say what an operation does: `aten._log_softmax_backward_data.default` is the gradient of log-softmax of the
    logits, as in the step to drag.

    An operation that has no words in `operations.json` keeps its name, without dots and underscores.
    """
    function = operation.partition(" in ")[0]
    _, _, after_library = function.partition(".")
    name = (after_library.partition(".")[0] or function).strip("_")
    of_one_tensor = name.removeprefix("foreach_")
    forward = re.sub(r"_backward(_data)?$", "", of_one_tensor)
    description = WORDS.get(forward, forward.replace("_", " "))
    if forward != of_one_tensor:
        description = f"gradient of {description}"
    return description if of_one_tensor == name else f"{description} over many tensors"
