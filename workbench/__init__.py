"""Learn, measure and choose memory-saving techniques for fine-tuning GPT-2::

    from workbench import Recipe, run
    from workbench.techniques import Lora

    record = run(Recipe(model="gpt2-tiny") | Lora(rank=8))

Importing the package is light: torch and transformers come with the first name that needs them.
"""

import ast
import logging
from pathlib import Path
from typing import Any

from workbench.base.imports import import_quickly

__version__ = "0.3.0"

# bitsandbytes, which PEFT imports, remarks on a faster kernel that only another package has
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# torchao, which transformers and PEFT import, tells of kernels for other cards, torch of how torchao registers, and of
# Triton that is missing where it counts operations
for _name in ("torchao", "torch.utils._pytree", "torch.utils.flop_counter"):
    logging.getLogger(_name).setLevel(logging.ERROR)

# The names stand once, as imports in the stub: type checkers follow them there, here each waits for its first use.
_HOMES = {
    name.name: str(line.module)
    for line in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(line, ast.ImportFrom)
    for name in line.names
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a name of the front door at its first use.

    Raises UnavailableError if it needs a package of an extra that is not installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    home = import_quickly(_HOMES[name])
    if not hasattr(home, name):  # a module of the package `home`, which nobody has imported yet
        import_quickly(f"{_HOMES[name]}.{name}")
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
