"""A training step without memory and without a GPU: fake tensors through the real model, Trainer and optimizer.

`step` runs a recipe's step and returns its `Trace`, every allocation and free in order; `replay` puts a trace through
the model of a GPU's caching allocator. `choices` makes a CPU choose kernels, precisions and layouts as CUDA does.
Everything here changes libraries in place: it runs in `workbench.predict.worker`, a process of its own.
"""
