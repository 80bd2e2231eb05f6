"""Layer of optimizers: steps on local rows, their state, and the gradient norm."""
