"""Proposers without weights, each in a file of its own."""
