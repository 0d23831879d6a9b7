"""A recipe in other forms: a plain Hugging Face script, a file, a command; and others' settings as a recipe."""
