"""Mixtures of experts: the router, and products of tokens sorted by expert."""
