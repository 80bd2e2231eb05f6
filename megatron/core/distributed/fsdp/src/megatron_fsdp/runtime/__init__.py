"""Layer 3: when the transitions of the layer below run."""
