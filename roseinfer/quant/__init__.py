"""Formats of weights, each a file: how a linear layer's checkpoint tensors are read, and how it multiplies by them."""
