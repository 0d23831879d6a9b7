"""What to change so that a run fits: plan, doctor, pairs."""
