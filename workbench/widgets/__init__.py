"""Recipes by hand in JupyterLab: toggles, a gauge of the predicted memory, live curves. A leaf: nothing imports it."""

from workbench.widgets.playground import Playground

__all__ = ["Playground"]
