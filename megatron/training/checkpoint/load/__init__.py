"""Reading checkpoints into a run."""
