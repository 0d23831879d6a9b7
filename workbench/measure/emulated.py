"""Whether this process runs on a GPU in software (`workbench.gpus.emulator`), which keeps books, computing nothing."""

import os

EMULATED = os.environ.get("EMULATED_CARD", "")  # the card's name
NOT_COMPUTED = "emulated GPU: nothing was computed, so there is no loss, no text and no speed"
