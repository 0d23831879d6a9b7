"""Stand-ins for techniques whose kernels cannot be traced, for predictions: a file for each technique that has some.

The files import torch, which techniques do only when they act. A file is imported by the technique of its name alone.
"""
