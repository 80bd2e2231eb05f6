"""Layer 4: what looks for mistakes and tells what happens. Nothing here may change a number."""
