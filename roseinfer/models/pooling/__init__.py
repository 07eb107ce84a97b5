"""Embeddings and scores: their description in a model's folder, and the parts that compute them."""
