"""Grammars of constrained outputs: constraints of requests, their proof, and masks of the tokens that may follow."""
