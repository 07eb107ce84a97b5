"""Helpers that several policies share."""
