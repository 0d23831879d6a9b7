"""What runs leave behind: one JSON file each, the folder of them, checkpoints."""
