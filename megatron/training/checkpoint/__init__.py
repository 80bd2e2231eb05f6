"""Checkpoints of a run: where they lie, what they hold, how they are written and read."""
