"""The state of a run that a checkpoint holds."""
