"""benchmarks/bounds.py: counts and simulation against sums by hand and the figures stated for the rows."""
