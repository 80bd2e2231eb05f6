"""Reports of a run: log lines, TensorBoard, live progress."""
