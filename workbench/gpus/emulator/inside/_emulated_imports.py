"""Changes of modules as soon as a program imports them: an import before the program's own might change the program."""

from __future__ import annotations

import importlib.abc
import importlib.util
from collections.abc import Callable
from typing import Any


class WatchImports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder and loader that calls functions at the imports of some modules.

    Args:
        watched: functions by the name of a module: each is called with the module when it has been imported.
        before: functions by the name of a module: each is called with the module's spec before the import.
    """

    def __init__(
        self, watched: dict[str, Callable[[Any], None]], before: dict[str, Callable[[Any], None]] | None = None
    ) -> None:
        self.watched = watched
        self.before = before or {}
        self.loaders: dict[str, Any] = {}
        self.asks_others_for: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.watched or name in self.asks_others_for:
            return None
        self.asks_others_for.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            # A library that only asks whether there is a PyTorch, as transformers does, imports it later, and the
            # finder must watch that import.
            self.asks_others_for.discard(name)
        if spec is not None and spec.loader is not None:
            if name in self.before:
                self.before[name](spec)
            self.loaders[name] = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self.loaders[spec.name].create_module(spec)

    def exec_module(self, module: Any) -> None:
        loader = self.loaders[module.__name__]
        module.__spec__.loader = module.__loader__ = loader
        loader.exec_module(module)
        self.watched[module.__name__](module)
