"""The playground in JupyterLab: a recipe by hand, its predicted memory, its training. A leaf: nothing imports it."""

from workbench.widgets.playground import Playground

__all__ = ["Playground"]
