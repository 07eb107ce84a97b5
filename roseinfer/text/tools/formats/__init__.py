"""Formats of tool calls. Each module here with a `FORMAT` is registered."""
