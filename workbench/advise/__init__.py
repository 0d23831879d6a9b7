"""Advice: tables and comparisons of records, and the changes with which a run fits (plan, doctor, scan, pairs)."""
