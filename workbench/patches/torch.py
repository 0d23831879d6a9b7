"""What is replaced in PyTorch."""
