"""Layers that models are built of. They hold shapes until `load` gives them weights. They do not support autograd."""
