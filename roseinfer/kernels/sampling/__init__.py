"""Sampling from logits: masks, the most likely token, and random draws."""
