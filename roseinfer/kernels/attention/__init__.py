"""Attention over the paged KV cache, and what prepares queries, keys and values for it."""
