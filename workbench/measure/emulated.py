"""Whether this process runs on a GPU in software (`workbench.gpus.emulator`), which keeps books, computing nothing."""

import os

NOT_COMPUTED = "emulated GPU: nothing was computed, so there is no loss, no text and no speed"


def emulated() -> str:
    """The card's name, or nothing. Asked anew each time: a fork of this process may play another."""
    return os.environ.get("EMULATED_CARD", "")
