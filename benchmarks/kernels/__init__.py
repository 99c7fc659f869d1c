"""Kernels and a layer on a GPU, beside others' and the roofline."""
