"""State dicts of sharded models, and whole parameters for a while."""
