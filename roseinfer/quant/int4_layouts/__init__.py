"""Layouts of weights in four bits in files, each read into the same form."""
