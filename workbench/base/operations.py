"""What PyTorch's operations do, in words for people: `aten.mm.default` is a matrix product."""

import re

from workbench.base.paths import beside

WORDS: dict[str, str] = beside(__file__, "operations.json")


def operation_in_words(operation: str) -> str:
    """`aten._log_softmax_backward_data.default` is the gradient of log-softmax of the logits, as in the step to drag.

    One that has no words keeps its name, without dots and underscores.
    """
    _, _, after_library = operation.partition(".")
    name = (after_library.partition(".")[0] or operation).strip("_")
    of_one_tensor = name.removeprefix("foreach_")
    forward = re.sub(r"_backward(_data)?$", "", of_one_tensor)
    description = WORDS.get(forward, forward.replace("_", " "))
    if forward != of_one_tensor:
        description = f"gradient of {description}"
    return description if of_one_tensor == name else f"{description} over many tensors"
