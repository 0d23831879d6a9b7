"""A recipe as a plain Hugging Face script."""
