"""What predictions put in the place of techniques whose kernels cannot be traced: a file for each that has some.

They import torch, which techniques do only when they act. Nothing but the technique of that name knows its stand-in.
"""
