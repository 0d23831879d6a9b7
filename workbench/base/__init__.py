"""The ground of all rooms: errors, settings, paths, child processes, units, and patches of other libraries."""
