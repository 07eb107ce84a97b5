"""Norms, activations and matrix products, in 16 bits and in FP8."""
