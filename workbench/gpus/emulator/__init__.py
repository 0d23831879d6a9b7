"""A GPU in software: PyTorch's own CUDA build on libraries that keep the books of memory and compute nothing.

PyTorch's allocator, dispatcher and choice of kernels are the real ones; what they ask of NVIDIA's libraries is answered
by small stubs (`stubs/`, in C), built once for the PyTorch that is there (`build`), for one card of the catalogue
(`card`), in the environment of a child process alone (`launch`). Sizes are true; values are zeros. Nothing here is
measured on a GPU.
"""
