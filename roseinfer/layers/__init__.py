"""Layers that models are built of. They hold shapes until `load` gives them weights; nothing here knows autograd."""
