"""What a run stores in a checkpoint."""
