"""Helpers that kernels of several folders share."""
