"""benchmarks/bounds.py: what it counts and simulates, against sums by hand and the figures stated for the rows."""
