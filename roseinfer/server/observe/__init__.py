"""Metrics, request records, explanations and traces."""
