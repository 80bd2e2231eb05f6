"""Layer 0: what the engine decides before any tensor exists (strategies, layouts, groups)."""
