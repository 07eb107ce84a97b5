"""Attention over a paged KV store: one interface, several implementations."""
