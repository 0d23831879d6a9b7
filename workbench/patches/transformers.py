"""What is replaced in transformers."""
