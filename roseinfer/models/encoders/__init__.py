"""Encoders with two-sided attention. A row of tokens is computed whole in one step, so they need no KV blocks."""
