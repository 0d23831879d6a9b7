"""What is replaced in transformers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.base.patches import replaced


@contextmanager
def values_unread(has_padding: Callable[[], bool]) -> Iterator[None]:
    """What transformers 5.x reads off tensors is not read: fake ones have no values.

    Args:
        has_padding: whether the batch that a model sees now contains padding, which its mask would tell.
    """
    from transformers import masking_utils
    from transformers.trainer_pt_utils import EvalLoopContainer

    ignore_by_shape = masking_utils._ignore_causal_mask_sdpa
    find_texts = masking_utils.find_packed_sequence_indices

    def ignore_mask(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        """Reads whether the mask masks anything."""
        if padding_mask is not None and has_padding():
            return False
        return ignore_by_shape(None, *args, **kwargs)

    def find_one_text(position_ids: Any) -> None:
        """Reads whether a row holds several texts."""
        find_texts(position_ids)  # allocates what it allocates

    def empty(losses: Any) -> None:
        losses.__init__()  # the Trainer reads them, and empties the container

    with (
        replaced(masking_utils, "_ignore_causal_mask_sdpa", ignore_mask),
        replaced(masking_utils, "find_packed_sequence_indices", find_one_text),
        replaced(EvalLoopContainer, "get_arrays", empty),
    ):
        yield


@contextmanager
def arrays_made_by(numpify: Callable[[Any, Any], Any]) -> Iterator[None]:
    """The arrays that an evaluation keeps on the host come from this function of (transformers' own, tensors)."""
    from transformers import trainer_pt_utils

    plain = trainer_pt_utils.nested_numpify
    with replaced(trainer_pt_utils, "nested_numpify", lambda tensors: numpify(plain, tensors)):
        yield
