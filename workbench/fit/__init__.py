"""Somebody's own script: the techniques on its Trainer or loop, and what to change in it so that it fits a card."""
