"""Layer 2: parameters and gradients as flat buffers that know their placement."""
