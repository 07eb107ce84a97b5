"""The formats of tool calls there are. A module here that has a `FORMAT` is one more."""
