"""Layer 4: guards and reports, which find mistakes and tell what happens. Nothing here may change a number."""
