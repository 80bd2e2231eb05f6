"""Layer 1: the machine (devices, process groups, collectives, storage)."""
