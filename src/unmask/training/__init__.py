"""Training: the loop, the state of a run, optimizers and checkpoints."""
