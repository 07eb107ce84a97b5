"""What the server does when something goes wrong, as a table. See `benchmarks.faults.__main__`."""
