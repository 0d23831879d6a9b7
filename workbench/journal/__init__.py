"""The journal of all runs: one record each, a JSON file; the folder of these; and checkpoints."""
