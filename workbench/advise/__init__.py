"""What records say, side by side, and what to change so that a run fits: tables, comparisons, plan, doctor, pairs."""
