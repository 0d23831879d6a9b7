"""The techniques: one file each, and here each class by its name, as `__init__.pyi` tells type checkers and editors."""

from workbench.techniques.base import Capability, Numerics, Technique
from workbench.techniques.registry import REGISTRY, parse_technique, technique

__all__ = ["REGISTRY", "Capability", "Numerics", "Technique", "parse_technique", "technique"]

globals().update({cls.__name__: cls for cls in REGISTRY.values()})
