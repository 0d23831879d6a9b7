"""Patches of transformers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.base.patches import replace_attribute


@contextmanager
def read_no_values(has_padding: Callable[[], bool]) -> Iterator[None]:
    """Keep transformers 5.x from reading values of tensors: fake ones have none.

    Args:
        has_padding: says whether the batch that a model sees now contains padding, as its mask would.
    """
    from transformers import masking_utils
    from transformers.trainer_pt_utils import EvalLoopContainer

    ignore_by_shape = masking_utils._ignore_causal_mask_sdpa
    find_texts = masking_utils.find_packed_sequence_indices

    def ignore_mask(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        """Say whether the mask masks nothing, which transformers reads off the mask."""
        if padding_mask is not None and has_padding():
            return False
        return ignore_by_shape(None, *args, **kwargs)

    def find_one_text(position_ids: Any) -> None:
        """Say that a row holds one text, which transformers reads off the positions."""
        find_texts(position_ids)  # the call allocates memory, as in a real run

    def empty(losses: Any) -> None:
        losses.__init__()  # the Trainer would read the losses, and empty the container

    with (
        replace_attribute(masking_utils, "_ignore_causal_mask_sdpa", ignore_mask),
        replace_attribute(masking_utils, "find_packed_sequence_indices", find_one_text),
        replace_attribute(EvalLoopContainer, "get_arrays", empty),
    ):
        yield


@contextmanager
def make_arrays_by(numpify: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Let a function of (transformers' own function, tensors) make the arrays that an evaluation keeps on the host."""
    from transformers import trainer_pt_utils

    plain = trainer_pt_utils.nested_numpify
    with replace_attribute(trainer_pt_utils, "nested_numpify", lambda tensors: numpify(plain, tensors)):
        yield


@contextmanager
def look_at_no_device() -> Iterator[None]:
    """Keep `TrainingArguments` from looking at this machine: settings are read for a GPU that it may not have.

    It would let accelerate choose a device for the whole process, reject bf16 and TF32 where there is no GPU, and
    switch TF32 on for the whole process. Needed while transformers 5.x does so in `__post_init__`.
    """
    import torch
    from transformers import TrainingArguments, training_args

    with (
        replace_attribute(TrainingArguments, "device", torch.device("cuda")),
        replace_attribute(training_args, "is_torch_bf16_gpu_available", lambda: True),
        replace_attribute(training_args, "is_torch_tf32_available", lambda: True),
        replace_attribute(training_args, "enable_tf32", lambda enable: None),
    ):
        yield
