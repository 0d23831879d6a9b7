"""A training step without a GPU and almost without memory: fake tensors through the real model, Trainer and optimizer.

`step` runs a recipe's step and returns its `Trace`, every allocation and free in order. `replay` puts a trace through
the model of a GPU's caching allocator. `patches` makes a CPU choose kernels, precisions and layouts as CUDA does; since
it changes libraries in place, all of this runs in `workbench.prediction.worker`, a process of its own.
"""
