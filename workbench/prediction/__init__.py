"""The memory that a run will need, predicted before it runs."""
