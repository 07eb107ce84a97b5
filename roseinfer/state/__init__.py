"""Recurrent states: what layers without attention keep for each sequence, in slots."""
