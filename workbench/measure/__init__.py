"""Memory, measured: categories and phases, attribution by a tracker, a meter for every kind of device."""
