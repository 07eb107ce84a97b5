"""Breakdown of the time of a step."""
