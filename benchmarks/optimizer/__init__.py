"""Optimizer state, updates and FP8 weights."""
