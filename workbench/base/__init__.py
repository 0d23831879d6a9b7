"""What all rooms stand on: errors, settings, paths, other processes, units, and what is replaced in other libraries."""
