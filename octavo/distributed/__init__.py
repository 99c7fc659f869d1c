"""Training on many ranks: what they decide together, and checkpoints that any number of them can read."""
