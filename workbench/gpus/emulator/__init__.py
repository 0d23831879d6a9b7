"""The emulated GPU: PyTorch's own CUDA build on libraries that keep the books of memory and compute nothing.

PyTorch's allocator, dispatcher and choice of kernels are the real ones. Small stubs (`stubs/`, in C) answer what these
ask of NVIDIA's libraries: they are built once for the installed PyTorch (`build`), play one card of the catalogue
(`card`), and stand in the environment of a child process alone (`launch`). Sizes are true; values are zeros. Nothing
here is measured on a GPU.
"""
