"""Behaviour of the server under faults, as a table. See `benchmarks.faults.__main__`."""
