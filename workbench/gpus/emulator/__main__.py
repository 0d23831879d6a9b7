"""`python -m workbench.gpus.emulator` is the command `emulate-gpu`."""

import sys

from workbench.gpus.emulator.command import emulate_by_itself

if __name__ == "__main__":
    sys.exit(emulate_by_itself())
