"""The memory a run will need, said before it runs."""
