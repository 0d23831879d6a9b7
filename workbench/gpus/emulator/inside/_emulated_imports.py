"""Changes of modules, made as soon as a program imports them: whoever imports them before takes decisions from it."""

from __future__ import annotations

import importlib.abc
import importlib.util
from collections.abc import Callable
from typing import Any


class WatchImports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls a function of `watched` with the module of that name when it has been imported, and one of `before` with
    where it was found."""

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
            # who only asks whether there is a PyTorch, as transformers does, imports it later
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
