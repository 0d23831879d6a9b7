"""GPUs on a machine that has none: a catalogue of cards, a model of PyTorch's allocator, and an emulated GPU."""
