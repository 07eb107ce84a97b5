"""Attention over the paged KV cache, and the preparation of queries, keys and values for it."""
