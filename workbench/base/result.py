"""`Result`, the base of every answer, be it a record, a prediction, a plan or an emulation."""

import html
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar


class Result:
    """An answer that prints itself, in a notebook as in a terminal, and becomes JSON from the fields that it names."""

    json_fields: ClassVar[tuple[str, ...]] = ()

    def _repr_html_(self) -> str:
        return f'<pre style="font-family: monospace; white-space: pre-wrap">{html.escape(str(self))}</pre>'

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {name: _plain(getattr(self, name)) for name in self.json_fields}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
