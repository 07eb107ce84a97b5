"""Estimates of output lengths."""
