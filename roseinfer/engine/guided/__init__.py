"""Constrained outputs: guides, their grammars, and the masks of a step."""
