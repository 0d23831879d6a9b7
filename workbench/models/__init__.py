"""What is trained: model families, where their weights come from, loading and saving."""
