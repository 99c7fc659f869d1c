"""The autograd.Functions: products.py writes the three GEMMs of a linear layer once, for all modules."""
