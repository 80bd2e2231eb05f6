"""Checkpoints without a run: what tools/checkpoint.py uses."""
