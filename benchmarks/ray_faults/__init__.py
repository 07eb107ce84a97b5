"""Behaviour of a deployment on Ray while its parts are killed, as a table. See `benchmarks.ray_faults.__main__`."""
