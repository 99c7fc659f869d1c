"""Bytes and times of the collectives by which ranks exchange weights and gradients."""
