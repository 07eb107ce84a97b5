"""Tensor parallelism: each rank's share of a model, and the exchange of sums and columns between ranks."""
